"""The figures of the mismatch: what is drawn over which tokens, what is left out, and where a zero stands."""

from __future__ import annotations

from typing import Any

import pytest

from headway.reports import trust_figures
from headway.reports.record import RunRecord, read_run
from headway.reports.trust_numbers import lag_buckets, mean_over_tokens, position_buckets, thirds


@pytest.fixture
def run_of(write_run, make):
    """Metrics of each step -> the record of a run of these steps."""

    def record(*rows: dict[str, Any]) -> RunRecord:
        steps = [event for n, row in enumerate(rows) for event in make.step(n + 0.5, n + 1.0, n, [0, 0], **row)]
        return read_run(write_run([make.began(0), *steps]))

    return record


def _traces(figure: Any) -> dict[str, list[Any]]:
    assert figure is not None
    return {trace.name: list(trace.y) for trace in figure.data}


def test_sources_and_canaries_share_one_log_axis_with_zeros_as_marks(run_of) -> None:
    row = {"tokens": 10.0, "tokens/numerics": 4.0, "tokens/staleness": 6.0, "mismatch_kl_k3": 1e-3}
    run = run_of(
        {**row, "mismatch_kl_k3/numerics": 0.0, "mismatch_kl_k3/staleness": 2e-3, "canary_kl_k3": 1e-7},
        {"tokens": 10.0, "tokens/staleness": 10.0, "mismatch_kl_k3": 1e-3, "mismatch_kl_k3/staleness": 1e-3},
    )
    figure: Any = trust_figures.mismatch(run)
    curves = {trace.name: list(trace.y) for trace in figure.data if trace.type == "scatter"}
    assert curves == {
        "all trained tokens": [1e-3, 1e-3],
        "staleness, older versions": [2e-3, 1e-3],
        "numerics, newest version alone: exactly 0": pytest.approx([1e-8]),
        "canaries": [1e-7, None],
    }
    bars = {trace.name: list(trace.y) for trace in figure.data if trace.type == "bar"}
    assert bars == {"staleness, older versions": [0.6, 1.0], "numerics, newest version alone": [0.4, 0.0]}


def test_an_older_run_without_sources_shows_what_it_has(run_of) -> None:
    assert _traces(trust_figures.mismatch(run_of({"mismatch_kl_k3": 1e-3}))) == {"all trained tokens": [1e-3]}


@pytest.mark.parametrize(
    "figure",
    ["mismatch", "buckets", "estimates", "ratios", "corrections", "cost", "interpolation", "entropy"],
)
def test_what_was_not_measured_is_not_drawn(run_of, figure: str) -> None:
    assert getattr(trust_figures, figure)(run_of({"reward_mean": 1.0, "tokens": 3.0})) is None


def test_buckets_are_means_over_their_tokens_in_each_third_of_the_run(run_of) -> None:
    rows = [
        {
            "tokens": 10.0 + step,
            "tokens/lag_0": 10.0,
            "mismatch_kl_k3/lag_0": 1e-6,
            **({"tokens/lag_10": float(step), "mismatch_kl_k3/lag_10": 1e-3 * step} if step else {}),
        }
        for step in range(6)
    ]
    figure = trust_figures.buckets(run_of(*rows))
    traces = _traces(figure)
    assert traces.pop("of the tokens") == pytest.approx([60 / 75, 15 / 75])
    assert list(traces) == ["steps 1–2", "steps 3–4", "steps 5–6"]
    assert traces["steps 3–4"] == pytest.approx([1e-6, (2 * 2e-3 + 3 * 3e-3) / 5])
    assert list(figure.data[0].x) == ["0", "10"]


def test_one_bucket_alone_tells_nothing_apart(run_of) -> None:
    row = {"tokens": 1.0, "tokens/lag_0": 1.0, "tokens/position_0_15": 1.0, "mismatch_kl_k3/lag_0": 1e-3}
    assert trust_figures.buckets(run_of(row)) is None


def test_corrections_by_reason_and_sign(run_of) -> None:
    figure: Any = trust_figures.corrections(
        run_of(
            {
                "acted_share/tis": 0.1,
                "acted_share/clip": 0.0,
                "acted_share/tis/positive": 0.3,
                "acted_share/tis/lag_1": 1,
            }
        )
    )
    assert [(trace.name, trace.xaxis, list(trace.y)) for trace in figure.data] == [
        ("tis", "x", [0.1]),
        ("clip", "x", [0.0]),
        ("tis", "x2", [0.3]),
    ]
    assert [title.text for title in figure.layout.annotations] == ["all trained tokens", "those with A > 0"]


def test_the_cost_is_a_factor_of_variance(run_of) -> None:
    traces = _traces(trust_figures.cost(run_of({"ess_share": 0.9, "chi2_token": -0.01, "chi2_sequence": 3e9})))
    assert traces == {"of the trained tokens": [0.9], "of tokens": [0.99], "of whole answers": [3e9 + 1]}


def test_a_run_that_knew_the_effective_sample_size_alone(run_of) -> None:
    assert _traces(trust_figures.cost(run_of({"ess_share": 0.9}))) == {"of the trained tokens": [0.9]}


def test_entropy_of_the_first_the_middle_and_the_last_stretch(run_of) -> None:
    stretches = ("0_15", "16_31", "32_63", "64_127", "128_255")
    places = {f"tokens/position_{name}": 1.0 for name in stretches} | {"tokens": 5.0}
    entropies = {f"entropy/position_{name}": 0.1 * place for place, name in enumerate(stretches)}
    traces = _traces(trust_figures.entropy(run_of({"entropy": 0.2, **places, **entropies})))
    assert list(traces) == [
        "tokens 0–15 of the response",
        "tokens 32–63 of the response",
        "tokens 128–255 of the response",
        "all trained tokens",
    ]


def test_buckets_are_in_the_order_of_their_numbers() -> None:
    steps = [{"version": 1, "tokens": 4.0, "tokens/lag_10": 1.0, "tokens/lag_9": 3.0, "tokens/numerics": 0.0}]
    assert [(bucket.label, bucket.share) for bucket in lag_buckets(steps)] == [("9", 0.75), ("10", 0.25)]
    assert position_buckets(steps) == []


def test_means_count_each_token_once() -> None:
    steps = [
        {"version": 1, "tokens": 1.0, "x": 4.0, "tokens/lag_1": 3.0, "x/lag_1": 1.0},
        {"version": 2, "tokens": 3.0, "x": 0.0, "tokens/lag_1": 1.0, "x/lag_1": None},
        {"version": 3, "x": 100.0},
    ]
    assert mean_over_tokens(steps, "x") == 1.0
    assert mean_over_tokens(steps, "x", "lag_1") == 1.0
    assert mean_over_tokens(steps, "y") is None


@pytest.mark.parametrize(("num", "sizes"), [(0, []), (1, [1]), (5, [5]), (6, [2, 2, 2]), (8, [2, 3, 3])])
def test_thirds(num: int, sizes: list[int]) -> None:
    assert [len(part) for _, part in thirds([{"version": n} for n in range(num)])] == sizes
