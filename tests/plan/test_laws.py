"""The closed laws, by hand and against the reference's tables. tests/schedule holds the real schedule to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.plan.laws import (
    admitted_rate,
    harmonic,
    largest_rate,
    may_start,
    mean_lag,
    most_started,
    saturated_lag,
    synchronous_rate,
    synchronous_utilisation,
)

HARMONIC = {2: 1.5, 4: 2.0833, 8: 2.7179, 16: 3.3807, 32: 4.0585, 64: 4.7439, 128: 5.4331, 256: 6.1243}
HARMONIC |= {512: 6.8165, 1024: 7.5092}
UTILISATION = {2: 0.6667, 4: 0.48, 8: 0.3679, 16: 0.2958, 32: 0.2464, 64: 0.2108, 128: 0.1841, 256: 0.1633}
UTILISATION |= {512: 0.1467, 1024: 0.1332}


@pytest.mark.parametrize("lanes", HARMONIC)
def test_waiting_for_the_longest_of_exponential_lengths(lanes):
    assert harmonic(lanes) == pytest.approx(HARMONIC[lanes], abs=5e-5)
    assert synchronous_utilisation(lanes) == pytest.approx(UTILISATION[lanes], abs=5e-5)


def test_rate_of_a_synchronous_schedule():
    """32 / (H_32 + 0.25) = 7.43."""
    assert synchronous_rate(32, 1.0, 0.25) == pytest.approx(7.43, abs=0.005)


@pytest.mark.parametrize(
    ("version", "run_ahead", "batch", "most"), [(0, 0, 2, 2), (0, 1, 2, 4), (1, 1, 2, 6), (3, 2, 32, 192)]
)
def test_how_many_may_be_started(version, run_ahead, batch, most):
    assert most_started(version, run_ahead, batch) == most


@given(st.integers(0, 10_000), st.integers(0, 50), st.integers(0, 16), st.integers(1, 512))
def test_both_forms_of_admission_are_one(num_started, version, run_ahead, batch):
    assert may_start(num_started, version, run_ahead, batch) == (num_started < most_started(version, run_ahead, batch))


@pytest.mark.parametrize(
    ("lanes", "batch", "utilisation", "lag"),
    [(64, 64, 0.5, 1.5), (64, 32, 0.504, 2.504), (64, 16, 0.499, 4.499), (64, 8, 0.480, 8.48), (48, 64, 0.525, 1.275)],
)
def test_lag_of_saturated_lanes(lanes, batch, utilisation, lag):
    assert saturated_lag(lanes, batch, utilisation) == pytest.approx(lag)


@pytest.mark.parametrize(
    ("run_ahead", "train_s", "lag"),
    [(0, 0.5, 0), (1, 0.5, 1), (8, 0.5, 1.5), (1, 2.0, 1), (8, 2.0, 8)],
)
def test_mean_lag_of_sixty_four_lanes_and_batches(run_ahead, train_s, lag):
    """The lag is run_ahead until lanes are saturated, and always where the trainer is the bound (train step 2.0)."""
    assert mean_lag(run_ahead, 64, 1.0, 64, train_s) == lag


def test_the_bounds_of_any_schedule():
    assert largest_rate(64, 1.0, 64, 0.5) == 64
    assert largest_rate(64, 1.0, 64, 2.0) == 32
    assert largest_rate(64, 1.0, 64, 0.0) == 64


def test_littles_law():
    """(1 + 1) x 32 rollouts that each stay 4 s: 16 a second."""
    assert admitted_rate(1, 32, 4.0) == 16
