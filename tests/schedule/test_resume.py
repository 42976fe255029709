"""A run that is killed and resumed trains the groups that an uninterrupted one trains, each of them once."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from tests.schedule.doubles import Awkward, Plain, play
from tests.schedule.reference_simulator import Case, random_case


def saved_on_the_way(case, **more):
    """The run, and the account of every version it published."""
    stages = Plain(case)
    played = play(case, stages, save_every=1, **more)
    return played, stages.saved


def trained_before(played, progress):
    """The groups behind the weights that were saved with this account."""
    return [g for event in played.of("taken") if event["version"] < progress["version"] for g in event["groups"]]


def drained_case(seed):
    """More steps than data, so that every group is trained or fails."""
    return replace(random_case(seed), num_groups=1 + seed % 17, steps=1000)


def test_a_worked_account():
    """Hand-sized example: groups 0 and 2 are trained first, so that group 1 is open below group 2."""
    case = Case(lanes=2, groups_per_batch=2, run_ahead=1, steps=2, lengths=(1, 3, 1))
    _, saved = saved_on_the_way(case)
    sizes = {"batch_size": 2, "group_size": 1}
    assert saved == [
        {"version": 1, **sizes, "watermark": 1, "resolved_above": [2], "groups_released": 0},
        {"version": 2, **sizes, "watermark": 4, "resolved_above": [], "groups_released": 0},
    ]


def test_a_worked_resume():
    """Group 1 is started again, group 2 is not; then come new ones."""
    case = Case(lanes=2, groups_per_batch=2, run_ahead=1, steps=2, lengths=(1,))
    progress = {"version": 1, "watermark": 1, "resolved_above": [2], "groups_released": 0}
    played = play(case, progress=progress)
    assert [event["group"] for event in played.of("started")] == [1, 3, 4, 5]
    (batch,) = played.of("taken")
    assert (batch["version"], batch["groups"], batch["lags"]) == (1, [1, 3], [0, 0])
    assert [event["version"] for event in played.of("published")] == [2]


@pytest.mark.parametrize("seeds", [range(first, first + 30) for first in (0, 30, 60)], ids=str)
def test_over_a_drained_epoch_the_same_groups_are_trained(seeds):
    for seed in seeds:
        case = drained_case(seed)
        uninterrupted, saved = saved_on_the_way(case)
        for progress in saved:
            resumed = play(case, Awkward(case), progress=progress)
            groups = trained_before(uninterrupted, progress) + resumed.trained_groups
            assert Counter(groups) == Counter(uninterrupted.trained_groups), (case, progress)
            assert resumed.ledger.groups_released == uninterrupted.ledger.groups_released, (case, progress)


def test_a_resumed_run_can_be_resumed():
    for seed in range(40):
        case = drained_case(seed)
        first, saved = saved_on_the_way(case)
        if not saved:
            continue
        second, saved_again = saved_on_the_way(case, progress=saved[0])
        if not saved_again:
            continue
        third = play(case, progress=saved_again[0])
        groups = trained_before(first, saved[0]) + trained_before(second, saved_again[0]) + third.trained_groups
        assert Counter(groups) == Counter(first.trained_groups), case


def test_without_an_end_of_the_data_no_group_is_trained_twice():
    for seed in range(60):
        case = replace(random_case(seed), num_groups=None, steps=6)
        uninterrupted, saved = saved_on_the_way(case)
        for progress in saved:
            resumed = play(case, progress=progress)
            groups = trained_before(uninterrupted, progress) + resumed.trained_groups
            assert len(groups) == len(set(groups)) == 6 * case.groups_per_batch, (case, progress)


def test_the_watermark_and_what_is_above_it_are_the_trained_and_the_failed():
    for seed in range(60):
        case = replace(random_case(seed), steps=8)
        played, saved = saved_on_the_way(case)
        for progress in saved:
            watermark, above = progress["watermark"], progress["resolved_above"]
            assert above == sorted(set(above))
            assert watermark not in above
            assert all(group > watermark for group in above)
            resolved = {*range(watermark), *above}
            trained = set(trained_before(played, progress))
            assert trained <= resolved
            assert all(case.fails(group) for group in resolved - trained)
            assert progress["groups_released"] == len(resolved - trained)


def test_a_resumed_run_gets_as_far_ahead_as_the_first_one():
    """Released and trained groups hold no slots: a resumed ledger admits run_ahead + 1 batches at once."""
    case = Case(lanes=100, groups_per_batch=4, run_ahead=2, steps=10, unscored=0.3, seed=3)
    _, saved = saved_on_the_way(case)
    assert saved[4]["groups_released"] > 2
    at_once = [event for event in play(case, progress=saved[4]).of("started") if event.at_s == 0]
    assert len(at_once) == 12


# What is saved


def versions_saved(case, **more):
    stages = Plain(case)
    play(case, stages, **more)
    return [progress["version"] for progress in stages.saved]


@pytest.mark.parametrize(("every", "versions"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (7, [5])])
def test_versions_are_saved_every_so_often_and_the_last_one_always(every, versions):
    assert versions_saved(Case(steps=5), save_every=every) == versions


def test_the_last_version_is_saved_when_the_data_end():
    assert versions_saved(Case(steps=100, num_groups=5)) == [3]


def test_the_last_version_is_saved_when_groups_that_fail_after_it_end_the_data():
    class FailsInGroup2(Case):
        def is_scored(self, group, member):
            return group != 2

    case = FailsInGroup2(steps=100, num_groups=3, run_ahead=0, groups_per_batch=2)
    assert versions_saved(case) == [1]
    assert versions_saved(case, save_every=1) == [1]


def test_saving_holds_back_the_next_batch_and_nothing_else():
    class SavesSlowly(Plain):
        async def save(self, progress):
            await super().save(progress)
            await asyncio.sleep(5.0)

    case = Case(steps=3)
    at_once, slow = play(case, save_every=1), play(case, SavesSlowly(case), save_every=1)
    for played in (at_once, slow):
        saves = [(event.at_s, event["version"]) for event in played.of("saving")]
        assert saves == [(event.at_s, event["version"]) for event in played.of("published")]
    ends = {event["version"]: event.at_s for event in slow.of("saved")}
    for event in slow.of("taken"):
        assert event["version"] == 0 or event.at_s >= ends[event["version"]]
    first_saving = slow.of("saving")[0].at_s
    assert any(event["version"] == 1 and event.at_s == first_saving for event in slow.of("started"))


# Evaluations of a resumed run


def evaluated(played):
    return [event["version"] for event in played.of("evaluated")]


def test_a_resumed_run_holds_the_evaluations_that_were_still_to_come():
    """The account of version 2 is saved before version 2 is evaluated to the end."""
    case = Case(steps=4)
    _, saved = saved_on_the_way(case)
    assert evaluated(play(case, progress=saved[0], evaluation_size=2, evaluate_every=2)) == [2, 4]
    assert evaluated(play(case, progress=saved[1], evaluation_size=2, evaluate_every=2)) == [2, 4]
    assert evaluated(play(case, progress=saved[1], evaluation_size=2, evaluate_every=0)) == [4]


def test_a_run_killed_in_its_last_evaluation_holds_it_again_and_trains_nothing():
    case = Case(steps=4)
    _, saved = saved_on_the_way(case)
    played = play(case, progress=saved[-1], evaluation_size=2)
    assert evaluated(played) == [4]
    assert played.trained_groups == []


def test_a_run_that_was_over_is_over_at_once():
    case = Case(steps=4)
    _, saved = saved_on_the_way(case)
    stages = Plain(case)
    assert play(case, stages, progress=saved[-1]).events == []
    assert stages.saved == []
