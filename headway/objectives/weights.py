"""Pairs of log-probs -> importance weights.

Axis: N tokens of a batch or micro-batch, flat. Log-probs are subtracted, clamped and only then exponentiated, in
float32 or better.
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
    dtype = torch.promote_types(torch.promote_types(new_N.dtype, old_N.dtype), torch.float32)
    # The inputs are replaced, not only the result: `where` on the result alone would send 0 * inf = nan backward.
    safe_new_N = torch.where(mask_N, new_N.to(dtype), 0.0)
    safe_old_N = torch.where(mask_N, old_N.detach().to(dtype), 0.0)
    return (safe_new_N - safe_old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def truncated(ratio_N: Tensor, cap: float) -> Tensor:
    """The truncated importance weight `min(w, C)`, with gradients stopped.

    ratio_N: w = pi_prox / mu per token, >= 0; cap: C > 0. Truncation costs a bias of known size and bounds the
    variance: `E_mu[min(w, C) f] = E_pi[min(1, C / w) f]`.

    >>> truncated(torch.tensor([0.3, 1.0, 6.0]), cap=2.0)
    tensor([0.3000, 1.0000, 2.0000])

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (token-level TIS).
    """
    return ratio_N.detach().clamp(max=cap)
