"""Log-probs of the same tokens by two sides -> the figures of one source.

`w = pi / mu`, by token; its log is the trainer's log-prob minus the engine's. Axes: N tokens of all rollouts, R
rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from headway.objectives.weights import MAX_LOG_RATIO, k3_of
from headway.reports.mismatch_table import QUANTILES, Figures


def measure(
    engine: Sequence[Sequence[float]], trainer: Sequence[torch.Tensor], *, same_support: bool = True
) -> Figures:
    """Both by rollout, of the same tokens, which the engine has sampled; at least one token.

    same_support: False where the engine could not have sampled all that the trainer gives a probability. Where it is
    the same, the mean of w is 1, and the mean of -log w is that of w - 1 - log w: that one (k3) swings far less from
    sample to sample, so the mean of log w is taken from it; else from k1.

    Source: Schulman 2020, "Approximating KL Divergence" (k1, k3).
    """
    engine_N = torch.tensor([logprob for rollout in engine for logprob in rollout], dtype=torch.float32)
    trainer_N = torch.cat([logp_N.float() for logp_N in trainer])
    log_w_N = trainer_N.double() - engine_N.double()
    k3_N = k3_of(log_w_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    k1, k3 = 0.0 - log_w_N.mean().item(), k3_N.mean().item()
    deviation = _standard_deviation(log_w_N)
    lengths = [len(rollout) for rollout in engine]
    return Figures(
        num_tokens=len(log_w_N),
        num_rollouts=len(lengths),
        kl_k1=k1,
        kl_k1_error=deviation / math.sqrt(len(log_w_N)),
        kl_k3=k3,
        kl_k3_error=_standard_deviation(k3_N) / math.sqrt(len(log_w_N)),
        ratio={name: log_w_N.quantile(share).exp().item() for name, share in QUANTILES.items()},
        unequal_share=(engine_N != trainer_N).double().mean().item(),
        log_ratio_mean=0.0 - (k3 if same_support else k1),
        log_ratio_deviation=deviation,
        spread=_spread(log_w_N, lengths),
    )


def _standard_deviation(value_N: torch.Tensor) -> float:
    return value_N.std().item() if len(value_N) > 1 else 0.0


def _spread(log_w_N: torch.Tensor, lengths: Sequence[int]) -> float | None:
    """How far the sums of whole rollouts lie from what their lengths give, over how far they would if tokens were
    independent: their log-ratios are added up then, and variances are.

    With the mean over all N tokens taken off, a rollout of n tokens has the variance n (1 - n / N) of a token.
    """
    variance, num = log_w_N.var().item() if len(log_w_N) > 1 else 0.0, len(log_w_N)
    if variance == 0.0 or len(lengths) < 2:
        return None
    sum_R = torch.stack([part_N.sum() for part_N in log_w_N.split(list(lengths))])
    length_R = torch.tensor(lengths, dtype=torch.float64)
    measured = (sum_R - length_R * log_w_N.mean()).square().sum().item()
    expected = (length_R * (1 - length_R / num)).sum().item() * variance
    return math.sqrt(measured / expected)
