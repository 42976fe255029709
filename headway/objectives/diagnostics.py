"""How far the policy that sampled is from the one that is trained, measured on the trained tokens of a batch.

Axis: N tokens of a micro-batch, flat. `w = pi / mu`: the trainer's probability of a token before this train step over
the one it was sampled with. With samples from mu:

    KL(mu, pi):  k1 = mean of -log w        k3 = mean of w - 1 - log w
    KL(pi, mu):  k1 = mean of w log w       k3 = mean of w log w - w + 1

Every metric names its denominator. Sums run over all tokens of the batch in one order, so neither micro-batches nor
ranks nor the order in which they come change any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.objectives.compose import TokenAux
from headway.objectives.tokens import Tokens
from headway.objectives.weights import MAX_LOG_RATIO, k3_of

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
FIRST_POSITION_BUCKET = 16
"""Buckets of position are 0..15, 16..31, 32..63, 64..127 and so on, doubling."""

_COLUMNS = ("log_ratio", "lag", "position", "advantage", "rollout", "entropy", "interpolation_error", "reference")


class MismatchDiagnostics:
    """Takes micro-batches of whole rollouts with `add`, gives the metrics of the whole batch with `result`."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {name: [] for name in _COLUMNS}
        self._acted: dict[str, list[Tensor]] = {}

    def add(self, logp_N: Tensor, tokens: Tokens, entropy_N: Tensor | None = None, aux: TokenAux | None = None) -> None:
        """Count the tokens of one micro-batch.

        logp_N: the trainer's log-probs before this train step; entropy_N: of the trainer's distribution, in nats; aux:
        what the loss did to each token. Both are given for every micro-batch or for none.
        """
        mask_N = tokens.mask_N.cpu()
        assert not (tokens.lag_N.cpu()[mask_N] < 0).any(), "a token is newer than the weights it trains"
        error_N = None if aux is None else aux.interpolation_error_N
        nothing_N = torch.full_like(mask_N, torch.nan, dtype=torch.float64)
        columns = {
            "log_ratio": _on_cpu(logp_N) - _on_cpu(tokens.behaviour_N),
            "lag": tokens.lag_N,
            "position": nothing_N if tokens.position_N is None else tokens.position_N,
            "advantage": tokens.advantage_N,
            "rollout": tokens.rollout_N,
            "entropy": nothing_N if entropy_N is None else entropy_N,
            "interpolation_error": nothing_N if error_N is None else error_N,
            "reference": nothing_N if tokens.reference_N is None else _on_cpu(logp_N) - _on_cpu(tokens.reference_N),
        }
        for name, value_N in columns.items():
            self._parts[name].append(_on_cpu(value_N)[mask_N])
        for reason, acts_N in (aux.acted if aux else {}).items():
            self._acted.setdefault(reason, []).append(acts_N.cpu()[mask_N])

    def result(self) -> dict[str, float]:
        """Metric -> value. A metric without tokens to measure is left out; none is nan.

        "Tokens" are trained tokens whose log-ratio is finite; each is a denominator of 1.

        | key | value | denominator |
        |---|---|---|
        | `tokens` | trained tokens with a finite log-ratio | |
        | `nonfinite_tokens` | trained tokens with an infinite or nan log-ratio, in no other metric | |
        | `mismatch_kl_k1`, `mismatch_kl_k3` | KL(mu, pi) | tokens |
        | `mismatch_reverse_kl_k1`, `mismatch_reverse_kl_k3` | KL(pi, mu) | tokens |
        | `max_abs_log_ratio` | largest abs(log w), not clamped | |
        | `ratio_min`, `ratio_q01` ... `ratio_q99`, `ratio_max` | quantiles of w, linear between tokens | tokens |
        | `ess_share` | (sum w)^2 / (tokens * sum w^2), in (0, 1] | tokens |
        | `chi2_token` | mean of w^2, minus 1 | tokens |
        | `chi2_sequence` | mean of (product of a rollout's w)^2, minus 1 | rollouts with a token |
        | `acted_share/REASON` | where that weight was cut or masked, or that clip stopped the gradient | tokens |
        | `acted_share/REASON/positive`, `.../negative` | the same, by sign of A | tokens with A > 0, A < 0 |
        | `interpolation_error_mean`, `..._max` | of abs(log of the guessed over the true pi_prox) | tokens |
        | `reference_kl_k1`, `reference_kl_k3` | of KL(pi, ref), as if pi had sampled the tokens | tokens |
        | `entropy` | mean entropy | tokens with a finite entropy |
        | `NAME/numerics` | of tokens of rollouts sampled wholly by the weights they train | its tokens |
        | `NAME/stale_cache` | of tokens sampled by those weights, after older tokens of their rollout | its tokens |
        | `NAME/staleness` | of tokens that older weights sampled | its tokens |
        | `NAME/lag_L` | of tokens with lag L | its tokens |
        | `NAME/position_A_B` | of tokens at positions A to B of their rollout | its tokens |

        NAME: tokens, mismatch_kl_k1, mismatch_kl_k3, mismatch_reverse_kl_k1, mismatch_reverse_kl_k3, ess_share,
        chi2_token, entropy and acted_share/REASON. w is clamped to e^±20, as it is in the loss; `mismatch_kl_k1` and
        `max_abs_log_ratio` are not.

        >>> w = torch.tensor([1.0, 1.0, 1.0, 5.0])
        >>> diagnostics = MismatchDiagnostics()
        >>> diagnostics.add(
        ...     w.log(),
        ...     Tokens(
        ...         mask_N=torch.ones(4, dtype=torch.bool),
        ...         rollout_N=torch.tensor([0, 0, 1, 1]),
        ...         group_N=torch.zeros(4, dtype=torch.long),
        ...         behaviour_N=torch.zeros(4),
        ...         lag_N=torch.tensor([0, 0, 1, 1]),
        ...         advantage_N=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        ...         weights=(),
        ...     ),
        ... )
        >>> {key: round(diagnostics.result()[key], 4) for key in ("ess_share", "chi2_token", "chi2_sequence")}
        {'ess_share': 0.5714, 'chi2_token': 6.0, 'chi2_sequence': 12.0}

        Source: KL estimators, Schulman 2020, "Approximating KL Divergence"; effective sample size, Kong 1992; chi^2 and
        its growth with length, Liu, Li et al. 2025, "When Speed Kills Stability".
        """
        column = {name: torch.cat(parts) if parts else _NOTHING for name, parts in self._parts.items()}
        acted = {reason: torch.cat(parts) for reason, parts in self._acted.items()}
        finite_N = column["log_ratio"].isfinite()
        metrics = {"tokens": float(finite_N.sum()), "nonfinite_tokens": float((~finite_N).sum())}
        if not finite_N.any():
            return metrics
        # Sums depend on their order in the last bits: sorting takes away the order in which micro-batches came.
        kept = {name: value_N[finite_N] for name, value_N in column.items()}
        order_N = _order(kept)
        table = _Table(
            **{name: value_N[order_N] for name, value_N in kept.items()},
            acted={reason: acts_N[finite_N][order_N] for reason, acts_N in acted.items()},
        )
        every_N = torch.ones(len(order_N), dtype=torch.bool)
        metrics |= dict(_figures(table, every_N))
        metrics |= _ratio_spread(table)
        metrics |= dict(_by_sign(table))
        for name, inside_N in (*_sources(table), *_lags(table), *_positions(table)):
            metrics |= {f"{key}/{name}": value for key, value in _figures(table, inside_N)}
            metrics[f"tokens/{name}"] = float(inside_N.sum())
        return metrics


_NOTHING = torch.zeros(0, dtype=torch.float64)


def _on_cpu(value_N: Tensor) -> Tensor:
    return value_N.detach().cpu().double()


def _order(kept: Mapping[str, Tensor]) -> Tensor:
    """One order for one set of tokens: by log-ratio, ties by the other columns that enter sums."""
    order_N = torch.arange(len(kept["log_ratio"]))
    for name in ("rollout", "interpolation_error", "reference", "entropy", "log_ratio"):  # the last one counts most
        order_N = order_N[kept[name][order_N].argsort(stable=True)]
    return order_N


@dataclass(frozen=True)
class _Table:
    """The trained tokens of a batch, by column, in ascending order of log-ratio."""

    log_ratio: Tensor
    lag: Tensor
    position: Tensor
    advantage: Tensor
    rollout: Tensor
    entropy: Tensor
    interpolation_error: Tensor
    reference: Tensor
    acted: Mapping[str, Tensor]

    @property
    def clamped(self) -> Tensor:
        return self.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _figures(table: _Table, inside_N: Tensor) -> Iterator[tuple[str, float]]:
    """The metrics that are also given for parts of the tokens."""
    log_w_N = table.clamped[inside_N]
    w_N = log_w_N.exp()
    # Subtracted from 0.0, so that no mismatch is 0.0 and not -0.0.
    yield "mismatch_kl_k1", 0.0 - float(table.log_ratio[inside_N].mean())
    yield "mismatch_kl_k3", float(k3_of(log_w_N).mean())
    yield "mismatch_reverse_kl_k1", float((w_N * log_w_N).mean()) + 0.0
    yield "mismatch_reverse_kl_k3", float((w_N * k3_of(-log_w_N)).mean())
    yield "ess_share", float(w_N.sum().square() / (len(w_N) * w_N.square().sum()))
    yield "chi2_token", float((2 * log_w_N).expm1().mean())
    entropy_N = table.entropy[inside_N]
    if (known_N := entropy_N.isfinite()).any():
        yield "entropy", float(entropy_N[known_N].mean())
    for reason, acts_N in table.acted.items():
        yield f"acted_share/{reason}", float(acts_N[inside_N].double().mean())


def _ratio_spread(table: _Table) -> dict[str, float]:
    ratio_N = table.clamped.exp()
    quantiles = {f"ratio_q{round(100 * share):02d}": _quantile(ratio_N, share) for share in QUANTILES}
    return {
        "max_abs_log_ratio": float(table.log_ratio.abs().max()),
        "ratio_min": float(ratio_N[0]),
        **quantiles,
        "ratio_max": float(ratio_N[-1]),
        "chi2_sequence": _chi2_sequence(table),
        **dict(_of_other_policies(table)),
    }


def _of_other_policies(table: _Table) -> Iterator[tuple[str, float]]:
    error_N = table.interpolation_error[table.interpolation_error.isfinite()].abs()
    if len(error_N):
        yield "interpolation_error_mean", float(error_N.mean())
        yield "interpolation_error_max", float(error_N.max())
    d_N = -table.reference[table.reference.isfinite()]
    if len(d_N):
        d_N = d_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        yield "reference_kl_k1", 0.0 - float(d_N.mean())
        yield "reference_kl_k3", float(k3_of(d_N).mean())


def _chi2_sequence(table: _Table) -> float:
    """Over rollouts, of the product of their ratios; the sum of logs is clamped as a sequence weight's is."""
    _, place_N = table.rollout.unique(return_inverse=True)
    total_R = torch.zeros(int(place_N.max()) + 1, dtype=torch.float64).index_add(0, place_N, table.log_ratio)
    return float((2 * total_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).expm1().mean())


def _quantile(sorted_N: Tensor, share: float) -> float:
    """Linear between neighbours. (`torch.quantile` refuses more than 2^24 values, which a large batch has.)"""
    place = share * (len(sorted_N) - 1)
    below = int(place)
    above = min(below + 1, len(sorted_N) - 1)
    return float(torch.lerp(sorted_N[below], sorted_N[above], place - below))


def _by_sign(table: _Table) -> Iterator[tuple[str, float]]:
    for sign, has_sign_N in (("positive", table.advantage > 0), ("negative", table.advantage < 0)):
        if has_sign_N.any():
            for reason, acts_N in table.acted.items():
                yield f"acted_share/{reason}/{sign}", float(acts_N[has_sign_N].double().mean())


def _sources(table: _Table) -> Iterator[tuple[str, Tensor]]:
    """Where the mismatch can come from, as far as versions tell: no token is put down to a cause that is not sure."""
    _, place_N = table.rollout.unique(return_inverse=True)
    oldest_R = torch.zeros(int(place_N.max()) + 1, dtype=torch.float64)
    oldest_N = oldest_R.scatter_reduce(0, place_N, table.lag, "amax")[place_N]
    newest_N = table.lag == 0
    for name, inside_N in (
        ("numerics", oldest_N == 0),
        ("stale_cache", newest_N & (oldest_N > 0)),
        ("staleness", ~newest_N),
    ):
        if inside_N.any():
            yield name, inside_N


def _lags(table: _Table) -> Iterator[tuple[str, Tensor]]:
    for lag in table.lag.unique().long().tolist():
        yield f"lag_{lag}", table.lag == lag


def _positions(table: _Table) -> Iterator[tuple[str, Tensor]]:
    if table.position.isnan().any():
        return
    start, end = 0, FIRST_POSITION_BUCKET
    while start <= int(table.position.max()):
        inside_N = (table.position >= start) & (table.position < end)
        if inside_N.any():
            yield f"position_{start}_{end - 1}", inside_N
        start, end = end, 2 * end
