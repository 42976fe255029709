"""How far the policy that sampled is from the one that is trained, measured on the trained tokens of a batch.

Axis: N tokens of a micro-batch, flat. `w = pi / mu`: the trainer's probability of a token before this train step over
the one it was sampled with. With samples from mu:

    KL(mu, pi):  k1 = mean of -log w        k3 = mean of w - 1 - log w
    KL(pi, mu):  k1 = mean of w log w       k3 = mean of w log w - w + 1

Every metric names its denominator. Sums run over all tokens of the batch in one order, so neither micro-batches nor
ranks nor the order in which they come change any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.objectives.buckets import buckets
from headway.objectives.compose import TokenAux
from headway.objectives.tokens import Tokens
from headway.objectives.weights import MAX_LOG_RATIO, k3_of

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)

_MEASURED = ("log_ratio", "lag", "position", "rollout", "entropy", "interpolation_error", "reference")
_SEEN = ("lag", "position", "rollout", "advantage")


class MismatchDiagnostics:
    """Takes micro-batches of whole rollouts with `add` and `saw`, gives the metrics of the train step with `result`."""

    def __init__(self) -> None:
        self._measured: dict[str, list[Tensor]] = {name: [] for name in _MEASURED}
        self._seen: dict[str, list[Tensor]] = {name: [] for name in _SEEN}
        self._acted: dict[str, list[Tensor]] = {}

    @staticmethod
    def joined(parts: Sequence[MismatchDiagnostics]) -> MismatchDiagnostics:
        """Of tokens that were measured in several places, each in one of them."""
        joined = MismatchDiagnostics()
        for part in parts:
            for whole, own in ((joined._measured, part._measured), (joined._seen, part._seen)):
                for name, columns in own.items():
                    whole[name] += columns
            for reason, columns in part._acted.items():
                joined._acted.setdefault(reason, []).extend(columns)
        return joined

    def add(self, logp_N: Tensor, tokens: Tokens, entropy_N: Tensor | None = None, aux: TokenAux | None = None) -> None:
        """Measure the mismatch of one micro-batch's tokens, each of them once.

        logp_N: the trainer's log-probs before this train step; entropy_N: of the trainer's distribution, in nats; aux:
        what the loss did, for the error of an interpolated proximal policy.
        """
        mask_N = tokens.mask_N.cpu()
        assert not (tokens.lag_N.cpu()[mask_N] < 0).any(), "a token is newer than the weights it trains"
        error_N = None if aux is None else aux.interpolation_error_N
        nothing_N = torch.full_like(mask_N, torch.nan, dtype=torch.float64)
        columns = {
            "log_ratio": _on_cpu(logp_N) - _on_cpu(tokens.behaviour_N),
            **_places(tokens),
            "entropy": nothing_N if entropy_N is None else entropy_N,
            "interpolation_error": nothing_N if error_N is None else error_N,
            "reference": nothing_N if tokens.reference_N is None else _on_cpu(logp_N) - _on_cpu(tokens.reference_N),
        }
        for name, value_N in columns.items():
            self._measured[name].append(_on_cpu(value_N)[mask_N])

    def saw(self, tokens: Tokens, aux: TokenAux) -> None:
        """Count what the loss did to each token of one micro-batch, once for every optimizer step that it is in."""
        mask_N = tokens.mask_N.cpu()
        for name, value_N in {**_places(tokens), "advantage": tokens.advantage_N}.items():
            self._seen[name].append(_on_cpu(value_N)[mask_N])
        for reason, acts_N in aux.acted.items():
            self._acted.setdefault(reason, []).append(acts_N.cpu()[mask_N])

    def result(self) -> dict[str, float]:
        """Metric -> value. A metric without tokens to measure is left out; none is nan.

        "Tokens" are trained tokens whose log-ratio under the weights before the train step is known and finite; each is
        a denominator of 1. "Seen tokens" are trained tokens, times the optimizer steps that each was in.

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
        | `perplexity_ratio` | perplexity under pi over that under mu, e^`mismatch_kl_k1` | tokens |
        | `acted_share/REASON` | where that weight was cut or masked, or that clip stopped the gradient | seen tokens |
        | `acted_share/REASON/positive`, `.../negative` | the same, by sign of A | seen tokens with A > 0, A < 0 |
        | `interpolation_error_mean`, `..._max` | of abs(log of the guessed over the true pi_prox) | tokens |
        | `reference_kl_k1`, `reference_kl_k3` | of KL(pi, ref), as if pi had sampled the tokens | tokens |
        | `entropy` | mean entropy | tokens with a finite entropy |
        | `NAME/numerics` | of tokens of rollouts sampled wholly by the weights they train | its tokens |
        | `NAME/stale_cache` | of tokens sampled by those weights, after older tokens of their rollout | its tokens |
        | `NAME/staleness` | of tokens that older weights sampled | its tokens |
        | `NAME/lag_L` | of tokens with lag L | its tokens |
        | `NAME/position_A_B` | of tokens at positions A to B of their rollout | its tokens |

        NAME: tokens, mismatch_kl_k1, mismatch_kl_k3, mismatch_reverse_kl_k1, mismatch_reverse_kl_k3, ess_share,
        chi2_token, entropy, ratio_q01 ... ratio_q99, acted_share/REASON and its two signs. `chi2_sequence` is of whole
        rollouts and has no parts. w is clamped to e^±20, as it is in the loss; `mismatch_kl_k1` and `max_abs_log_ratio`
        are not.

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
        return self._mismatch() | dict(self._acted_shares())

    def _mismatch(self) -> dict[str, float]:
        column = {name: torch.cat(parts) if parts else _NOTHING for name, parts in self._measured.items()}
        finite_N = column["log_ratio"].isfinite()
        metrics = {"tokens": float(finite_N.sum()), "nonfinite_tokens": float((~finite_N).sum())}
        if not finite_N.any():
            return metrics
        # Sums depend on their order in the last bits: sorting takes away the order in which micro-batches came.
        kept = {name: value_N[finite_N] for name, value_N in column.items()}
        order_N = _order(kept)
        table = _Table(**{name: value_N[order_N] for name, value_N in kept.items()})
        metrics |= dict(_figures(table, torch.ones(len(order_N), dtype=torch.bool)))
        metrics |= dict(_of_the_batch(table))
        for name, inside_N in buckets(table.lag, table.position, table.rollout):
            metrics |= {f"{key}/{name}": value for key, value in _figures(table, inside_N)}
            metrics[f"tokens/{name}"] = float(inside_N.sum())
        return metrics

    def _acted_shares(self) -> Iterator[tuple[str, float]]:
        column = {name: torch.cat(parts) if parts else _NOTHING for name, parts in self._seen.items()}
        acted = {reason: torch.cat(parts) for reason, parts in self._acted.items()}
        if not len(column["lag"]) or not acted:
            return
        every_N = torch.ones(len(column["lag"]), dtype=torch.bool)
        parts = [("", every_N), *buckets(column["lag"], column["position"], column["rollout"])]
        signs = [("", every_N), ("/positive", column["advantage"] > 0), ("/negative", column["advantage"] < 0)]
        for reason, acts_N in acted.items():
            for part, inside_N in parts:
                for sign, has_sign_N in signs:
                    if (counted_N := inside_N & has_sign_N).any():
                        name = f"acted_share/{reason}{sign}{'/' if part else ''}{part}"
                        yield name, float(acts_N[counted_N].double().mean())


_NOTHING = torch.zeros(0, dtype=torch.float64)


def _on_cpu(value_N: Tensor) -> Tensor:
    return value_N.detach().cpu().double()


def _places(tokens: Tokens) -> dict[str, Tensor]:
    """Where each token stands: what buckets go by."""
    unknown_N = torch.full_like(tokens.lag_N, torch.nan, dtype=torch.float64)
    position_N = unknown_N if tokens.position_N is None else tokens.position_N
    return {"lag": tokens.lag_N, "position": position_N, "rollout": tokens.rollout_N}


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
    rollout: Tensor
    entropy: Tensor
    interpolation_error: Tensor
    reference: Tensor

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
    yield from ((f"ratio_q{round(100 * share):02d}", _quantile(w_N, share)) for share in QUANTILES)


def _of_the_batch(table: _Table) -> Iterator[tuple[str, float]]:
    yield "perplexity_ratio", math.exp(min(-float(table.log_ratio.mean()), 700.0))
    yield "max_abs_log_ratio", float(table.log_ratio.abs().max())
    yield "ratio_min", float(table.clamped[0].exp())
    yield "ratio_max", float(table.clamped[-1].exp())
    yield "chi2_sequence", _chi2_sequence(table)
    yield from _of_other_policies(table)


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
