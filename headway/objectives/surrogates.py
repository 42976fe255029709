"""Ratios and advantages -> a loss per token, to be minimised.

Axes: N tokens, flat; P pairs. `rho` is a ratio of the current to an older policy that carries the gradient
(`weights.log_ratio_at`); at rho = 1 the gradient of each policy surrogate is REINFORCE's, `-A grad log pi`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def score_function(logp_N: Tensor, advantage_N: Tensor, mask_N: Tensor) -> Tensor:
    """`-A log pi`; 0 and without gradient where masked.

    Multiplied by a constant weight it gives CISPO, MiniRL and GLM-5's asynchronous objective: the weight is clipped or
    masked, the gradient of log pi never is.

    Source: Williams 1992, "Simple statistical gradient-following algorithms" (REINFORCE).
    """
    return -(torch.where(mask_N, logp_N, 0.0) * advantage_N)


def policy_gradient(rho_N: Tensor, advantage_N: Tensor) -> Tensor:
    """`-rho A`: at rho = 1 its gradient is REINFORCE's, `-A grad log pi`.

    rho_N, advantage_N: float per token. Returns the loss per token.

    Source: Williams 1992 (REINFORCE); as a ratio, Schulman et al. 2017, arXiv 1707.06347, section 3, equation 6.
    """
    return -(rho_N * advantage_N)


def clipped(
    rho_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """`-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`; no gradient where `clip_acts`.

    rho_N, advantage_N: float per token. dual_clip: c > 1 bounds the objective of a negative advantage by `c A`.
    Returns the loss per token.

    >>> clipped(torch.tensor([1.5, 1.5]), torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    tensor([-1.2000,  1.5000])

    Source: Schulman et al. 2017, PPO, arXiv 1707.06347, section 3, equation 7; two bounds: Yu et al. 2025, DAPO,
    arXiv 2503.14476, section 3.1; dual clip: Ye et al. 2020, arXiv 1912.09729, "Dual-clip PPO".
    """
    objective_N = torch.minimum(rho_N * advantage_N, rho_N.clamp(1 - clip_low, 1 + clip_high) * advantage_N)
    if dual_clip is not None:
        floor_N = torch.where(advantage_N < 0, dual_clip * advantage_N, -torch.inf)
        objective_N = torch.maximum(objective_N, floor_N)
    return -objective_N


def clip_acts(
    rho_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Bool per token: where `clipped` stops the gradient.

    `A > 0 and rho > 1 + clip_high`, or `A < 0 and rho < 1 - clip_low`, or `A < 0 and rho > dual_clip`.
    """
    acts_N = ((advantage_N > 0) & (rho_N > 1 + clip_high)) | ((advantage_N < 0) & (rho_N < 1 - clip_low))
    if dual_clip is not None:
        acts_N = acts_N | ((advantage_N < 0) & (rho_N > dual_clip))
    return acts_N


def clamped(rho_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """`-clip(rho, 1 - clip_low, 1 + clip_high) A`: no gradient outside the bounds, whatever the sign of A.

    >>> clamped(torch.tensor([0.6, 1.5]), torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    tensor([-0.8000,  1.2000])

    Source: Kimi K2.5, arXiv 2602.02276.
    """
    return -(rho_N.clamp(1 - clip_low, 1 + clip_high) * advantage_N)


def clamp_acts(rho_N: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Bool per token: where `clamped` stops the gradient."""
    return (rho_N > 1 + clip_high) | (rho_N < 1 - clip_low)


def squared_log_ratio(log_rho_N: Tensor) -> Tensor:
    """`(log rho)^2`: a quadratic pull towards the old policy.

    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.2 (mirror descent); per token in K2.5, arXiv 2602.02276.
    """
    return log_rho_N.square()


def clipped_value(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, value_clip: float | None) -> Tensor:
    """`1/2 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)`; None is no clip.

    >>> clipped_value(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0]), value_clip=0.2)
    tensor([1.6200])

    Source: Schulman et al. 2017, PPO, arXiv 1707.06347; the clip: its authors' implementation (openai/baselines, ppo2).
    """
    error_N = (value_N - return_N).square()
    if value_clip is not None:
        near_N = old_value_N + (value_N - old_value_N).clamp(-value_clip, value_clip)
        error_N = torch.maximum(error_N, (near_N - return_N).square())
    return 0.5 * error_N


def preference(margin_P: Tensor, beta: float) -> Tensor:
    """`-log sigmoid(beta margin)`, one number per pair.

    margin_P: log pi/ref of the preferred answer minus that of the other, each summed over its trained tokens.

    >>> preference(torch.tensor([0.0, 10.0]), beta=0.1)
    tensor([0.6931, 0.3133])

    Source: Rafailov et al. 2023, DPO, arXiv 2305.18290, equation 7; online: Guo et al. 2024, arXiv 2402.04792.
    """
    return -functional.logsigmoid(beta * margin_P)
