"""Lengths of rollouts: given, or drawn by number."""

import math
from statistics import fmean, median

import pytest

from headway.simulate.workload import make_lengths
from headway.types import UserError

NUMBERS = range(20_000)


def test_given_lengths_are_used_in_order_and_the_last_one_repeats():
    lengths = make_lengths("1,3,0.5", mean=7.0, seed=0)
    assert [lengths(number) for number in range(6)] == [1.0, 3.0, 0.5, 0.5, 0.5, 0.5]


def test_one_number_is_a_given_length():
    assert make_lengths("2", mean=7.0, seed=0)(99) == 2.0


def test_constant_lengths_are_the_mean():
    assert {make_lengths("constant", mean=2.5, seed=0)(number) for number in range(50)} == {2.5}


def test_exponential_lengths():
    """Mean m, median m ln 2, P(length > 2m) = exp(-2)."""
    drawn = [make_lengths("exponential", mean=3.0, seed=0)(number) for number in NUMBERS]
    assert fmean(drawn) == pytest.approx(3.0, rel=0.03)
    assert median(drawn) == pytest.approx(3.0 * math.log(2), rel=0.04)
    assert fmean(length > 6.0 for length in drawn) == pytest.approx(math.exp(-2), abs=0.01)
    assert min(drawn) > 0


@pytest.mark.parametrize(("spec", "sigma"), [("lognormal:0.5", 0.5), ("lognormal", 1.0), ("lognormal:1", 1.0)])
def test_lognormal_lengths(spec, sigma):
    """Mean m whatever sigma; median m exp(-sigma^2 / 2)."""
    drawn = [make_lengths(spec, mean=2.0, seed=0)(number) for number in NUMBERS]
    assert fmean(drawn) == pytest.approx(2.0, rel=0.04)
    assert median(drawn) == pytest.approx(2.0 * math.exp(-sigma * sigma / 2), rel=0.04)


@pytest.mark.parametrize("spec", ["exponential", "lognormal:1"])
def test_a_length_depends_on_seed_and_number_alone(spec):
    lengths = make_lengths(spec, mean=1.0, seed=3)
    forwards = [lengths(number) for number in range(20)]
    assert [make_lengths(spec, mean=1.0, seed=3)(number) for number in reversed(range(20))] == forwards[::-1]
    assert len(set(forwards)) == 20
    assert [make_lengths(spec, mean=1.0, seed=4)(number) for number in range(20)] != forwards
    assert make_lengths(spec, mean=5.0, seed=3)(0) == pytest.approx(5.0 * forwards[0])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gamma", "simulate.lengths 'gamma' is not understood; it may be constant, exponential, lognormal:SIGMA"),
        ("", "is not understood"),
        ("1,,3", "is not understood"),
        ("constant:2", "is not understood"),
        ("exponential:2", "is not understood"),
        ("1,0", "every length must be above 0"),
        ("1,-2", "every length must be above 0"),
        ("nan", "every length must be above 0"),
        ("inf", "every length must be above 0"),
        ("lognormal:0", "lognormal:0 needs a positive number after the colon"),
        ("lognormal:x", "lognormal:x needs a positive number after the colon"),
        ("lognormal:nan", "lognormal:nan needs a positive number after the colon"),
    ],
)
def test_what_is_no_workload(spec, message):
    with pytest.raises(UserError, match=message):
        make_lengths(spec, mean=1.0, seed=0)
