"""Mismatch metrics: the golden vectors, worked values, and honest results when there is nothing to measure."""

from __future__ import annotations

import math

import pytest
import torch

from headway.objectives.diagnostics import QUANTILES, MismatchDiagnostics

NAN, INF = float("nan"), float("inf")


def measured(log_ratios: list[float], *, cap: float | None = None, **columns: list[float]) -> dict[str, float]:
    """Metrics of tokens with the given `log pi - log mu`; columns not given are neutral."""
    num_tokens = len(log_ratios)
    behaviour_N = torch.full((num_tokens,), -1.0, dtype=torch.float64)
    entropy = columns.get("entropy")
    diagnostics = MismatchDiagnostics(cap)
    diagnostics.add(
        logp_N=behaviour_N + torch.tensor(log_ratios, dtype=torch.float64),
        behaviour_N=behaviour_N,
        mask_N=torch.tensor(columns.get("mask", [1] * num_tokens), dtype=torch.bool),
        lag_N=torch.tensor(columns.get("lag", [0] * num_tokens), dtype=torch.long),
        position_N=torch.tensor(columns.get("position", list(range(num_tokens))), dtype=torch.long),
        advantage_N=torch.tensor(columns.get("advantage", [0.0] * num_tokens)),
        entropy_N=None if entropy is None else torch.tensor(entropy),
    )
    return diagnostics.result()


@pytest.mark.parametrize(
    ("log_ratio", "k1", "k3"),
    [(-0.5, 0.5, 0.106531), (-0.1, 0.1, 0.00483742), (0.0, 0.0, 0.0), (0.1, -0.1, 0.00517092), (0.5, -0.5, 0.148721)],
)
def test_golden_vector_kl_estimators(log_ratio, k1, k3):
    metrics = measured([log_ratio])
    assert metrics["mismatch_kl_k1"] == pytest.approx(k1, abs=1e-12)
    assert metrics["mismatch_kl_k3"] == pytest.approx(k3, rel=1e-5, abs=1e-15)


def test_golden_vector_effective_sample_size():
    assert 4 * measured([math.log(w) for w in (1, 1, 1, 5)])["ess_share"] == pytest.approx(2.28571, abs=5e-6)


def test_both_estimators_are_exact_when_tokens_come_in_the_proportions_of_mu():
    mu = [0.5, 0.25, 0.25]
    pi = [0.2, 0.5, 0.3]
    kl = sum(m * math.log(m / p) for m, p in zip(mu, pi, strict=True))
    metrics = measured([math.log(pi[token] / mu[token]) for token in (0, 0, 1, 2)])
    assert metrics["mismatch_kl_k1"] == pytest.approx(kl, abs=1e-12)
    assert metrics["mismatch_kl_k3"] == pytest.approx(kl, abs=1e-12)


def test_small_mismatch_is_not_lost_to_rounding():
    assert measured([1e-8])["mismatch_kl_k3"] == pytest.approx(5e-17, rel=1e-6, abs=0)


def test_equal_policies():
    metrics = measured([0.0] * 5, cap=2.0, advantage=[1, 1, -1, -1, 0])
    assert metrics["ess_share"] == 1
    assert metrics["mismatch_kl_k1"] == metrics["mismatch_kl_k3"] == metrics["max_abs_log_ratio"] == 0
    assert {metrics[key] for key in metrics if key.startswith("ratio_")} == {1.0}
    assert (
        metrics["weight_capped_share"]
        == metrics["weight_capped_share_positive"]
        == metrics["weight_capped_share_negative"]
        == 0
    )


def test_weight_capped_share_by_sign_of_the_advantage():
    metrics = measured([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], cap=2.0, advantage=[1, 1, -1, -1, -1, 0])
    assert metrics["weight_capped_share"] == pytest.approx(4 / 6)
    assert metrics["weight_capped_share_positive"] == pytest.approx(1 / 2)
    assert metrics["weight_capped_share_negative"] == pytest.approx(2 / 3)


def test_shares_without_tokens_or_without_a_cap_are_left_out():
    metrics = measured([1.0], cap=2.0, advantage=[1])
    assert metrics["weight_capped_share_positive"] == 1
    assert "weight_capped_share_negative" not in metrics
    assert not any(key.startswith("truncated") for key in measured([1.0], advantage=[1]))
    assert "entropy" not in metrics


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 100])
def test_quantiles_are_exact(num_tokens):
    log_ratio_N = torch.randn(num_tokens, generator=torch.Generator().manual_seed(num_tokens), dtype=torch.float64)
    ratio_N = log_ratio_N.exp()
    metrics = measured(log_ratio_N.tolist())
    for share in QUANTILES:
        assert metrics[f"ratio_q{round(100 * share):02d}"] == pytest.approx(ratio_N.quantile(share).item(), rel=1e-12)
    assert metrics["ratio_min"] == pytest.approx(ratio_N.min().item(), rel=1e-12)
    assert metrics["ratio_max"] == pytest.approx(ratio_N.max().item(), rel=1e-12)
    assert metrics["max_abs_log_ratio"] == pytest.approx(log_ratio_N.abs().max().item(), rel=1e-12)


def test_buckets_of_lag_and_position():
    metrics = measured([0.1, 0.5, 0.5, 0.0], lag=[0, 3, 3, 0], position=[0, 15, 16, 70])
    assert (metrics["tokens/lag_0"], metrics["tokens/lag_3"]) == (2, 2)
    assert metrics["mismatch_kl_k3/lag_0"] == pytest.approx(0.00517092 / 2, rel=1e-5)
    assert metrics["mismatch_kl_k3/lag_3"] == pytest.approx(0.148721, rel=1e-5)
    positions = {key: value for key, value in metrics.items() if key.startswith("tokens/position")}
    assert positions == {"tokens/position_0_15": 2, "tokens/position_16_31": 1, "tokens/position_64_127": 1}
    assert metrics["mismatch_kl_k3/position_16_31"] == pytest.approx(0.148721, rel=1e-5)


def test_entropy_is_a_mean_over_trained_tokens():
    assert measured([0.0] * 3, mask=[1, 0, 1], entropy=[1.0, NAN, 2.0])["entropy"] == 1.5


def test_masked_tokens_are_never_looked_at():
    garbage = measured(
        [0.1, NAN, 0.5], cap=2.0, mask=[1, 0, 1], lag=[0, -9, 1], position=[0, -1, 2], advantage=[1, NAN, -1]
    )
    assert garbage == measured([0.1, 0.5], cap=2.0, lag=[0, 1], position=[0, 2], advantage=[1, -1])


def test_nonfinite_log_ratios_are_counted_and_left_out():
    metrics = measured([0.1, NAN, INF, -INF])
    assert (metrics["tokens"], metrics["nonfinite_tokens"]) == (1, 3)
    assert metrics["mismatch_kl_k1"] == pytest.approx(-0.1)


def test_enormous_ratios_stay_finite():
    metrics = measured([900.0, -900.0, 0.0], cap=2.0)
    assert metrics["max_abs_log_ratio"] == 900
    assert metrics["ratio_max"] == pytest.approx(math.exp(20))
    assert all(math.isfinite(value) for value in metrics.values())


def test_nothing_to_measure():
    nothing = {"tokens": 0.0, "nonfinite_tokens": 0.0}
    assert MismatchDiagnostics(cap=2.0).result() == nothing
    assert measured([], cap=2.0) == nothing
    assert measured([0.1, NAN], cap=2.0, mask=[0, 0]) == nothing


def test_entropies_for_some_micro_batches_only_are_refused():
    column = torch.ones(1)
    diagnostics = MismatchDiagnostics()
    diagnostics.add(column, column, column.bool(), column.long(), column.long(), column, entropy_N=column)
    with pytest.raises(AssertionError, match="every micro-batch"):
        diagnostics.add(column, column, column.bool(), column.long(), column.long(), column)
