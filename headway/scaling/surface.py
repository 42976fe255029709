"""How well the sigmoid fits at every midpoint and efficiency: the two rewards of the curve are solved for exactly.

Given C_mid and B, R = R_0 + G s with s = 1 / (1 + (C_mid / C)^B) is linear in R_0 and the gain G = A - R_0. So a fit
has two hard parameters and two easy ones, and the whole surface of the hard ones can be looked at: there is no start
from which a search could go astray.

The noise of neighbouring points may be alike: that of point n is rho times that of the point before it, and something
new, whose standard deviation is sigma times the point's spread. With

    <u, v> = (1 - rho^2) u_1 v_1 / spread_1^2 + sum over n > 1 of (u_n - rho u_n-1) (v_n - rho v_n-1) / spread_n^2

the misfit <y - R, y - R> is the sum of squares of what is new (generalised least squares with AR(1) noise). It is a
polynomial in rho, so every rho costs next to nothing.

Axes: N points, M midpoints, E efficiencies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Array = NDArray[np.float64]

ROUNDING = 1e-8
"""Of the sum of squares about the mean: no misfit is told apart from a smaller one. Rewards have some four digits."""

SINGULAR = 1e-12
"""Two columns whose determinant is this share of the largest possible one are taken for the same."""


@dataclass(frozen=True)
class Sample:
    """Points to be fitted, in order of compute. reward_N has mean zero, and start and ceiling are meant as it is.

    log_compute_N: -inf of compute 0. spread_N: standard deviation of each point's noise, up to a factor that all share.
    start: R_0 where it is held, else None; ceiling: A's upper bound, else None.
    """

    log_compute_N: Array
    reward_N: Array
    spread_N: Array
    start: float | None
    ceiling: float | None

    @property
    def freedom(self) -> int:
        """Degrees of freedom that are left for the noise."""
        return len(self.reward_N) - (4 if self.start is None else 3)

    @cached_property
    def precision_N(self) -> Array:
        return self.spread_N**-2.0

    @cached_property
    def linear(self) -> tuple[Array, Array]:
        """What the curve's linear part is made of beside the shares: a constant 1, and the rewards it explains."""
        return np.ones_like(self.reward_N), self.reward_N - (self.start or 0.0)

    @cached_property
    def linear_sums(self) -> list[Array]:
        """Of <1, 1>, <1, y> and <y, y>."""
        one_N, y_N = self.linear
        return [_sums(u_N, v_N, self.precision_N) for u_N, v_N in ((one_N, one_N), (one_N, y_N), (y_N, y_N))]

    @cached_property
    def weights_N6(self) -> Array:
        """share @ that are the sums of <share, 1>, and then those of <share, y>."""
        return np.concatenate([_weights(v_N, self.precision_N) for v_N in self.linear], axis=1)

    @cached_property
    def least_misfit(self) -> float:
        return ROUNDING * float(self.precision_N @ self.reward_N**2)

    def shares(self, at: Array) -> Array:
        """at: (2,), logs of a midpoint and an efficiency -> (N,)."""
        return share(self.log_compute_N, at[0], np.exp(at[1]))

    def whitened(self, u: Array, rho: float) -> Array:
        """(..., N) -> (..., N): what is new at each point, so that <u, v> is a plain sum of products."""
        first = np.sqrt(1 - rho**2) * u[..., :1]
        return np.concatenate([first, u[..., 1:] - rho * u[..., :-1]], axis=-1) / self.spread_N


def share(log_compute: Array | float, log_midpoint: Array | float, efficiency: Array | float) -> Array:
    """1 / (1 + (C_mid / C)^B), broadcast; 0 at compute 0."""
    return expit(efficiency * (np.asarray(log_compute) - log_midpoint))


@dataclass(frozen=True)
class Solved:
    """The best start and gain at every midpoint and efficiency, all (M, E).

    misfit: <y - R, y - R>, inf where the curve would not rise. var_start, var_gain, covariance: of the two, for noise
    with sigma 1.
    """

    misfit: Array
    start: Array
    gain: Array
    var_start: Array
    var_gain: Array
    covariance: Array

    @property
    def asymptote(self) -> Array:
        return self.start + self.gain

    @property
    def var_asymptote(self) -> Array:
        return self.var_start + self.var_gain + 2 * self.covariance

    def at(self, share: Array) -> tuple[Array, Array]:
        """The curve where `share` of the gain is there, and its variance."""
        variance = self.var_start + share * share * self.var_gain + 2 * share * self.covariance
        return self.start + share * self.gain, variance


class Surface:
    """Sums over the points, at every midpoint and efficiency -> `solved` for any rho."""

    def __init__(self, sample: Sample, log_midpoint_M: Array, log_efficiency_ME: Array) -> None:
        """log_efficiency_ME: each midpoint has its own; (1, E) if they are the same for all."""
        self._sample = sample
        share_MEN = share(sample.log_compute_N, log_midpoint_M[:, None, None], np.exp(log_efficiency_ME)[:, :, None])
        by_share = np.moveaxis(share_MEN @ sample.weights_N6, -1, 0)
        self._share_one, self._share_y = by_share[:3], by_share[3:]
        self._share_share = _sums(share_MEN, share_MEN, sample.precision_N)

    def solved(self, rho: float) -> Solved:
        """Axes M and E."""
        sample = self._sample
        y_y = _product(sample.linear_sums[2], rho)
        with np.errstate(all="ignore"):  # a curve that is the same at all points has no solution, and gets none
            start, gain, *variances = self._both(rho) if sample.start is None else self._gain_alone(rho, sample.start)
            explained = gain * _product(self._share_y, rho)
            if sample.start is None:
                explained = explained + start * _product(sample.linear_sums[1], rho)
            found = Solved(y_y - explained, start, gain, *variances)
            misfit = _under_the_ceiling(found, sample.ceiling)
            rises = np.isfinite(misfit) & (gain > 0)
        return replace(found, misfit=np.where(rises, np.maximum(misfit, sample.least_misfit), np.inf))

    def _both(self, rho: float) -> tuple[Array, ...]:
        """Start, gain, their variances and covariance: the normal equations of two columns."""
        one_one, one_y, _ = (_product(sums, rho) for sums in self._sample.linear_sums)
        share_one, share_y = _product(self._share_one, rho), _product(self._share_y, rho)
        share_share = _product(self._share_share, rho)
        largest = share_share * one_one
        determinant = largest - share_one**2
        determinant = np.where(determinant > SINGULAR * largest, determinant, np.nan)
        start = (share_share * one_y - share_one * share_y) / determinant
        gain = (share_y * one_one - share_one * one_y) / determinant
        return start, gain, share_share / determinant, one_one / determinant, -share_one / determinant

    def _gain_alone(self, rho: float, start: float) -> tuple[Array, ...]:
        share_share = _product(self._share_share, rho)
        gain = _product(self._share_y, rho) / share_share
        nothing = np.zeros_like(gain)
        return np.full_like(gain, start), gain, nothing, 1 / share_share, nothing


def _under_the_ceiling(found: Solved, ceiling: float | None) -> Array:
    """The misfit, with the asymptote held at the ceiling where it would be above."""
    if ceiling is None:
        return found.misfit
    over = np.maximum(found.asymptote - ceiling, 0.0)
    return found.misfit + over**2 / found.var_asymptote


def constant_misfit(sample: Sample, rho: float) -> float:
    """<y - R, y - R> of the best R that is the same at all points: the start, where that is held."""
    one_one, one_y, y_y = (float(_product(sums, rho)) for sums in sample.linear_sums)
    return y_y if sample.start is not None else y_y - one_y**2 / one_one


# ---- <u, v> from three sums, the factors of 1, rho and rho^2 in it


def _sums(u: Array, v: Array, precision_N: Array) -> Array:
    """(3, ...) of (..., N)."""
    product, crossed = u * v, u[..., 1:] * v[..., :-1] + u[..., :-1] * v[..., 1:]
    later_N = precision_N[1:]
    before = product[..., :-1] @ later_N - product[..., 0] * precision_N[0]
    return np.stack([product @ precision_N, -crossed @ later_N, before])


def _weights(v_N: Array, precision_N: Array) -> Array:
    """(N, 3): u @ that is _sums(u, v)."""
    weight_N3 = np.zeros((len(v_N), 3))
    weight_N3[:, 0] = v_N * precision_N
    weight_N3[1:, 1] -= v_N[:-1] * precision_N[1:]
    weight_N3[:-1, 1] -= v_N[1:] * precision_N[1:]
    weight_N3[:-1, 2] += v_N[:-1] * precision_N[1:]
    weight_N3[0, 2] -= v_N[0] * precision_N[0]
    return weight_N3


def _product(sums: Array, rho: float) -> Array:
    return sums[0] + rho * sums[1] + rho**2 * sums[2]
