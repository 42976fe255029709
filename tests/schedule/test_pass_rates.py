"""Prompts that are answered right too often are not asked again, and hold no slot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.schedule.pass_rates import PassRates
from headway.stages import Scored
from tests.schedule.doubles import Plain, play
from tests.schedule.reference_simulator import Case, random_case


class Graded(Plain):
    """Groups of even number are answered right by all, those of odd number by at most one member in two."""

    async def score(self, ticket, rollout) -> Scored:
        right = ticket.group % 2 == 0 or ticket.member % 2 == 1
        return Scored(rollout, "scored", 1.0 if right else 0.0)


def rates(num_prompts: int = 4, retire_above: float = 0.9) -> PassRates:
    return PassRates(lambda group: f"prompt {group % num_prompts}", num_prompts, retire_above)


CASE = Case(lanes=4, groups_per_batch=2, group_size=2, run_ahead=0, steps=100, lengths=(1,), num_groups=12)


def test_pass_rates_count_all_epochs():
    known = rates()
    assert not known.count(0, [1.0, 1.0, 0.0])  # 2 of 3
    assert not known.retired(0)
    assert known.count(4, [1.0] * 7)  # the same prompt: 9 of 10
    assert known.retired(0)
    assert known.retired(8)
    assert not known.count(8, [1.0])  # retired before
    assert not known.retired(1)


def test_a_reward_below_1_is_no_right_answer():
    assert not rates(retire_above=0.5).count(0, [0.99, 0.5, 1.0])


def test_all_retired_takes_every_prompt():
    known = rates(num_prompts=2)
    known.count(0, [1.0])
    assert not known.all_retired
    known.count(1, [0.0])
    assert not known.all_retired
    known.count(1, [1.0] * 9)
    assert known.all_retired


def test_mastered_prompts_are_asked_once_and_the_others_in_every_epoch():
    """Prompts 0 and 2 are always right. With run_ahead 0 epoch 0 is trained before epoch 1 begins."""
    played = play(CASE, Graded(CASE), pass_rates=rates())
    assert played.trained_groups == [0, 1, 2, 3, 5, 7, 9, 11]
    assert [(event["group"], event["prompt"]) for event in played.of("retired")] == [(0, "prompt 0"), (2, "prompt 2")]
    assert played.ledger.groups_started - played.ledger.groups_released == 8


def test_a_run_ends_when_every_prompt_is_mastered():
    endless = replace(CASE, num_groups=None)
    played = play(endless, pass_rates=rates())  # all answers are right
    assert sorted(played.trained_groups)[:4] == [0, 1, 2, 3]
    assert played.ledger.steps_done
    assert len(played.trained_groups) <= 6  # what was in flight when the last one was mastered


def test_without_pass_rates_nothing_is_left_out():
    assert play(CASE, Graded(CASE)).trained_groups == list(range(12))


@pytest.mark.parametrize("seed", range(40))
def test_retired_prompts_never_slow_the_rest_down(seed):
    """Admission is by slots: what is left out takes none, so the run goes on to the end of the data."""
    case = replace(random_case(seed), num_groups=24, steps=1000)
    played = play(case, Graded(case), pass_rates=rates(num_prompts=6))
    ledger = played.ledger
    assert ledger.exhausted
    assert not ledger.active
    left_out = set(range(24)) - {event["group"] for event in played.of("started")}
    assert all(group % 2 == 0 for group in left_out)
    assert len(played.trained_groups) == len(set(played.trained_groups))


@pytest.mark.parametrize("seed", range(20))
def test_a_resume_knows_what_was_mastered(seed):
    case = replace(random_case(seed), num_groups=24, steps=1000)
    stages = Graded(case)
    play(case, stages, save_every=1, pass_rates=rates(num_prompts=6))
    for progress, kept in zip(stages.saved, stages.kept, strict=True):
        mastered = [uid for uid, (right, asked) in progress["pass_rates"].items() if right / asked >= 0.9]
        in_flight = {group["group"] for group in progress["active"]}  # what has started goes on
        resumed = play(case, Graded(case), progress=progress, restored=kept, pass_rates=rates(num_prompts=6))
        first_taken = resumed.of("taken")[:1]
        started_before = [e for e in resumed.of("started") if not first_taken or e.at_s < first_taken[0].at_s]
        groups = {event["group"] for event in started_before} - in_flight
        assert not [group for group in groups if f"prompt {group % 6}" in mastered]


def test_a_prompt_that_a_filtered_group_shows_to_be_mastered_is_not_asked_again():
    """Group 0 ends at 1, all right; groups 2 and 4 would ask its prompt again, 3 asks the other one."""
    case = Case(
        lanes=4, group_size=2, groups_per_batch=2, run_ahead=0, lengths=(1, 1, 5), num_groups=5, dynamic_sampling=True
    )
    pass_rates = PassRates(lambda group: f"prompt {group % 2}", 2, 0.9)
    played = play(case, pass_rates=pass_rates)
    assert [event["group"] for event in played.of("started") if event["member"] == 0] == [0, 1, 3]
    assert [event["group"] for event in played.of("filtered")] == [0, 1, 3]
