"""All curves that the points can't rule out: the region of 95 % of the profile likelihood.

A dozen points of one run are noisy, neighbours are alike, and the surface is no paraboloid: as long as the plateau is
not in sight, a higher asymptote and a later midpoint fit as well. So no covariance is taken from the curvature at the
best fit, and nothing is resampled (blocks of a dozen points hold nothing to draw from). A curve stays in the region if
its misfit, with the autocorrelation rho that suits it, is no more than what chance gives:

    f log misfit + c(rho)  <=  least of these + f log(1 + t^2 / f)

with f degrees of freedom, t the quantile of Student's t, and c(rho) = -log(1 - rho^2) + log det X'X, X the curve's
derivatives at the best fit for that rho (restricted likelihood: without it, rho comes out too small, and the intervals
with it). The interval of a figure is its range over the region; one that is open at an end shows as such.

`docs/scaling.md` says how often these intervals hold the truth.

Sources: Patterson & Thompson, Biometrika 58 (1971), restricted likelihood; Bates & Watts, Nonlinear Regression Analysis
(1988), 6.1, profile t.

Axes: M midpoints, E efficiencies, K cells of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headway.scaling.search import COARSE, EFFICIENCY_ENDS, Best, Ends, best_of, limit, midpoint_ends
from headway.scaling.surface import Array, Sample, Solved, Surface, share

FINE = 31
"""Midpoints on the grid over the region, and efficiencies at each."""

CLOSINGS = 6
"""Rounds in which the best efficiency at a midpoint is closed in on, to about 1e-4 of itself."""

MAX_ZOOMS = 40
"""Far more than it takes to come down to what rounding leaves."""


@dataclass(frozen=True)
class Region:
    """Curves that the points can't rule out: cells of a grid, and around each the starts and asymptotes near its best.

    The cells are those inside for any rho. slack_K: how much worse than its best each may fit. log_midpoint,
    log_efficiency: their intervals; an end that was not found is -inf or inf.
    """

    log_midpoint_K: Array
    log_efficiency_K: Array
    solved: Solved
    slack_K: Array
    log_midpoint: Ends
    log_efficiency: Ends

    def asymptotes(self) -> Ends:
        return _range(self.solved.asymptote, self.solved.var_asymptote, self.slack_K)

    def starts(self) -> Ends:
        return _range(self.solved.start, self.solved.var_start, self.slack_K)

    def at(self, log_compute: float) -> Ends:
        """The lowest and the highest reward of its curves at one compute."""
        share_K = share(log_compute, self.log_midpoint_K, np.exp(self.log_efficiency_K))
        return _range(*self.solved.at(share_K), self.slack_K)


def _range(value_K: Array, variance_K: Array, slack_K: Array) -> Ends:
    """A figure v that is linear in start and gain may go so far that (v - best)^2 / variance uses up the slack."""
    half_K = np.sqrt(slack_K * np.maximum(variance_K, 0.0))
    return float((value_K - half_K).min()), float((value_K + half_K).max())


def region(sample: Sample, bests: Sequence[Best]) -> Region:
    """Midpoints inside are found first, with the best efficiency at each; then the efficiencies around that."""
    excess = _Excess(sample, bests)
    midpoint_M, efficiency_M, excess_M = _midpoints_inside(excess)
    efficiency_ME, excess_ME = _efficiencies_inside(excess, midpoint_M, efficiency_M)
    log_midpoint = _opened(_crossings([(midpoint_M, excess_M)]), midpoint_ends(sample))
    log_efficiency = _opened(_crossings(zip(efficiency_ME, excess_ME, strict=True)), EFFICIENCY_ENDS)
    return Region(*excess.inside(midpoint_M, efficiency_ME), log_midpoint, log_efficiency)


class _Excess:
    """By how much the criterion at a midpoint and an efficiency is above the limit, with the rho that suits best."""

    def __init__(self, sample: Sample, bests: Sequence[Best]) -> None:
        self.sample = sample
        self.best = best_of(bests)
        self._limit = limit(sample, self.best)
        self._likely = [one for one in bests if one.criterion <= self._limit]

    def __call__(self, midpoint_M: Array, efficiency_ME: Array) -> Array:
        surface = Surface(self.sample, midpoint_M, efficiency_ME)
        return np.minimum.reduce([self._of(surface.solved(one.rho).misfit, one) for one in self._likely])

    def _of(self, misfit_ME: Array, one: Best) -> Array:
        return self.sample.freedom * np.log(misfit_ME) + one.c - self._limit

    def inside(self, midpoint_M: Array, efficiency_ME: Array) -> tuple[Array, Array, Solved, Array]:
        """Log midpoints, log efficiencies, what was solved there, and the slack, of the cells inside for every rho."""
        surface = Surface(self.sample, midpoint_M, efficiency_ME)
        midpoint_ME = np.broadcast_to(midpoint_M[:, None], efficiency_ME.shape)
        parts: list[list[Array]] = []
        for one in self._likely:
            solved = surface.solved(one.rho)
            inside_ME = self._of(solved.misfit, one) <= 0
            slack_ME = np.exp((self._limit - one.c) / self.sample.freedom) - solved.misfit
            columns = (midpoint_ME, efficiency_ME, slack_ME, *vars(solved).values())
            parts.append([column_ME[inside_ME] for column_ME in columns])
        midpoint_K, efficiency_K, slack_K, *solved_K = (np.concatenate(column) for column in zip(*parts, strict=True))
        return midpoint_K, efficiency_K, Solved(*solved_K), slack_K


def _midpoints_inside(excess: _Excess) -> tuple[Array, Array, Array]:
    """FINE midpoints that hold the region, the best efficiency at each, and the excess there.

    Whatever the first grid finds inside is kept; if the region falls between two of its points, it is about the best
    fit.
    """
    whole = midpoint_ends(excess.sample)
    midpoint_M = np.linspace(*whole, FINE)
    efficiency_M, excess_M = _best_efficiencies(excess, midpoint_M)
    for _ in range(MAX_ZOOMS):
        inside = np.flatnonzero(excess_M <= 0)
        if len(inside) > FINE / 2:
            break
        step = midpoint_M[1] - midpoint_M[0]
        near = [excess.best.log_midpoint, *midpoint_M[inside]]
        midpoint_M = np.linspace(max(min(near) - step, whole[0]), min(max(near) + step, whole[1]), FINE)
        efficiency_M, excess_M = _best_efficiencies(excess, midpoint_M)
    return midpoint_M, efficiency_M, excess_M


def _best_efficiencies(excess: _Excess, midpoint_M: Array) -> tuple[Array, Array]:
    """At each midpoint, by closing in; and the excess there.

    With next to no noise it lies in a valley that a grid steps over; near the best fit, that fit's efficiency is in it.
    """
    low, high = EFFICIENCY_ENDS
    rows = np.arange(len(midpoint_M))
    best_M = np.full_like(midpoint_M, excess.best.log_efficiency)
    excess_M = excess(midpoint_M, best_M[:, None])[:, 0]
    centre_M, reach = np.full_like(midpoint_M, (low + high) / 2), (high - low) / 2
    for _ in range(CLOSINGS):
        low_M, high_M = np.clip([centre_M - reach, centre_M + reach], low, high)
        efficiency_ME = np.linspace(low_M, high_M, COARSE, axis=1)
        excess_ME = excess(midpoint_M, efficiency_ME)
        least_M = np.argmin(excess_ME, axis=1)
        is_better_M = excess_ME[rows, least_M] < excess_M
        best_M = np.where(is_better_M, efficiency_ME[rows, least_M], best_M)
        excess_M = np.where(is_better_M, excess_ME[rows, least_M], excess_M)
        centre_M, reach = best_M, reach * 3 / (COARSE - 1)  # a step and a half
    return best_M, excess_M


def _efficiencies_inside(excess: _Excess, midpoint_M: Array, efficiency_M: Array) -> tuple[Array, Array]:
    """FINE efficiencies at each midpoint that hold what of the region is there, and the excess at each."""
    low, high = EFFICIENCY_ENDS
    reach_M = np.full_like(midpoint_M, 0.05)
    for _ in range(MAX_ZOOMS):
        low_M, high_M = np.clip([efficiency_M - reach_M, efficiency_M + reach_M], low, high)
        inside_ME = excess(midpoint_M, np.linspace(low_M, high_M, FINE, axis=1)) <= 0
        cut_M = (inside_ME[:, 0] & (low_M > low)) | (inside_ME[:, -1] & (high_M < high))
        sparse_M = inside_ME.any(axis=1) & (inside_ME.sum(axis=1) < FINE / 4)
        if not (cut_M | sparse_M).any():
            break
        reach_M = np.where(cut_M, 2 * reach_M, np.where(sparse_M, reach_M / 2, reach_M))
    low_M, high_M = np.clip([efficiency_M - reach_M, efficiency_M + reach_M], low, high)
    efficiency_ME = np.linspace(low_M, high_M, FINE, axis=1)
    return efficiency_ME, excess(midpoint_M, efficiency_ME)


def _crossings(rows: Iterable[tuple[Array, Array]]) -> Ends:
    """rows: values in order, and the excess at each -> the lowest and the highest value where it is 0 in any row."""
    lows: list[float] = []
    highs: list[float] = []
    for values, excesses in rows:
        inside = np.flatnonzero(excesses <= 0)
        if len(inside):
            lows.append(_crossing(values, excesses, int(inside[0]), -1))
            highs.append(_crossing(values, excesses, int(inside[-1]), 1))
    return min(lows), max(highs)


def _crossing(values: Array, excesses: Array, inside: int, towards: int) -> float:
    """Between the last value inside and the first outside, in proportion."""
    outside = inside + towards
    if not 0 <= outside < len(values) or not np.isfinite(excesses[outside]):
        return float(values[inside])
    share = excesses[inside] / (excesses[inside] - excesses[outside])
    return float(values[inside] + share * (values[outside] - values[inside]))


def _opened(found: Ends, searched: Ends) -> Ends:
    """An end of an interval that is where the search ended is none."""
    low, high = found[0] > searched[0] + 1e-9, found[1] < searched[1] - 1e-9
    return (found[0] if low else -np.inf), (found[1] if high else np.inf)
