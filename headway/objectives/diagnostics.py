"""How far the policy that sampled is from the one that is trained, measured on the trained tokens of a batch.

Axis: N tokens of a micro-batch, flat. `w = pi / mu`: the trainer's probability of a token before this train step over
the one it was sampled with. With samples from mu, the means of `log mu - log pi` (k1) and of `w - 1 - log w` (k3) both
estimate KL(mu || pi).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headway.objectives.weights import MAX_LOG_RATIO

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
FIRST_POSITION_BUCKET = 16
"""Buckets of position are 0..15, 16..31, 32..63, 64..127 and so on, doubling."""

_COLUMNS = ("log_ratio", "lag", "position", "advantage")


class MismatchDiagnostics:
    """Takes micro-batches with `add`, gives the metrics of the whole batch with `result`.

    Every ratio is kept until the end, so the metrics are exact, and the same for every split of the batch and every
    order of its tokens. Masked tokens are never looked at.
    """

    def __init__(self, cap: float | None = None) -> None:
        """cap: C of the truncated importance weight; None leaves out the shares of truncated tokens."""
        self._cap = cap
        self._parts: dict[str, list[Tensor]] = {name: [] for name in (*_COLUMNS, "entropy")}

    def add(
        self,
        logp_N: Tensor,
        behaviour_N: Tensor,
        mask_N: Tensor,
        lag_N: Tensor,
        position_N: Tensor,
        advantage_N: Tensor,
        entropy_N: Tensor | None = None,
    ) -> None:
        """Count the tokens of one micro-batch.

        logp_N: the trainer's log-probs before this train step; behaviour_N: recorded at sampling; mask_N: bool, True
        for trained tokens; lag_N: int >= 0, in versions; position_N: int >= 0, of the token in its rollout;
        advantage_N; entropy_N: of the trainer's distribution, in nats, given for every micro-batch or for none.
        """
        assert not (lag_N[mask_N] < 0).any(), "a token is newer than the weights it trains"
        log_ratio_N = _on_cpu(logp_N) - _on_cpu(behaviour_N)
        for name, value_N in zip(_COLUMNS, (log_ratio_N, lag_N, position_N, advantage_N), strict=True):
            self._parts[name].append(_on_cpu(value_N)[mask_N.cpu()])
        if entropy_N is not None:
            self._parts["entropy"].append(_on_cpu(entropy_N)[mask_N.cpu()])
        given = len(self._parts["entropy"])
        assert given in (0, len(self._parts["lag"])), "entropies are given for every micro-batch or for none"

    def result(self) -> dict[str, float]:
        """Metric -> value. A metric without tokens to measure is left out; none is nan, unless an entropy is.

        "Tokens" are trained tokens whose log-ratio is finite; each is a denominator of 1.

        | key | value | denominator |
        |---|---|---|
        | `tokens` | trained tokens with a finite log-ratio | |
        | `nonfinite_tokens` | trained tokens with an infinite or nan log-ratio, in no other metric | |
        | `mismatch_kl_k1` | mean of log mu - log pi | tokens |
        | `mismatch_kl_k3` | mean of w - 1 - log w | tokens |
        | `max_abs_log_ratio` | largest abs(log w), not clamped | |
        | `ratio_min`, `ratio_q01` ... `ratio_q99`, `ratio_max` | quantiles of w, linear between tokens | tokens |
        | `ess_share` | (sum w)^2 / (tokens * sum w^2), in (0, 1] | tokens |
        | `weight_capped_share` | share with w > C | tokens |
        | `weight_capped_share_positive`, `..._negative` | the same, by sign of A | tokens with A > 0, A < 0 |
        | `entropy` | mean entropy | tokens |
        | `tokens/lag_L`, `mismatch_kl_k3/lag_L` | of the tokens with lag L | its tokens |
        | `tokens/position_A_B`, `mismatch_kl_k3/position_A_B` | of the tokens at positions A to B | its tokens |

        w is clamped to e^±20, as it is in the loss; `mismatch_kl_k1` and `max_abs_log_ratio` are not.

        >>> diagnostics = MismatchDiagnostics(cap=2.0)
        >>> diagnostics.add(
        ...     logp_N=torch.tensor([1.0, 1.0, 1.0, 5.0]).log(),
        ...     behaviour_N=torch.zeros(4),
        ...     mask_N=torch.ones(4, dtype=torch.bool),
        ...     lag_N=torch.tensor([0, 0, 1, 1]),
        ...     position_N=torch.arange(4),
        ...     advantage_N=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        ... )
        >>> {key: round(diagnostics.result()[key], 6) for key in ("ess_share", "weight_capped_share_negative")}
        {'ess_share': 0.571429, 'weight_capped_share_negative': 0.5}

        Source: KL estimators, Schulman 2020, "Approximating KL Divergence"; effective sample size, Kong 1992.
        """
        column = {name: torch.cat(parts) if parts else _NOTHING for name, parts in self._parts.items()}
        finite_N = column["log_ratio"].isfinite()
        metrics = {"tokens": float(finite_N.sum()), "nonfinite_tokens": float((~finite_N).sum())}
        if not finite_N.any():
            return metrics
        # Sums depend on their order in the last bits: sorting takes away the order in which micro-batches came.
        entropy_N = column.pop("entropy")
        kept = {name: value_N[finite_N] for name, value_N in column.items()}
        log_ratio_N, order_N = kept["log_ratio"].sort()
        clamped_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        k3_N = clamped_N.expm1() - clamped_N
        metrics |= _mismatch(log_ratio_N, clamped_N.exp(), k3_N)
        if self._cap is not None:
            metrics |= dict(_capped_shares(clamped_N.exp() > self._cap, kept["advantage"][order_N]))
        if len(entropy_N):
            metrics["entropy"] = float(entropy_N[finite_N].sort().values.mean())
        metrics |= dict(_by_lag(k3_N, kept["lag"][order_N].long()))
        metrics |= dict(_by_position(k3_N, kept["position"][order_N].long()))
        return metrics


_NOTHING = torch.zeros(0, dtype=torch.float64)


def _on_cpu(value_N: Tensor) -> Tensor:
    return value_N.detach().cpu().double()


def _mismatch(log_ratio_N: Tensor, ratio_N: Tensor, k3_N: Tensor) -> dict[str, float]:
    """log_ratio_N, and with it ratio_N, in ascending order."""
    quantiles = {f"ratio_q{round(100 * share):02d}": _quantile(ratio_N, share) for share in QUANTILES}
    return {
        "mismatch_kl_k1": 0.0 - float(log_ratio_N.mean()),  # subtracted, so that no mismatch is 0.0, not -0.0
        "mismatch_kl_k3": float(k3_N.mean()),
        "max_abs_log_ratio": float(log_ratio_N.abs().max()),
        "ratio_min": float(ratio_N[0]),
        **quantiles,
        "ratio_max": float(ratio_N[-1]),
        "ess_share": float(ratio_N.sum().square() / (len(ratio_N) * ratio_N.square().sum())),
    }


def _quantile(sorted_N: Tensor, share: float) -> float:
    """Linear between neighbours. (`torch.quantile` refuses more than 2^24 values, which a large batch has.)"""
    place = share * (len(sorted_N) - 1)
    below = int(place)
    above = min(below + 1, len(sorted_N) - 1)
    return float(torch.lerp(sorted_N[below], sorted_N[above], place - below))


def _capped_shares(truncated_N: Tensor, advantage_N: Tensor) -> Iterator[tuple[str, float]]:
    yield "weight_capped_share", float(truncated_N.double().mean())
    for sign, has_sign_N in (("positive", advantage_N > 0), ("negative", advantage_N < 0)):
        if has_sign_N.any():
            yield f"weight_capped_share_{sign}", float(truncated_N[has_sign_N].double().mean())


def _by_lag(k3_N: Tensor, lag_N: Tensor) -> Iterator[tuple[str, float]]:
    for lag in lag_N.unique().tolist():
        yield from _bucket(f"lag_{lag}", k3_N[lag_N == lag])


def _by_position(k3_N: Tensor, position_N: Tensor) -> Iterator[tuple[str, float]]:
    start, end = 0, FIRST_POSITION_BUCKET
    while start <= int(position_N.max()):
        inside_N = (position_N >= start) & (position_N < end)
        if inside_N.any():
            yield from _bucket(f"position_{start}_{end - 1}", k3_N[inside_N])
        start, end = end, 2 * end


def _bucket(name: str, k3_N: Tensor) -> Iterator[tuple[str, float]]:
    yield f"tokens/{name}", float(len(k3_N))
    yield f"mismatch_kl_k3/{name}", float(k3_N.mean())
