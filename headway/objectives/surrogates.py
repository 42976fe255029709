"""Ratios and advantages -> a loss per token, to be minimised.

Axis: N tokens, flat. `rho = exp(log pi - sg(log pi_prox))`, the ratio that carries the gradient (`sg` stops it). Where
one optimizer step is taken per batch, `pi_prox = sg(pi)`, rho is 1 and no clip acts.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
