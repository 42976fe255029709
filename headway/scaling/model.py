"""The sigmoid through measured points: the best one, those that can't be ruled out, and the noise about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from scipy.special import stdtrit

from headway.scaling.curve import Sigmoid
from headway.scaling.learning_curve import Measured
from headway.scaling.region import Region, region
from headway.scaling.search import LEVEL, Ends, best_fits, best_of, rises
from headway.scaling.surface import Sample


class Model:
    """The fitted points, in order of compute, with the best curve and the region of those that can't be ruled out.

    start: R_0, where it is held; ceiling: A's upper bound, where there is one. Inside, compute is in units of the
    largest, and rewards are meant from their mean.
    """

    def __init__(self, points: Sequence[Measured], start: float | None = None, ceiling: float | None = None) -> None:
        compute_N = np.array([point.compute for point in points])
        reward_N = np.array([point.reward for point in points])
        self.largest = float(compute_N[-1])
        self.smallest = float(compute_N[compute_N > 0][0])
        self.has_start = bool(compute_N[0] == 0) or start is not None
        self.start, self.ceiling = start, ceiling
        self._mean = float(reward_N.mean())
        with np.errstate(divide="ignore"):
            log_compute_N = np.log(compute_N / self.largest)
        self._sample = Sample(
            log_compute_N=log_compute_N,
            reward_N=reward_N - self._mean,
            spread_N=np.array([point.spread for point in points]),
            start=None if start is None else start - self._mean,
            ceiling=None if ceiling is None else ceiling - self._mean,
        )
        self._bests = best_fits(self._sample)
        self.best = best_of(self._bests)

    @property
    def curve(self) -> Sigmoid:
        start = self.best.start + self._mean
        return Sigmoid(
            start=start,
            asymptote=start + self.best.gain,
            efficiency=math.exp(self.best.log_efficiency),
            midpoint=self.largest * math.exp(self.best.log_midpoint),
        )

    @property
    def rises(self) -> bool:
        """By more than the points scatter."""
        return rises(self._sample, self._bests)

    @cached_property
    def region(self) -> Region:
        return region(self._sample, self._bests)

    # ---- intervals of 95 %; an end that the points don't set is infinite, or 0 of what is above 0

    def asymptotes(self) -> Ends:
        low, high = self._rewards(self.region.asymptotes())
        never_ends = self.region.log_midpoint[1] == math.inf or self.region.log_efficiency[0] == -math.inf
        return low, (math.inf if self.ceiling is None else self.ceiling) if never_ends else high

    def starts(self) -> Ends:
        low, high = self._rewards(self.region.starts())
        never_began = self.region.log_midpoint[0] == -math.inf or self.region.log_efficiency[0] == -math.inf
        return -math.inf if never_began and not self.has_start else low, high

    def efficiencies(self) -> Ends:
        low, high = self.region.log_efficiency
        return math.exp(low), math.exp(high)

    def midpoints(self) -> Ends:
        low, high = self.region.log_midpoint
        return self.largest * math.exp(low), self.largest * math.exp(high)

    def at(self, compute: float) -> Ends:
        """Of the curve's reward at one compute."""
        return self._rewards(self.region.at(math.log(compute / self.largest) if compute > 0 else -math.inf))

    def _rewards(self, ends: Ends) -> Ends:
        """As they were measured, and under the ceiling."""
        ceiling = math.inf if self.ceiling is None else self.ceiling
        return min(ends[0] + self._mean, ceiling), min(ends[1] + self._mean, ceiling)

    # ---- noise

    def noise(self, spread: float) -> float:
        """Standard deviation about the curve of a point with that spread."""
        new = self.best.misfit / self._sample.freedom
        return spread * math.sqrt(new / (1 - self.best.rho**2))

    @property
    def usual_noise(self) -> float:
        """Root mean square over the points."""
        return self.noise(float(np.sqrt(np.mean(self._sample.spread_N**2))))

    def is_likely(self, point: Measured) -> bool:
        """Whether a further point lies where 95 % would: the curve may be off, and so may the point, independently."""
        foretold, (low, high) = self.curve(point.compute), self.at(point.compute)
        reach = self.noise(point.spread) * float(stdtrit(self._sample.freedom, 0.5 + LEVEL / 2))
        return -math.hypot(foretold - low, reach) <= point.reward - foretold <= math.hypot(high - foretold, reach)
