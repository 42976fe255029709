"""A run that is killed and resumed trains the groups that an uninterrupted one trains, each of them once."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from headway.schedule.policy import Rules
from headway.stages import Generated, Restored, Scored
from headway.types import Receipt, VersionRun
from tests.schedule.doubles import Awkward, Plain, Sampled, play
from tests.schedule.reference_simulator import Case, random_case


def saved_on_the_way(case, **more):
    """The run, and the account of every version it published."""
    stages = Plain(case)
    played = play(case, stages, save_every=1, **more)
    return played, stages.saved


def trained_before(played, progress):
    """The groups behind the weights that were saved with this account."""
    return [g for event in played.of("taken") if event["version"] < progress["version"] for g in event["groups"]]


def resumed(case, stages, number, **more):
    """The run again, from the checkpoint of this number among those that the stages were given."""
    return play(case, progress=stages.saved[number], restored=stages.kept[number], **more)


def drained_case(seed):
    """More steps than data, so that every group is trained or fails."""
    return replace(random_case(seed), num_groups=1 + seed % 17, steps=1000)


def test_a_worked_account():
    """Hand-sized example: groups 0 and 2 are trained first, so that group 1 is open below group 2.

    At 3, when version 1 comes out, groups 1 and 3 have just ended. At 4 groups 4 and 5 have.
    """
    case = Case(lanes=2, groups_per_batch=2, run_ahead=1, steps=2, lengths=(1, 3, 1))
    _, saved = saved_on_the_way(case)
    sizes = {"batch_size": 2, "group_size": 1, "groups_released": 0}
    calm = {"urgent": False, "restarts": 0, "interrupted": []}
    assert saved == [
        {
            "version": 1,
            **sizes,
            "watermark": 1,
            "resolved_above": [2],
            "groups_started": 4,
            "rollouts_started": 4,
            "next_order": 4,
            "active": [{"group": 1, "order": 1, **calm}, {"group": 3, "order": 3, **calm}],
            "ready": [1, 3],
        },
        {
            "version": 2,
            **sizes,
            "watermark": 4,
            "resolved_above": [],
            "groups_started": 6,
            "rollouts_started": 6,
            "next_order": 6,
            "active": [{"group": 4, "order": 4, **calm}, {"group": 5, "order": 5, **calm}],
            "ready": [4, 5],
        },
    ]


def test_a_worked_resume():
    """Group 1, of which nothing was kept, is started again, group 2 is not; then come new ones."""
    case = Case(lanes=2, groups_per_batch=2, run_ahead=1, steps=2, lengths=(1,))
    progress = {
        "version": 1,
        "watermark": 1,
        "resolved_above": [2],
        "groups_started": 3,
        "groups_released": 0,
        "rollouts_started": 3,
        "next_order": 3,
        "active": [{"group": 1, "order": 1, "urgent": False, "restarts": 0, "interrupted": []}],
        "ready": [],
    }
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


# B23: twelve prompts, three to a step, and a crash

EPOCH = Case(
    lanes=5,
    groups_per_batch=3,
    run_ahead=5 / 3,
    steps=100,
    train_time=2.0,
    lengths=(1, 1, 1, 9, 2, 9, 1, 9, 1),
    num_groups=12,
)
"""At 3, when version 1 comes out, eight prompts were started: 0, 1 and 2 are trained, 4 and 6 have ended at 2, and 3
(since 0), 5 and 7 (since 1) have six, seven and seven tokens to go."""


def crashes_in(verb, call):
    """Stages that die in the call of this number, from 1, of a verb."""

    class Dies(Plain):
        num_calls = 0

        async def dies(self, *args):
            self.num_calls += 1
            if self.num_calls == call:
                raise OSError("the machine is gone")
            return await getattr(Plain, verb)(self, *args)

    setattr(Dies, verb, Dies.dies)
    return Dies(EPOCH)


def until_its_death(stages, **more):
    with pytest.raises(ExceptionGroup) as death:
        play(EPOCH, stages, **more)
    assert death.group_contains(OSError, match="the machine is gone")


def multiset(*parts):
    return sorted(group for part in parts for group in part)


def test_at_the_checkpoint_three_are_trained_two_are_finished_and_three_are_running():
    stages = crashes_in("train", 2)
    until_its_death(stages, save_every=1)
    (progress,), (kept,) = stages.saved, stages.kept
    assert (progress["version"], progress["watermark"], progress["resolved_above"]) == (1, 3, [])
    assert [group["group"] for group in progress["active"]] == [3, 4, 5, 6, 7]
    assert progress["ready"] == [4, 6]
    tokens = {rollout.group: rollout.generated.receipt.num_tokens for rollout in kept}
    assert tokens == {3: 3, 4: 2, 5: 2, 6: 1, 7: 2}
    assert {rollout.group for rollout in kept if rollout.scored} == {4, 6}


def test_after_the_crash_every_other_prompt_is_trained_once_and_nothing_is_generated_twice():
    stages = crashes_in("train", 2)
    until_its_death(stages, save_every=1)
    second = resumed(EPOCH, stages, 0)
    assert multiset(second.trained_groups) == [*range(3, 12)]
    assert [event["group"] for event in second.of("started")] == [8, 9, 10, 11]
    assert sorted(event["group"] for event in second.of("resumed")) == [3, 5, 7]
    whole = {event["prompt"]: event["versions"] for event in second.of("generated")}
    assert [whole[f"prompt {group}"] for group in (3, 5, 7)] == [[[0, 3], [1, 6]], [[0, 2], [1, 7]], [[0, 2], [1, 7]]]
    assert not {"prompt 4", "prompt 6"} & whole.keys()
    assert second.of("taken")[0]["groups"][:2] == [4, 6]


def test_a_crash_while_a_checkpoint_is_written_costs_the_steps_since_the_one_before():
    """Version 2 is out, and its checkpoint is not."""
    stages = crashes_in("save", 2)
    until_its_death(stages, save_every=1)
    assert [progress["version"] for progress in stages.saved] == [1]
    assert multiset(resumed(EPOCH, stages, 0).trained_groups) == [*range(3, 12)]


def test_a_crash_before_any_checkpoint_is_whole_begins_the_epoch_again():
    stages = crashes_in("save", 1)
    until_its_death(stages, save_every=1)
    assert stages.saved == []
    assert multiset(play(EPOCH).trained_groups) == [*range(12)]


def test_two_crashes_in_one_epoch():
    first, second = crashes_in("train", 2), crashes_in("train", 2)
    until_its_death(first, save_every=1)
    until_its_death(second, save_every=1, progress=first.saved[0], restored=first.kept[0])
    assert [progress["version"] for progress in second.saved] == [2]
    third = resumed(EPOCH, second, 0)
    resolved = {*range(second.saved[0]["watermark"]), *second.saved[0]["resolved_above"]}
    assert len(resolved) == 6
    assert multiset(resolved, third.trained_groups) == [*range(12)]


def test_a_checkpoint_at_the_end_of_the_epoch_gives_no_epoch_for_free():
    stages = Plain(EPOCH)
    whole = play(EPOCH, stages, save_every=1)
    assert multiset(whole.trained_groups) == [*range(12)]
    assert stages.saved[-1]["watermark"] == 12
    after = resumed(EPOCH, stages, -1)
    assert after.of("started", "resumed", "taken") == []
    assert after.ledger.published == 4


def test_a_version_that_was_published_and_not_recorded_is_trained_again():
    """Of versions 1 to 3, the second is in a checkpoint."""
    stages = crashes_in("train", 4)
    until_its_death(stages, save_every=2)
    assert [progress["version"] for progress in stages.saved] == [2]
    again = resumed(EPOCH, stages, 0)
    assert [event["version"] for event in again.of("published")] == [3, 4]
    resolved = {*range(stages.saved[0]["watermark"]), *stages.saved[0]["resolved_above"]}
    assert multiset(resolved, again.trained_groups) == [*range(12)]


# What was ending when it was saved


def test_a_rollout_that_was_interrupted_for_good_is_scored_and_not_gone_on_with():
    """Its deadline has passed at 2; at 3, in the middle of its scoring, version 1 is saved."""
    case = Case(lanes=2, groups_per_batch=1, run_ahead=1, lengths=(1, 9, 1), train_time=2.0, score_times=(0, 5, 0))
    stages = Plain(case)
    rules = Rules(1, deadline_s=2.0)
    play(case, stages, save_every=1, rules=rules)
    assert stages.saved[0]["active"][0]["interrupted"] == [[0, "deadline"]]
    (ended, *_) = resumed(case, stages, 0, rules=rules).of("generated")
    assert (ended.at_s, ended["prompt"], ended["tokens"], ended["why"]) == (0.0, "prompt 1", 2.0, "deadline")


@pytest.mark.parametrize(("reward", "kind"), [(1.0, "taken"), (None, "failed")])
def test_a_group_whose_last_score_came_while_it_was_saved_is_ready_or_has_failed(reward, kind):
    """Its account was written before; its rollout is read after."""
    case = Case(lanes=1, groups_per_batch=1, run_ahead=1, steps=2, lengths=(1,))
    _, (first, _) = saved_on_the_way(case)
    account = {**first, "ready": [], "active": [{**first["active"][0], "group": 1}]}
    runs = (VersionRun(0, 1.0),)
    generated = Generated(Sampled(1, 0, runs), Receipt("prompt 1", 0, runs, "stop"))
    scored = Scored(generated.ref, "grader_error" if reward is None else "scored", reward)
    played = play(case, progress=account, restored=[Restored(1, 0, 0, generated, scored)])
    assert played.of("started")[0]["group"] == 2
    (told,) = [event for event in played.of("taken", "failed") if event.at_s == 0]
    assert told.kind == kind
    assert 1 in (told["groups"] if kind == "taken" else [told["group"]])


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
        async def save(self, progress, tickets):
            await super().save(progress, tickets)
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
