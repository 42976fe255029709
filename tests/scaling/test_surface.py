"""Sums, generalised least squares and the region, each against another way to the same number."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import brentq, least_squares
from scipy.special import stdtrit

from headway.scaling import search
from headway.scaling.learning_curve import Measured
from headway.scaling.model import Model
from headway.scaling.search import best_fits
from headway.scaling.surface import Sample, Surface, constant_misfit
from tests.scaling.curves import PUBLISHED, noisy, spaced


def a_sample(*, start=None, ceiling=None, num=9) -> Sample:
    draw = np.random.default_rng(3)
    compute_N = np.concatenate([[0.0], np.sort(draw.uniform(0.05, 1.0, num - 1))])
    reward_N = draw.normal(0.0, 0.05, num) + 0.5 / (1 + np.append(np.inf, (0.3 / compute_N[1:]) ** 1.5))
    with np.errstate(divide="ignore"):
        return Sample(np.log(compute_N), reward_N - reward_N.mean(), draw.uniform(0.5, 2.0, num), start, ceiling)


def covariance(sample: Sample, rho: float) -> np.ndarray:
    """Of noise that begins with spread_1 / sqrt(1 - rho^2) and goes on as rho times the last and spread times new."""
    num = len(sample.reward_N)
    of_new = np.zeros((num, num))
    for n in range(num):
        of_new[n] = rho * of_new[n - 1] if n else 0.0
        of_new[n, n] = sample.spread_N[n] / (np.sqrt(1 - rho**2) if n == 0 else 1.0)
    return of_new @ of_new.T


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_whitened_vectors_multiply_as_the_inverse_covariance_does(rho):
    sample = a_sample()
    u_N, v_N = np.random.default_rng(1).normal(size=(2, 9))
    expected = u_N @ np.linalg.solve(covariance(sample, rho), v_N)
    assert sample.whitened(u_N, rho) @ sample.whitened(v_N, rho) == pytest.approx(expected)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_start_and_gain_are_those_of_generalised_least_squares(rho):
    sample = a_sample()
    midpoint_M, efficiency_ME = np.log([0.1, 0.4]), np.log([[0.8, 1.5, 4.0], [1.0, 2.0, 3.0]])
    solved = Surface(sample, midpoint_M, efficiency_ME).solved(rho)
    for m, e in np.ndindex(2, 3):
        share_N = sample.shares(np.array([midpoint_M[m], efficiency_ME[m, e]]))
        columns = np.stack([np.ones(9), share_N])
        inverse = np.linalg.inv(covariance(sample, rho))
        of_both = np.linalg.inv(columns @ inverse @ columns.T)
        start, gain = of_both @ columns @ inverse @ sample.reward_N
        left_N = sample.reward_N - start - gain * share_N
        assert [solved.start[m, e], solved.gain[m, e]] == pytest.approx([start, gain])
        assert solved.misfit[m, e] == pytest.approx(left_N @ inverse @ left_N)
        assert solved.var_asymptote[m, e] == pytest.approx(of_both.sum())
        _, variance = solved.at(share_N[3])
        assert variance[m, e] == pytest.approx(columns[:, 3] @ of_both @ columns[:, 3])


def test_a_start_that_is_given_leaves_one_column():
    sample = a_sample(start=-0.3)
    at = np.log([0.3, 1.5])
    share_N = sample.shares(at)
    precision_N = sample.spread_N**-2
    gain = np.sum(precision_N * share_N * (sample.reward_N + 0.3)) / np.sum(precision_N * share_N**2)
    solved = Surface(sample, at[:1], at[None, 1:]).solved(0.0)
    assert (solved.start[0, 0], solved.gain[0, 0]) == (-0.3, pytest.approx(gain))
    assert solved.misfit[0, 0] == pytest.approx(np.sum(precision_N * (sample.reward_N + 0.3 - gain * share_N) ** 2))


@pytest.mark.parametrize("start", [None, -0.3])
def test_under_a_ceiling_the_best_curve_ends_there(start):
    """With the asymptote held, the start alone is fitted; both ways to the misfit agree."""
    free = best_fits(a_sample(start=start))[0]
    ceiling = free.start + 0.8 * free.gain
    best = best_fits(a_sample(start=start, ceiling=ceiling))[0]
    assert best.start + best.gain == pytest.approx(ceiling)
    assert best.misfit > free.misfit
    sample = a_sample(start=start, ceiling=ceiling)
    shares_N = sample.shares(np.array([best.log_midpoint, best.log_efficiency]))
    left_N = (sample.reward_N - best.start - best.gain * shares_N) / sample.spread_N
    assert best.misfit == pytest.approx(left_N @ left_N)


def test_a_curve_that_falls_or_is_the_same_at_all_points_fits_nothing():
    sample = a_sample()
    falling = Sample(sample.log_compute_N, -sample.reward_N, sample.spread_N, None, None)
    assert np.isinf(Surface(falling, np.log([0.3]), np.log([[1.5]])).solved(0.0).misfit).all()
    after_all = Sample(sample.log_compute_N[1:], sample.reward_N[1:], sample.spread_N[1:], None, None)
    assert np.isinf(Surface(after_all, np.array([-60.0]), np.log([[20.0]])).solved(0.0).misfit).all()


def test_a_constant_is_fitted_by_the_weighted_mean():
    sample = a_sample()
    weights_N = sample.spread_N**-2
    mean = np.average(sample.reward_N, weights=weights_N)
    assert constant_misfit(sample, 0.0) == pytest.approx(np.sum(weights_N * (sample.reward_N - mean) ** 2))


# ---- the region, against profiles that are searched for end by end


def profile_ends(points, which: str) -> tuple[float, float]:
    """Where the least squares with one parameter held grow by 1 + t^2 / f, all others fitted; independent noise."""
    compute_N = np.array([point.compute for point in points])
    reward_N = np.array([point.reward for point in points])
    names = ["start", "asymptote", "efficiency", "midpoint"]

    def residuals(values):
        start, asymptote, log_efficiency, log_midpoint = values
        with np.errstate(divide="ignore", over="ignore"):
            odds_N = np.exp(np.exp(log_efficiency) * (log_midpoint - np.log(compute_N)))
        return start + (asymptote - start) / (1 + odds_N) - reward_N

    fit = least_squares(residuals, [0.25, 0.6, np.log(1.9), np.log(3000)], xtol=1e-14, ftol=1e-14, gtol=1e-14)
    held, freedom = names.index(which), len(points) - 4
    limit = 2 * fit.cost * (1 + stdtrit(freedom, 0.975) ** 2 / freedom)

    def beyond(value):
        def rest(others):
            return residuals(np.insert(others, held, value))

        return 2 * least_squares(rest, np.delete(fit.x, held), xtol=1e-14, ftol=1e-14, gtol=1e-14).cost - limit

    reach = 0.02 if which in ("start", "asymptote") else 0.1
    ends = []
    for sign in (-1, 1):
        far = next(reach * 1.5**k for k in range(20) if beyond(fit.x[held] + sign * reach * 1.5**k) > 0)
        end = brentq(beyond, fit.x[held], fit.x[held] + sign * far, xtol=1e-9)
        ends.append(float(end if which in ("start", "asymptote") else np.exp(end)))
    return ends[0], ends[1]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_region_ends_where_profiles_do(monkeypatch, seed):
    monkeypatch.setattr(search, "RHOS", (0.0,))
    sigmoid, last = PUBLISHED["8B ScaleRL"]
    points = noisy(sigmoid, [0.0, *spaced(1500, last, 13)], seed).points
    model = Model(points)
    found = {
        "asymptote": model.asymptotes(),
        "start": model.starts(),
        "efficiency": model.efficiencies(),
        "midpoint": model.midpoints(),
    }
    for name, ends in found.items():
        assert ends == pytest.approx(profile_ends(points, name), rel=2e-3), name


def test_points_without_noise_leave_next_to_nothing_open():
    sigmoid, last = PUBLISHED["8B ScaleRL"]
    model = Model([Measured(compute, sigmoid(compute)) for compute in [0.0, *spaced(1500, last, 11)]])
    assert model.curve.asymptote == pytest.approx(0.61, abs=1e-5)
    assert model.curve.midpoint == pytest.approx(2542, rel=1e-4)
    low, high = model.asymptotes()
    assert 0.609 < low < 0.61 < high < 0.611
