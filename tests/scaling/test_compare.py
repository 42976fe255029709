"""Comparing two fits: the interval of a difference by hand, and what is said of it."""

from __future__ import annotations

import math

import pytest

from headway.scaling.compare import compare
from headway.scaling.fit import Asked, fit
from headway.scaling.result import Difference, Estimate, Fit
from tests.scaling.curves import START, Sigmoid, noisy, spaced


def a_fit(name: str, asymptote: Estimate, efficiency: Estimate, midpoint: Estimate) -> Fit:
    start = Estimate(0.25, 0.25, 0.25, held=True)
    return Fit(name, "compute", "reward", [], asymptote, efficiency, midpoint, start, 0.0, 0.0, [], [], None, [])


def differences(*fits: Fit) -> dict[str, Difference]:
    (comparison,) = compare(fits)
    return {difference.parameter: difference for difference in comparison.differences}


ONE = a_fit("one", Estimate(0.6, 0.57, 0.64), Estimate(2.0, 1.0, 4.0), Estimate(1000, 900, 1100))
OPEN = Estimate(None, 0.7, None, "no plateau in sight")


def test_distances_of_two_intervals_add_up_as_standard_errors_do():
    """0.7 - 0.6, down to 0.1 - hypot(0.03, 0.04) and up to 0.1 + hypot(0.04, 0.03); in logs, ratios alike."""
    other = a_fit("other", Estimate(0.7, 0.67, 0.74), Estimate(2.0, 1.0, 4.0), Estimate(2000, 1800, 2200))
    found = differences(ONE, other)
    asymptote = found["asymptote"]
    assert (asymptote.value, asymptote.low, asymptote.high) == pytest.approx((0.1, 0.05, 0.15))
    assert asymptote.told
    assert asymptote.verdict == "other ends higher than one: A of other less that of one is 0.1 [0.05, 0.15]"
    efficiency = found["efficiency"]
    reach = math.exp(math.log(2) * math.sqrt(2))
    assert (efficiency.value, efficiency.low, efficiency.high) == pytest.approx((1.0, 1 / reach, reach))
    assert not efficiency.told
    assert efficiency.verdict.startswith("can't tell whether one or other rises more steeply: B of other over")
    assert found["midpoint"].verdict.startswith(
        "other is halfway later than one: C_mid of other over that of one is 2 ["
    )


def test_the_other_way_round_everything_is_the_other_way_round():
    other = a_fit("other", Estimate(0.7, 0.67, 0.74), Estimate(6.0, 5.0, 7.0), Estimate(2000, 1800, 2200))
    there, back = differences(ONE, other), differences(other, ONE)
    assert back["asymptote"].value == pytest.approx(-there["asymptote"].value)
    assert back["asymptote"].low == pytest.approx(-there["asymptote"].high)
    assert back["midpoint"].value == pytest.approx(1 / there["midpoint"].value)
    assert back["asymptote"].verdict.startswith("one ends lower than other")
    assert back["midpoint"].verdict.startswith("one is halfway sooner than other")


def test_what_is_not_determined_can_still_lie_apart():
    other = a_fit("other", OPEN, Estimate(None, 0.5, 9.0, "few"), Estimate(None, None, 950, "over"))
    found = differences(ONE, other)
    assert found["asymptote"].verdict == (
        "other ends higher than one: the asymptote of other isn't determined, but the two intervals lie apart"
    )
    assert found["asymptote"].told
    assert found["asymptote"].value is None
    assert found["efficiency"].verdict == (
        "can't tell whether one or other rises more steeply: the efficiency of other isn't determined"
    )
    assert not found["midpoint"].told
    assert "one and other" in differences(a_fit("one", OPEN, OPEN, OPEN), other)["asymptote"].verdict


def test_an_end_at_the_figure_itself_is_no_end_missing():
    other = a_fit("other", Estimate(1.0, 0.9, 1.0), Estimate(2.0, 1.0, 4.0), Estimate(1000, 900, 1100))
    assert differences(ONE, other)["asymptote"].value == pytest.approx(0.4)


def test_every_pair_is_compared():
    pairs = [(one.first, one.second) for one in compare([ONE, ONE, ONE])]
    assert len(pairs) == 3
    assert compare([ONE]) == []


def fitted(asymptote: float, seed: int) -> Fit:
    curve = noisy(Sigmoid(START, asymptote, 1.92, 2542), spaced(1500, 16_000, 20), seed)
    return fit(curve, Asked(start=START))


def test_a_higher_asymptote_is_told_from_the_points():
    """0.52 and 0.61: what fp32 logits gave in the paper."""
    told = differences(fitted(0.52, 1), fitted(0.61, 2))["asymptote"]
    assert told.verdict.startswith("curve 2 ends higher than curve 1")
    assert told.value == pytest.approx(0.09, abs=0.03)


def test_runs_of_one_recipe_are_seldom_told_apart():
    """At 95 %: of 10 pairs, 3 or more are once in a hundred times."""
    comparisons = compare([fitted(0.61, seed) for seed in range(10, 15)])
    assert len(comparisons) == 10
    for number in range(3):
        assert sum(comparison.differences[number].told for comparison in comparisons) <= 2
