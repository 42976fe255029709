"""Laws that hold on every sample path, whatever the lengths."""

from dataclasses import replace

import pytest

from tests.schedule.doubles import Awkward, history_of, play
from tests.schedule.reference_simulator import random_case

SEEDS = range(150)


def cases(**fixed):
    """Random cases in which every rollout is scored and the data do not end."""
    for seed in SEEDS:
        yield replace(random_case(seed), unscored=0.0, num_groups=None, **fixed)


def test_without_run_ahead_every_lag_is_zero():
    for case in cases(run_ahead=0):
        assert not any(lag for _, _, lags in history_of(play(case, Awkward(case))).batches for lag in lags), case


def test_without_run_ahead_a_cycle_is_the_longest_rollout_and_the_step():
    for case in cases(run_ahead=0, group_size=1, lanes=4, groups_per_batch=4, score_times=(0.0,), unit=1.0):
        cycles = [max(case.length(4 * step + place) for place in range(4)) for step in range(case.steps)]
        expected = sum(cycles) + case.steps * (case.train_time + case.sync_time)
        assert play(case).ended_s == expected, case


@pytest.mark.parametrize("run_ahead", [0.5, 1, 1.75, 3])
def test_on_every_prefix_the_mean_lag_is_at_most_run_ahead(run_ahead):
    for case in cases(run_ahead=run_ahead):
        total = num = 0
        for _, rollouts, lags in history_of(play(case)).batches:
            total, num = total + sum(lags), num + len(rollouts)
            assert total <= run_ahead * num, case


def test_on_every_prefix_the_mean_lag_is_at_most_run_ahead_when_groups_fail():
    for case in cases(run_ahead=2, group_size=1):
        total = num = 0
        for _, rollouts, lags in history_of(play(replace(case, unscored=0.3))).batches:
            total, num = total + sum(lags), num + len(rollouts)
            assert total <= 2 * num, case


def test_when_the_trainer_is_the_bound_the_mean_lag_tends_to_run_ahead():
    case = replace(random_case(0), lanes=8, group_size=1, groups_per_batch=2, unscored=0.0, num_groups=None, longest=1)
    case = replace(case, run_ahead=3, steps=60, train_time=4.0, score_times=(0.0,), unit=1.0, sync_time=0.0)
    lags = [lag for _, _, lags in history_of(play(case)).batches[5:] for lag in lags]
    assert set(lags) == {3}


def test_more_run_ahead_never_ends_later():
    for case in cases():
        ends = [play(replace(case, run_ahead=run_ahead)).ended_s for run_ahead in (0, 0.5, 1, 1.5, 2, 4, 8)]
        assert ends == sorted(ends, reverse=True), case


def test_throughput_is_bounded_by_the_trainer_and_by_the_lanes():
    for case in cases():
        played = play(case)
        rollouts = [rollout for event in played.of("taken") for rollout in event["rollouts"]]
        assert played.ended_s >= case.steps * (case.train_time + case.sync_time) - 1e-9, case
        assert sum(case.length(rollout) for rollout in rollouts) <= case.lanes * played.ended_s + 1e-9, case


def test_past_saturation_more_run_ahead_changes_nothing():
    """Every lane is always busy: neither the throughput nor a single lag is different."""
    for case in cases(steps=3):
        enough = 4 + case.lanes // case.groups_per_batch + case.steps
        one, other = (play(replace(case, run_ahead=enough + more)) for more in (0, 5))
        assert history_of(one).batches == history_of(other).batches, case
