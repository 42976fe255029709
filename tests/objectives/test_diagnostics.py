"""Mismatch metrics: the golden vectors, worked values, and honest results when there is nothing to measure."""

from __future__ import annotations

import math

import pytest
import torch

from headway.objectives.compose import TokenAux
from headway.objectives.diagnostics import QUANTILES, MismatchDiagnostics
from headway.objectives.tokens import Tokens

NAN, INF = float("nan"), float("inf")


def table(
    log_ratios: list[float], **columns: list[float]
) -> tuple[torch.Tensor, Tokens, torch.Tensor | None, TokenAux]:
    """What `add` takes, for tokens with the given `log pi - log mu`; columns not given are neutral.

    acted: a column of 0 and 1 for the reason "tis"; reference: log pi - log ref.
    """
    num_tokens = len(log_ratios)

    def column(name: str, neutral: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor(columns.get(name, [neutral] * num_tokens), dtype=dtype)

    behaviour_N = torch.full((num_tokens,), -1.0, dtype=torch.float64)
    logp_N = behaviour_N + torch.tensor(log_ratios, dtype=torch.float64)
    tokens = Tokens(
        mask_N=column("mask", 1, torch.bool),
        rollout_N=column("rollout", 0, torch.long),
        group_N=column("rollout", 0, torch.long),
        behaviour_N=behaviour_N,
        lag_N=column("lag", 0, torch.long),
        advantage_N=column("advantage", 0.0),
        weights=(),
        reference_N=logp_N - column("reference", 0.0) if "reference" in columns else None,
        position_N=torch.tensor(columns.get("position", list(range(num_tokens))), dtype=torch.long),
    )
    neutral_N = torch.ones(num_tokens)
    acted = {"tis": column("acted", 0, torch.bool)} if "acted" in columns else {}
    error_N = column("error", 0.0) if "error" in columns else None
    aux = TokenAux(neutral_N, neutral_N, neutral_N, acted, neutral_N, error_N)
    return logp_N, tokens, column("entropy", 0.0) if "entropy" in columns else None, aux


def measured(log_ratios: list[float], **columns: list[float]) -> dict[str, float]:
    diagnostics = MismatchDiagnostics()
    count(diagnostics, log_ratios, **columns)
    return diagnostics.result()


def count(diagnostics: MismatchDiagnostics, log_ratios: list[float], **columns: list[float]) -> None:
    logp_N, tokens, entropy_N, aux = table(log_ratios, **columns)
    diagnostics.add(logp_N, tokens, entropy_N, aux)
    diagnostics.saw(tokens, aux)


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


def test_both_directions_are_named_and_exact_in_the_proportions_of_mu():
    """KL(pi, mu) under samples of mu is a mean weighted by w."""
    mu, pi = [0.5, 0.25, 0.25], [0.2, 0.5, 0.3]
    reverse = sum(p * math.log(p / m) for m, p in zip(mu, pi, strict=True))
    metrics = measured([math.log(pi[token] / mu[token]) for token in (0, 0, 1, 2)])
    assert metrics["mismatch_reverse_kl_k1"] == pytest.approx(reverse, abs=1e-12)
    assert metrics["mismatch_reverse_kl_k3"] == pytest.approx(reverse, abs=1e-12)


def test_chi_squared_of_tokens_and_of_whole_answers():
    """Ratios 2 and 1/2 in one rollout cancel, 2 and 2 in another do not: 1/2 (1 + 16) - 1 = 7.5."""
    metrics = measured([math.log(w) for w in (2, 0.5, 2, 2)], rollout=[0, 0, 1, 1])
    assert metrics["chi2_token"] == pytest.approx((4 + 0.25 + 4 + 4) / 4 - 1)
    assert metrics["chi2_sequence"] == pytest.approx(7.5)


def test_chi_squared_of_answers_grows_with_length():
    """Equal chi^2 per token: (1 + chi^2)^T of T tokens. Formulas: 1.1^10 = 2.6."""
    every = [math.log(w) for w in (1 + 0.1**0.5, 1 - 0.1**0.5)]  # mean 1, mean square 1.1
    rollouts = [[every[bit >> place & 1] for place in range(10)] for bit in range(1024)]
    flat = [value for rollout in rollouts for value in rollout]
    metrics = measured(flat, rollout=[number for number in range(1024) for _ in range(10)])
    assert metrics["chi2_token"] == pytest.approx(0.1)
    assert metrics["chi2_sequence"] == pytest.approx(1.1**10 - 1)


def test_equal_policies():
    metrics = measured([0.0] * 5, acted=[0] * 5, advantage=[1, 1, -1, -1, 0])
    assert metrics["ess_share"] == 1
    assert {metrics[key] for key in metrics if key.startswith("ratio_")} == {1.0}
    zero = [key for key in metrics if key.startswith(("mismatch", "chi2", "acted_share", "max_abs"))]
    assert len(zero) > 20
    assert {str(metrics[key]) for key in zero} == {"0.0"}


def test_shares_by_reason_and_sign_of_the_advantage():
    metrics = measured([0.0] * 6, acted=[1, 0, 1, 1, 0, 1], advantage=[1, 1, -1, -1, -1, 0])
    assert metrics["acted_share/tis"] == pytest.approx(4 / 6)
    assert metrics["acted_share/tis/positive"] == pytest.approx(1 / 2)
    assert metrics["acted_share/tis/negative"] == pytest.approx(2 / 3)


def test_what_the_loss_did_is_counted_in_every_optimizer_step():
    """Two passes over two tokens: the clip acts on one of them in the second pass alone, 1 of 4."""
    diagnostics = MismatchDiagnostics()
    logp_N, tokens, entropy_N, aux = table([0.0, 0.0], acted=[0, 0], advantage=[1, -1])
    diagnostics.add(logp_N, tokens, entropy_N, aux)
    diagnostics.saw(tokens, aux)
    diagnostics.saw(tokens, table([0.0, 0.0], acted=[1, 0], advantage=[1, -1])[3])
    metrics = diagnostics.result()
    assert metrics["tokens"] == 2
    assert metrics["acted_share/tis"] == 0.25
    assert metrics["acted_share/tis/positive"] == 0.5
    assert metrics["acted_share/tis/negative"] == 0


def test_everything_but_whole_answers_is_given_by_lag_and_position():
    metrics = measured([0.1, 0.2], lag=[0, 1], rollout=[0, 1], entropy=[1, 2], acted=[0, 1], advantage=[1, -1])
    kinds = ("mismatch_kl_k1", "mismatch_reverse_kl_k3", "ess_share", "chi2_token", "entropy", "ratio_q50", "tokens")
    for part in ("lag_0", "lag_1", "position_0_15", "numerics", "staleness"):
        assert all(f"{kind}/{part}" in metrics for kind in (*kinds, "acted_share/tis"))
    assert metrics["acted_share/tis/negative/lag_1"] == 1
    assert metrics["perplexity_ratio"] == pytest.approx(math.exp(-0.15))


def test_what_has_no_tokens_is_left_out():
    metrics = measured([1.0], acted=[1], advantage=[1])
    assert "acted_share/tis/negative" not in metrics
    assert "entropy" not in metrics
    assert not any(key.startswith(("reference", "interpolation")) for key in metrics)


def test_sources_are_told_apart_by_versions():
    """Rollout 0 is all new. Rollout 1 began two versions ago: its new token looks back at a cache of older weights."""
    metrics = measured([0.0, 0.1, 0.2, 0.5], rollout=[0, 1, 1, 1], lag=[0, 2, 1, 0])
    assert [metrics[f"tokens/{source}"] for source in ("numerics", "stale_cache", "staleness")] == [1, 1, 2]
    assert metrics["mismatch_kl_k3/numerics"] == 0
    assert metrics["mismatch_kl_k3/stale_cache"] == pytest.approx(0.148721, rel=1e-5)
    assert metrics["mismatch_kl_k1/staleness"] == pytest.approx(-0.15)


def test_a_source_that_is_not_there_is_not_guessed():
    assert not [key for key in measured([0.1], lag=[1]) if key.endswith(("numerics", "stale_cache"))]


def test_distance_to_the_reference():
    metrics = measured([0.0, 0.0], reference=[0.5, -0.1])
    assert metrics["reference_kl_k1"] == pytest.approx(0.2)
    assert metrics["reference_kl_k3"] == pytest.approx((0.106531 + 0.00517092) / 2, rel=1e-5)


def test_error_of_an_interpolated_proximal_policy():
    metrics = measured([0.0, 0.0], error=[0.3, -0.1])
    assert metrics["interpolation_error_mean"] == pytest.approx(0.2)
    assert metrics["interpolation_error_max"] == pytest.approx(0.3)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_no_split_and_no_order_changes_a_bit(order):
    generator = torch.Generator().manual_seed(0)
    parts = []
    for rollout in range(3):
        num_tokens = 5 + rollout
        parts.append(
            {
                "log_ratios": torch.randn(num_tokens, generator=generator).tolist(),
                "rollout": [rollout] * num_tokens,
                "lag": [rollout] * num_tokens,
                "entropy": torch.rand(num_tokens, generator=generator).tolist(),
                "advantage": torch.randn(num_tokens, generator=generator).tolist(),
                "acted": [place % 2 for place in range(num_tokens)],
                "position": list(range(num_tokens)),
            }
        )
    whole = measured(**{key: [value for part in parts for value in part[key]] for key in parts[0]})
    split = MismatchDiagnostics()
    for number in order:
        count(split, **parts[number])
    assert split.result() == whole


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
    garbage = measured([0.1, NAN, 0.5], mask=[1, 0, 1], lag=[0, -9, 1], position=[0, -1, 2], advantage=[1, NAN, -1])
    assert garbage == measured([0.1, 0.5], lag=[0, 1], position=[0, 2], advantage=[1, -1])


def test_nonfinite_log_ratios_are_counted_and_left_out():
    metrics = measured([0.1, NAN, INF, -INF])
    assert (metrics["tokens"], metrics["nonfinite_tokens"]) == (1, 3)
    assert metrics["mismatch_kl_k1"] == pytest.approx(-0.1)


def test_enormous_ratios_stay_finite():
    metrics = measured([900.0, -900.0, 0.0], rollout=[0, 1, 2])
    assert metrics["max_abs_log_ratio"] == 900
    assert metrics["ratio_max"] == pytest.approx(math.exp(20))
    assert all(math.isfinite(value) for value in metrics.values())


def test_nothing_to_measure():
    nothing = {"tokens": 0.0, "nonfinite_tokens": 0.0}
    assert MismatchDiagnostics().result() == nothing
    assert measured([]) == nothing
    assert measured([0.1, NAN], mask=[0, 0]) == nothing
