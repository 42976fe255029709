"""The curve, against values worked by hand and the published ones."""

from __future__ import annotations

import pytest

from headway.scaling.curve import Sigmoid
from tests.scaling.curves import PUBLISHED

SCALE_RL = Sigmoid(start=0.25, asymptote=0.61, efficiency=1.92, midpoint=2542)


@pytest.mark.parametrize("name", PUBLISHED)
def test_half_of_the_gain_is_there_at_the_midpoint(name):
    sigmoid, _ = PUBLISHED[name]
    assert sigmoid(sigmoid.midpoint) == pytest.approx((sigmoid.start + sigmoid.asymptote) / 2)


@pytest.mark.parametrize(
    ("gpu_hours", "reward"),
    [(100, 0.250720), (500, 0.265194), (1000, 0.301450), (2542, 0.430000), (8000, 0.574131), (100_000, 0.609688)],
)
def test_published_curve(gpu_hours, reward):
    assert SCALE_RL(gpu_hours) == pytest.approx(reward, abs=5e-7)


def test_by_hand():
    """B = 2 at three midpoints: 1 / (1 + 1/9) = 9/10 of the gain of 0.5."""
    assert Sigmoid(0.1, 0.6, 2.0, 10.0)(30.0) == pytest.approx(0.1 + 0.5 * 0.9)


def test_it_begins_at_the_start_and_never_exceeds_the_asymptote():
    assert SCALE_RL(0) == 0.25
    assert SCALE_RL(1e-300) == pytest.approx(0.25)
    assert SCALE_RL(1e300) == pytest.approx(0.61)
