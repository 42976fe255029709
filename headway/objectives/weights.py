"""Pairs of log-probs -> ratios and importance weights.

Axes: N tokens of a batch or micro-batch, flat, whole rollouts. Log-probs are subtracted in float32 or better, summed or
averaged over a rollout where the level says so, clamped and only then exponentiated. A weight is a constant: no
gradient passes through it. Every function is neutral (ratio 1, weight 1) where masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before `exp` (e^20 = 4.9e8). Beyond it a ratio is constant and has no gradient."""


def log_ratio(new_N: Tensor, old_N: Tensor, mask_N: Tensor) -> Tensor:
    """`log(new / old)`, clamped to ±`MAX_LOG_RATIO`, exactly 0 where masked; a constant in `old`.

    new_N, old_N: log-probs (float); mask_N: bool, True for trained tokens. What stands under the mask reaches neither
    the result nor any gradient, be it inf or nan. A nan outside the mask is passed on, never hidden.

    >>> log_ratio(torch.tensor([-1.0, float("nan")]), torch.tensor([-1.5, 0.0]), torch.tensor([True, False]))
    tensor([0.5000, 0.0000])
    """
    return _log_ratio(new_N, old_N, mask_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _log_ratio(new_N: Tensor, old_N: Tensor, mask_N: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(new_N.dtype, old_N.dtype), torch.float32)
    # The inputs are replaced, not only the result: `where` on the result alone would send 0 * inf = nan backward.
    safe_new_N = torch.where(mask_N, new_N.to(dtype), 0.0)
    safe_old_N = torch.where(mask_N, old_N.detach().to(dtype), 0.0)
    return safe_new_N - safe_old_N


def log_ratio_at(level: str, new_N: Tensor, old_N: Tensor, mask_N: Tensor, rollout_N: Tensor) -> Tensor:
    """`log(new / old)` at a level, one number per token (the same for all tokens of a rollout, unless by token).

    level: token; sequence, of the product over the rollout's trained tokens; geometric, of their geometric mean, in
    which length plays no part; geometric_token, the geometric mean's value with each token's own gradient. rollout_N:
    int >= 0, whose token it is. Clamped to ±`MAX_LOG_RATIO` after summing; carries the gradient of new_N; constant in
    old_N; 0 where masked. Raises ValueError for an unknown level.

    >>> new, old = torch.tensor([0.02, -0.01, 0.03, -0.02]), torch.zeros(4)
    >>> whole = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.long)
    >>> log_ratio_at("geometric", new, old, *whole).exp()[0], log_ratio_at("sequence", new, old, *whole).exp()[0]
    (tensor(1.0050), tensor(1.0202))

    Source: sequence, Liu, Li et al. 2025, "When Speed Kills Stability"; geometric and geometric_token, Zheng et al.
    2025, GSPO, arXiv 2507.18071, sections 4.1 and 4.3.
    """
    token_N = _log_ratio(new_N, old_N, mask_N)
    match level:
        case "token":
            log_N = token_N
        case "sequence":
            log_N = rollout_sum(token_N, rollout_N)
        case "geometric":
            log_N = rollout_mean(token_N, mask_N, rollout_N)
        case "geometric_token":
            log_N = rollout_mean(token_N, mask_N, rollout_N).detach() + (token_N - token_N.detach())
        case _:
            raise ValueError(f"unknown level of a ratio {level!r}")
    return torch.where(mask_N, log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)


def rollout_sum(item_N: Tensor, rollout_N: Tensor) -> Tensor:
    """The sum over each token's rollout, given back to every token of it."""
    if not len(item_N):
        return item_N
    total_R = item_N.new_zeros(int(rollout_N.max()) + 1).index_add(0, rollout_N, item_N)
    return total_R[rollout_N]


def rollout_mean(item_N: Tensor, mask_N: Tensor, rollout_N: Tensor) -> Tensor:
    """The mean over the trained tokens of each token's rollout; item_N must be 0 where masked."""
    return rollout_sum(item_N, rollout_N) / rollout_sum(mask_N.to(item_N.dtype), rollout_N).clamp(min=1)


def rollout_share(mask_N: Tensor, rollout_N: Tensor) -> Tensor:
    """`1 / len` on each trained token: a rollout's tokens count for one rollout together. Float64."""
    kept_N = mask_N.double()
    return kept_N / rollout_sum(kept_N, rollout_N).clamp(min=1)


def k3_of(log_w_N: Tensor) -> Tensor:
    """`w - 1 - log w` from log w: never negative, and 0 at w = 1. With w = new / old its mean under samples of the old
    policy is KL(old, new).

    Source: Schulman 2020, "Approximating KL Divergence" (the estimator k3).
    """
    return log_w_N.expm1() - log_w_N


def truncated(ratio_N: Tensor, cap: float, low: float = 0.0) -> Tensor:
    """The truncated importance weight `min(max(w, low), C)`, with gradients stopped.

    ratio_N: w per token, >= 0; cap: C > 0. Truncation costs a bias of known size and bounds the variance:
    `E_mu[min(w, C) f] = E_pi[min(1, C / w) f]`.

    >>> truncated(torch.tensor([0.3, 1.0, 6.0]), cap=2.0)
    tensor([0.3000, 1.0000, 2.0000])

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (token-level TIS).
    """
    return ratio_N.detach().clamp(min=low, max=cap)


def masked(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """`w` where low <= w <= high, else 0; gradients stopped. The bias is `-E_pi[1{w outside} f]`.

    >>> masked(torch.tensor([0.3, 0.5, 2.0, 6.0]), low=0.5, high=5.0)
    tensor([0.0000, 0.5000, 2.0000, 0.0000])

    Source: low = 0, Liu, Li et al. 2025 (MIS); both bounds, Ring-1T, arXiv 2510.18855 (IcePop).
    """
    ratio_N = ratio_N.detach()
    return torch.where(inside(ratio_N, low, high), ratio_N, 0.0)


def inside(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """Bool: low <= w <= high. A nan is not inside."""
    return (ratio_N >= low) & (ratio_N <= high)


def keep_k3(new_N: Tensor, old_N: Tensor, mask_N: Tensor, rollout_N: Tensor, limit: float) -> Tensor:
    """Bool per token: whether the mean of `w - 1 - log w` over its rollout's trained tokens is at most `limit`.

    Source: Liu, Li et al. 2025 (K3 rejection), as in verl's rollout correction.
    """
    log_w_N = log_ratio(new_N.detach(), old_N, mask_N)
    return rollout_mean(k3_of(log_w_N), mask_N, rollout_N) <= limit


def without_veto(new_N: Tensor, old_N: Tensor, mask_N: Tensor, rollout_N: Tensor, low: float) -> Tensor:
    """Bool per token: whether no trained token of its rollout has `w < low`.

    Source: Liu, Li et al. 2025 (veto).
    """
    ratio_N = log_ratio(new_N.detach(), old_N, mask_N).exp()
    return rollout_sum((ratio_N < low).to(ratio_N.dtype), rollout_N) == 0


def on_policy_enough(
    new_N: Tensor, old_N: Tensor, advantage_N: Tensor, mask_N: Tensor, rollout_N: Tensor, limit: float
) -> Tensor:
    """Bool per token: False for rollouts with A < 0 whose mean of `log(old / new)` is above `limit`.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1 (off-policy sequence masking).
    """
    divergence_N = rollout_mean(-log_ratio(new_N.detach(), old_N, mask_N), mask_N, rollout_N)
    return ~((advantage_N < 0) & (divergence_N > limit))


def interpolated_proximal(current_N: Tensor, behaviour_N: Tensor, lag_N: Tensor) -> Tensor:
    """The proximal log-prob guessed from versions, without a forward pass; constant.

    `log pi_prox ~ log mu + alpha (log pi - log mu)`, `alpha = lag / (lag + 1)`: the share of the way from the version
    that sampled the token to the one being made, `(v_prox - v_mu) / (v - v_mu)` with v = v_prox + 1.

    >>> interpolated_proximal(torch.tensor([-0.7]), torch.tensor([-1.0]), torch.tensor([2]))
    tensor([-0.8000])

    Source: A-3PO, arXiv 2512.06547 (approximated proximal policy; in AReaL).
    """
    dtype = torch.promote_types(torch.promote_types(current_N.dtype, behaviour_N.dtype), torch.float32)
    lag_N = lag_N.to(dtype)
    return torch.lerp(behaviour_N.detach().to(dtype), current_N.detach().to(dtype), lag_N / (lag_N + 1))
