"""Lengths of rollouts: given, or drawn by number."""

import math
from statistics import NormalDist, fmean, median

import pytest

from headway.simulate.randomness import uniforms
from headway.simulate.workload import make_lengths
from headway.trace import Event
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


def test_uniforms_are_uniform_and_of_no_pattern():
    """Moments, a chi-square over 100 bins, neighbours and neighbouring seeds uncorrelated; bounds of 4 deviations."""
    draws = [uniforms("length", 0)(number) for number in NUMBERS]
    num = len(draws)
    assert all(0 < draw < 1 for draw in draws)
    assert fmean(draws) == pytest.approx(0.5, abs=4 / math.sqrt(12 * num))
    counts = [0] * 100
    for draw in draws:
        counts[int(draw * 100)] += 1
    chi_square = sum((count - num / 100) ** 2 / (num / 100) for count in counts)
    assert abs(chi_square - 99) < 4 * math.sqrt(2 * 99)
    others = {
        "next": [uniforms("length", 0)(number + 1) for number in NUMBERS],
        "seed": [uniforms("length", 1)(number) for number in NUMBERS],
        "stream": [uniforms("file", 0)(number) for number in NUMBERS],
    }
    for name, other in others.items():
        covariance = fmean((x - 0.5) * (y - 0.5) for x, y in zip(draws, other, strict=True))
        assert abs(covariance * 12) < 4 / math.sqrt(num), name


def test_drawn_lengths_follow_their_distribution_everywhere():
    """Kolmogorov-Smirnov: the largest distance to the distribution function, at its 0.1 % point 1.95 / sqrt(n)."""
    normal = NormalDist()
    cases = {
        "exponential": lambda length: 1 - math.exp(-length / 2.0),
        "lognormal:0.8": lambda length: normal.cdf((math.log(length / 2.0) + 0.32) / 0.8),
    }
    for spec, cdf in cases.items():
        drawn = sorted(make_lengths(spec, mean=2.0, seed=5)(number) for number in NUMBERS)
        distance = max(abs((rank + 0.5) / len(drawn) - cdf(length)) for rank, length in enumerate(drawn))
        assert distance < 1.95 / math.sqrt(len(drawn)), spec


def test_lengths_of_a_file_are_used_in_order_and_then_drawn_again(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("12\n7.5\n 30 \n")
    lengths = make_lengths(f"file:{file}", mean=1.0, seed=0)
    assert [lengths(number) for number in range(3)] == [12.0, 7.5, 30.0]
    drawn = [lengths(number) for number in range(3, 3003)]
    assert drawn == [make_lengths(f"file:{file}", mean=9.0, seed=0)(number) for number in range(3, 3003)]
    assert drawn != [make_lengths(f"file:{file}", mean=1.0, seed=1)(number) for number in range(3, 3003)]
    for length in (12.0, 7.5, 30.0):
        assert drawn.count(length) == pytest.approx(1000, abs=110)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n\n3\n", "lengths.txt:2 is '', and a line holds one number above 0"),
        ("1\n2 3\n", "lengths.txt:2 is '2 3'"),
        ("-1\n", "lengths.txt:1 is '-1'"),
        ("nan\n", "lengths.txt:1 is 'nan'"),
        ("", "lengths.txt is empty"),
    ],
)
def test_a_bad_line_of_a_file_is_named(tmp_path, text, message):
    (tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        make_lengths(f"file:{tmp_path / 'lengths.txt'}", mean=1.0, seed=0)


def test_lengths_of_a_run_are_its_tokens_by_group_and_member(tmp_path):
    def rollout(number, group, member, tokens):
        place = {"rollout": number, "group": group, "member": member, "lane": 0, "version": 0, "evaluation": False}
        return [
            Event("started", float(number), place),
            Event("generated", number + 0.5, {"rollout": number, "tokens": tokens, "finish": "stop"}),
        ]

    run = [Event("run", 0.0, {}), *rollout(0, 0, 0, 5), *rollout(1, 0, 1, 8), *rollout(2, 1, 0, 13)]
    (tmp_path / "trace.jsonl").write_text("".join(event.to_json() + "\n" for event in run))
    by_two = make_lengths(f"run:{tmp_path}", mean=1.0, seed=0, num_members=2)
    assert [by_two(0), by_two(1), by_two(2)] == [5, 8, 13]
    assert {by_two(number) for number in range(3, 300)} == {5, 8, 13}
    by_three = make_lengths(f"run:{tmp_path}", mean=1.0, seed=0, num_members=3)
    assert [by_three(0), by_three(1), by_three(3)] == [5, 8, 13]


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
        ("file:", "is not understood"),
        ("run:", "is not understood"),
        ("file:/no/such", "/no/such can't be read .No such file or directory.; it holds one length per line"),
        ("run:/no/such", "/no/such is no run: it holds no trace.jsonl"),
        ("gamma", "simulate.lengths 'gamma' is not understood; it may be constant, exponential, lognormal:SIGMA"),
        ("", "is not understood"),
        ("1,,3", "is not understood"),
        ("constant:2", "is not understood"),
        ("exponential:2", "is not understood"),
        ("1,0", "every length must be above 0"),
        ("1,-2", "every length must be above 0"),
        ("nan", "every length must be above 0"),
        ("inf", "every length must be above 0"),
        ("lognormal:0", "lognormal:0 needs a number above 0 and at most 10 after the colon"),
        ("lognormal:50", "lognormal:50 needs a number above 0 and at most 10 after the colon"),
        ("lognormal:x", "lognormal:x needs a number above 0 and at most 10 after the colon"),
        ("lognormal:nan", "lognormal:nan needs a number above 0 and at most 10 after the colon"),
    ],
)
def test_what_is_no_workload(spec, message):
    with pytest.raises(UserError, match=message):
        make_lengths(spec, mean=1.0, seed=0)
