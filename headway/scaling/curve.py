"""The curve that is fitted: reward over compute."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sigmoid:
    """R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B), with R(0) = R_0.

    start: R_0, the reward before any compute; asymptote: A, the reward that no compute exceeds; efficiency: B, how
    steep the rise is; midpoint: C_mid, the compute at which half of the gain is there, in the unit of C.

    Source: Khatri et al. 2025, "The Art of Scaling Reinforcement Learning Compute for LLMs" (arXiv 2510.13786), eq. 1.

    >>> scale_rl_8b = Sigmoid(start=0.25, asymptote=0.61, efficiency=1.92, midpoint=2542)
    >>> [round(scale_rl_8b(gpu_hours), 6) for gpu_hours in (0, 100, 2542, 100_000)]
    [0.25, 0.25072, 0.43, 0.609688]
    """

    start: float
    asymptote: float
    efficiency: float
    midpoint: float

    def __call__(self, compute: float) -> float:
        return self.start + (self.asymptote - self.start) * self.share(compute)

    def share(self, compute: float) -> float:
        """Of the gain A - R_0 that is there at `compute`, from 0 to 1."""
        if compute <= 0:
            return 0.0
        log_odds = self.efficiency * (math.log(compute) - math.log(self.midpoint))
        return 1 / (1 + math.exp(min(-log_odds, 700.0)))
