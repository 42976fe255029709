"""Laws that hold on every sample path, whatever the lengths; without a tolerance, except where a law has one."""

import math
import random
from dataclasses import dataclass, replace

import pytest

from tests.schedule.doubles import Awkward, play
from tests.schedule.reference_simulator import Case, random_case

EVERYDAY = [range(80)]
THOUSANDS = [pytest.param(range(first, first + 1000), marks=pytest.mark.slow) for first in range(80, 2080, 1000)]
SEEDS = pytest.mark.parametrize("seeds", EVERYDAY + THOUSANDS, ids=str)

ORDERS = [("finished", None), ("started", None), ("window", 1), ("window", 4)]


def cases(seeds, **fixed):
    """Random cases in which every rollout is scored and the data do not end."""
    for seed in seeds:
        yield replace(random_case(seed), unscored=0.0, num_groups=None, **fixed)


def in_order(case):
    order, window = ORDERS[case.seed % len(ORDERS)]
    return replace(case, order=order, window=window)


# Lag


@SEEDS
def test_without_run_ahead_every_lag_is_zero(seeds):
    for case in map(in_order, cases(seeds, run_ahead=0)):
        assert not any(play(case, Awkward(case)).lags), case


@SEEDS
def test_on_every_prefix_the_mean_lag_is_at_most_run_ahead(seeds):
    """In whole groups: A = floor(run_ahead x G) of them may run ahead, and the mean is at most A / G."""
    for case in map(in_order, cases(seeds)):
        case = replace(case, run_ahead=(0.5, 1, 1.75, 3)[case.seed // len(ORDERS) % 4])
        ahead = math.floor(case.run_ahead * case.groups_per_batch)
        total = num = 0
        for taken in play(case).of("taken"):
            total, num = total + sum(taken["lags"]), num + len(taken["lags"])
            assert total * case.groups_per_batch <= ahead * num, case


@SEEDS
def test_on_every_prefix_the_mean_lag_is_at_most_run_ahead_when_groups_fail(seeds):
    for case in cases(seeds, run_ahead=2, group_size=1):
        total = num = 0
        for taken in play(replace(case, unscored=0.3)).of("taken"):
            total, num = total + sum(taken["lags"]), num + len(taken["lags"])
            assert total <= 2 * num, case


@SEEDS
def test_in_order_of_start_no_lag_is_above_run_ahead(seeds):
    for case in cases(seeds, order="started"):
        assert max(play(case).lags) <= math.ceil(case.run_ahead), case


@pytest.mark.parametrize("order", ORDERS)
def test_when_admission_binds_every_lag_is_run_ahead_from_then_on(order):
    """Lanes for all that is admitted, none longer than a step: whoever starts waits for run_ahead whole steps."""
    for case in cases(range(60), groups_per_batch=2, group_size=1, longest=4, unit=1.0, score_times=(0.0,), steps=12):
        case = replace(case, lanes=20, train_time=4.0, run_ahead=case.seed % 5, order=order[0], window=order[1])
        batches = play(case).of("taken")
        assert {lag for taken in batches[case.run_ahead :] for lag in taken["lags"]} == {case.run_ahead}, case


@dataclass(frozen=True)
class Exponential(Case):
    """Lengths of mean 1."""

    def length(self, group, member=0):
        return random.Random(f"{self.seed}:length:{group}").expovariate(1.0)


def steady_state(lanes, size, train_time, run_ahead, *, seed, steps=400, skip=60):
    """-> mean lag, trainer utilisation and throughput, from the end of step `skip` on."""
    case = Exponential(lanes, 1, size, run_ahead, steps=steps, train_time=train_time, seed=seed)
    played = play(case)
    taken = played.of("taken")[skip:]
    began_s = played.of("published")[skip - 1].at_s
    lags = [lag for event in taken for lag in event["lags"]]
    measured_s = played.ended_s - began_s
    return sum(lags) / len(lags), len(taken) * train_time / measured_s, len(lags) / measured_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lanes", "size", "train_time", "run_ahead"),
    [(64, 64, 0.1, 8), (64, 64, 0.5, 8), (64, 32, 0.25, 8), (64, 16, 0.125, 12), (64, 128, 1.0, 8), (48, 64, 0.7, 8)],
)
def test_where_the_lanes_are_the_bound_the_mean_lag_is_lanes_per_batch_and_utilisation(
    lanes, size, train_time, run_ahead
):
    """Within 0.5 %; every lane is always busy."""
    runs = [steady_state(lanes, size, train_time, run_ahead, seed=seed) for seed in range(4)]
    lag, utilisation, _ = (sum(values) / len(runs) for values in zip(*runs, strict=True))
    assert lag == pytest.approx(lanes / size + utilisation, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "train_time", "run_ahead"), [(64, 0.5, 1), (64, 1.0, 1), (32, 0.25, 1), (32, 0.25, 2)]
)
def test_where_admission_is_the_bound_the_mean_lag_is_run_ahead(size, train_time, run_ahead):
    """Lanes are not all busy: run_ahead is below lanes / batch + the trainer's utilisation."""
    lag, _, throughput = steady_state(64, size, train_time, run_ahead, seed=1)
    assert throughput < 0.97 * min(64, size / train_time)
    assert lag == pytest.approx(run_ahead, rel=0.002)


# Time


def test_without_run_ahead_a_cycle_is_the_longest_rollout_and_the_step():
    fixed = {"run_ahead": 0, "group_size": 1, "lanes": 4, "groups_per_batch": 4, "score_times": (0.0,), "unit": 1.0}
    for case in cases(range(150), **fixed):
        cycles = [max(case.length(4 * step + place) for place in range(4)) for step in range(case.steps)]
        expected = sum(cycles) + case.steps * (case.train_time + case.sync_time)
        assert play(case).ended_s == expected, case


@SEEDS
def test_more_run_ahead_never_ends_later(seeds):
    for case in cases(seeds):
        ends = [play(replace(case, run_ahead=run_ahead)).ended_s for run_ahead in (0, 0.5, 1, 1.5, 2, 4, 8)]
        assert ends == sorted(ends, reverse=True), case


@SEEDS
def test_no_step_ends_later_with_more_run_ahead(seeds):
    """The law on which the one above rests."""
    for case in cases(seeds):
        less, more = (play(replace(case, run_ahead=run_ahead)).of("published") for run_ahead in (1, 2))
        assert all(b.at_s <= a.at_s for a, b in zip(less, more, strict=True)), case


@SEEDS
def test_throughput_is_bounded_by_the_trainer_and_by_the_lanes(seeds):
    """min(N / m, B / T): steps follow one another, and lanes hold each rollout for its length. In whole numbers."""
    for case in cases(seeds, unit=1.0):
        played = play(case)
        lengths = {(e["group"], e["member"]): case.length(e["group"], e["member"]) for e in played.of("started")}
        groups = set(played.trained_groups)
        assert case.steps * (case.train_time + case.sync_time) <= played.ended_s, case
        assert (
            sum(length for (group, _), length in lengths.items() if group in groups) <= case.lanes * played.ended_s
        ), case


@SEEDS
def test_past_saturation_more_run_ahead_changes_nothing(seeds):
    """Every lane is always busy: neither a batch nor a single lag is different."""
    for case in cases(seeds, steps=3):
        enough = 4 + case.lanes // case.groups_per_batch + case.steps
        one, other = (play(replace(case, run_ahead=enough + more)) for more in (0, 5))
        assert [event.fields for event in one.of("taken")] == [event.fields for event in other.of("taken")], case
