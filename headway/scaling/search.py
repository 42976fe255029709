"""The best curve, for each way in which neighbouring points may be alike; and what chance explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares
from scipy.special import fdtri

from headway.scaling.surface import Array, Sample, Surface, constant_misfit

RHOS = tuple(np.arange(0.0, 0.95, 0.1).tolist())
"""Autocorrelations of neighbouring points that are tried. Not below 0: that would narrow the intervals."""

LEVEL = 0.95

BELOW, BEYOND = 1e-2, 1e3
"""A midpoint is looked for from this times the smallest compute above 0 to this times the largest."""

EFFICIENCIES = (0.1, 20.0)

Ends = tuple[float, float]

EFFICIENCY_ENDS: Ends = float(np.log(EFFICIENCIES[0])), float(np.log(EFFICIENCIES[1]))

COARSE = 17
"""Values of each hard parameter on the grid over everything."""

MAX_EVALUATIONS = 60
"""Of a search for the best curve; some ten are usual. Where nothing rises, none is better than the next."""


@dataclass(frozen=True)
class Best:
    """The best curve for one rho. criterion: f log misfit + c, as in `headway.scaling.region`."""

    rho: float
    log_midpoint: float
    log_efficiency: float
    start: float
    gain: float
    misfit: float
    c: float
    criterion: float


def midpoint_ends(sample: Sample) -> Ends:
    """Logs of the midpoints between which one is looked for."""
    finite_N = sample.log_compute_N[np.isfinite(sample.log_compute_N)]
    return float(finite_N.min() + np.log(BELOW)), float(finite_N.max() + np.log(BEYOND))


def best_fits(sample: Sample) -> list[Best]:
    """For each of RHOS: bounded least squares from the fit before; from the best cell of a grid over everything for the
    first, and wherever that cell is better than what was found."""
    midpoint_M, efficiency_E = np.linspace(*midpoint_ends(sample), COARSE), np.linspace(*EFFICIENCY_ENDS, COARSE)
    surface = Surface(sample, midpoint_M, efficiency_E[None])
    found: list[Best] = []
    for rho in RHOS:
        misfit_ME = surface.solved(rho).misfit
        m, e = np.unravel_index(np.argmin(misfit_ME), misfit_ME.shape)
        on_grid = np.array([midpoint_M[m], efficiency_E[e]])
        best = _descend(sample, rho, np.array([found[-1].log_midpoint, found[-1].log_efficiency]) if found else on_grid)
        if best.misfit > misfit_ME[m, e]:
            best = _descend(sample, rho, on_grid)
        found.append(best)
    return found


def _descend(sample: Sample, rho: float, start: Array) -> Best:
    low, high = np.array([midpoint_ends(sample), EFFICIENCY_ENDS]).T
    margin = 1e-6 * (high - low)  # the search begins inside
    found = least_squares(
        lambda at: _residuals(sample, rho, at),
        np.clip(start, low + margin, high - margin),
        bounds=(low, high),
        x_scale=(1.0, 0.3),
        xtol=1e-8,
        max_nfev=MAX_EVALUATIONS,
    )
    at = np.asarray(found.x)
    misfit = float(Surface(sample, at[:1], at[None, 1:]).solved(rho).misfit[0, 0])
    first, gain = _rewards(sample, rho, at)
    c = _c(sample, rho, at, gain)
    criterion = sample.freedom * float(np.log(misfit)) + c
    return Best(rho, float(at[0]), float(at[1]), first, gain, misfit, c, criterion)


def _residuals(sample: Sample, rho: float, at: Array) -> Array:
    """What is new at each point, with the best start and gain."""
    start, gain = _rewards(sample, rho, at)
    return sample.whitened(sample.reward_N - start - gain * sample.shares(at), rho)


def _rewards(sample: Sample, rho: float, at: Array) -> tuple[float, float]:
    """The best start and gain: nothing where the curve would fall, or be the same at all points; under the ceiling."""
    solved = Surface(sample, at[:1], at[None, 1:]).solved(rho)
    start, gain = float(solved.start[0, 0]), float(solved.gain[0, 0])
    if not (np.isfinite(start) and gain > 0):
        return sample.start or 0.0, 0.0
    if sample.ceiling is None or start + gain <= sample.ceiling:
        return start, gain
    if sample.start is None:
        share_N = sample.shares(at)
        left_N = sample.whitened(1 - share_N, rho)
        rest_N = sample.whitened(sample.reward_N - sample.ceiling * share_N, rho)
        start = float(left_N @ rest_N / (left_N @ left_N))
    return start, sample.ceiling - start


def _c(sample: Sample, rho: float, at: Array, gain: float) -> float:
    """-log(1 - rho^2) + log det X'X. Columns of X that (nearly) depend on others leave no trace, whatever rho is."""
    share_N = sample.shares(at)
    slope_N = gain * share_N * (1 - share_N) * np.exp(at[1])
    distance_N = np.where(np.isfinite(sample.log_compute_N), sample.log_compute_N - at[0], 0.0)
    columns = [share_N, slope_N, slope_N * distance_N] + ([1 - share_N] if sample.start is None else [])
    plain = np.stack([column for column in columns if np.abs(column).max() > 0])
    scaled = sample.whitened(plain / np.linalg.norm(plain, axis=1, keepdims=True), rho)
    values = np.linalg.svd(scaled, compute_uv=False)
    return float(-np.log(1 - rho**2) + 2 * np.log(np.maximum(values, 1e-6 * values.max())).sum())


def best_of(bests: Sequence[Best]) -> Best:
    return min(bests, key=lambda one: one.criterion)


def limit(sample: Sample, best: Best, num_figures: int = 1) -> float:
    """The criterion up to which chance explains a curve, of which so many figures are asked at once."""
    freedom = sample.freedom
    ratio = num_figures * fdtri(num_figures, freedom, LEVEL)  # of one figure, the square of Student's t
    return best.criterion + freedom * float(np.log1p(ratio / freedom))


def rises(sample: Sample, bests: Sequence[Best]) -> bool:
    """Whether the points rule out that the reward is the same everywhere (an F test of the three other parameters)."""
    best = best_of(bests)
    flat = [
        sample.freedom * float(np.log(max(constant_misfit(sample, one.rho), sample.least_misfit))) + one.c
        for one in bests
    ]
    return min(flat) > limit(sample, best, num_figures=3)
