"""Rollouts and rewards in an order that arrival has no say in, which of them are data, and their figures."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from headway.objectives.named import objective
from headway.prepare.credit import gather
from headway.types import Score, ScoredRollout
from tests.tiny import prompt, rollout, scored

GRPO = objective("grpo", kl_coefficient=0)
BUDGET = 8


def group(text: str, rewards: list[float], *, epoch: int = 0) -> list[ScoredRollout]:
    """Answers of 1, 2, 3 ... tokens."""
    return [
        scored(rollout(prompt(text), [4] * (member + 1), member=member, epoch=epoch), reward)
        for member, reward in enumerate(rewards)
    ]


def unscored(text: str, member: int) -> ScoredRollout:
    return ScoredRollout(rollout(prompt(text), [4], member=member), Score(None, "grader_timeout"))


def test_metrics_by_hand():
    rollouts = [
        scored(rollout(prompt("1"), [4], member=0), 1.0),
        scored(rollout(prompt("1"), [4, 5, 6], member=1, finish="length"), 0.0),
        scored(rollout(prompt("2"), [4, 5, 6, 7], member=0, finish="length"), 1.0),
        scored(rollout(prompt("2"), [], member=1, finish="interrupted"), 1.0),
    ]
    assert gather(GRPO, [rollouts[:2], rollouts[2:]], BUDGET).metrics == {
        "reward_mean": 0.75,
        "reward_std": 0.5,
        "num_rollouts": 4,
        "zero_variance_groups": 1,
        "response_tokens_mean": 2.0,
        "response_tokens_max": 4,
        "truncated_share": 0.5,
        "interrupted_share": 0.25,
        "response_tokens_mean/interrupted": 0.0,
        "response_tokens_mean/length": 3.5,
        "response_tokens_mean/stop": 1.0,
    }


def test_the_order_is_that_of_prompt_epoch_and_member():
    groups = [group("2", [1.0, 0.0]), group("1", [0.0, 1.0], epoch=1), group("1", [0.25, 0.5])]
    gathered = gather(GRPO, groups, BUDGET)
    identities = [
        (answer.prompt.uid, answer.epoch, answer.member, reward)
        for answer, reward in zip(gathered.rollouts, gathered.rewards, strict=True)
    ]
    assert identities == [
        ("1", 0, 0, 0.25),
        ("1", 0, 1, 0.5),
        ("1", 1, 0, 0.0),
        ("1", 1, 1, 1.0),
        ("2", 0, 0, 1.0),
        ("2", 0, 1, 0.0),
    ]
    assert gathered.group_R.tolist() == [0, 0, 1, 1, 2, 2]
    assert gathered.reward_R.tolist() == [0.25, 0.5, 0.0, 1.0, 1.0, 0.0]


def test_arrival_leaves_no_trace():
    groups = [group("1", [0.0, 1.0, 0.3]), group("2", [1.0, 0.7, 0.1]), group("3", [0.2, 0.0, 0.0])]
    expected = gather(GRPO, groups, BUDGET)
    for order in itertools.permutations(groups):
        gathered = gather(GRPO, [random.Random(0).sample(members, len(members)) for members in order], BUDGET)
        assert gathered.rollouts == expected.rollouts
        assert gathered.reward_R.tolist() == expected.reward_R.tolist()
        assert gathered.metrics == expected.metrics


def test_a_lone_rollout_has_nothing_to_compare_with():
    gathered = gather(GRPO, [group("1", [1.0]), group("2", [1.0, 0.0])], BUDGET)
    assert gathered.selection.usable_R.tolist() == [False, True, True]
    assert gathered.metrics["dropped_rollouts/lone"] == 1
    assert gather(GRPO, [group("1", [1.0])], BUDGET).metrics["reward_std"] == 0.0


def test_an_unscored_rollout_is_no_reward_of_0():
    """Case 45: it leaves means, baselines and the data, and its group keeps the rest."""
    gathered = gather(GRPO, [[*group("1", [1.0, 0.5]), unscored("1", 2)]], BUDGET)
    assert gathered.rewards == [1.0, 0.5, None]
    assert math.isnan(gathered.reward_R[2])
    assert gathered.selection.usable_R.tolist() == [True, True, False]
    assert gathered.metrics["reward_mean"] == 0.75
    assert gathered.metrics["num_rollouts"] == 3
    assert gathered.metrics["dropped_rollouts/unscored"] == 1


def test_a_batch_without_a_score_has_no_mean_reward():
    metrics = gather(GRPO, [[unscored("1", 0), unscored("1", 1)]], BUDGET).metrics
    assert "reward_mean" not in metrics
    assert metrics["dropped_rollouts/unscored"] == 2


def test_filters_name_what_they_leave_out():
    """Groups of equal rewards, as DAPO leaves them out; and answers that were cut off."""
    by = objective("dapo", filters=("zero_variance", "truncated"))
    cut = scored(rollout(prompt("2"), [4] * 8, member=2, finish="length"), 0.0)
    gathered = gather(by, [group("1", [1.0, 1.0]), [*group("2", [1.0, 0.0]), cut]], BUDGET)
    assert gathered.selection.usable_R.tolist() == [False, False, True, True, False]
    assert gathered.metrics["dropped_rollouts/zero_variance"] == 2
    assert gathered.metrics["dropped_rollouts/truncated"] == 1


def test_an_interrupted_answer_was_cut_off_and_counts_in_baselines_all_the_same():
    by = objective("dr_grpo", length=BUDGET, filters=("truncated",))
    answers = [*group("1", [1.0, 0.0]), scored(rollout(prompt("1"), [4], member=2, finish="interrupted"), 0.0)]
    gathered = gather(by, [answers], BUDGET)
    assert gathered.selection.usable_R.tolist() == [True, True, False]
    assert gathered.selection.baseline_R.tolist() == [True, True, True]
    assert gathered.metrics["dropped_rollouts/truncated"] == 1


def test_an_interrupted_answer_is_overlong_by_its_length_alone():
    """A short one was not too long when it was stopped; one near the budget was. Budget 8, cache share 0.5."""
    by = objective("dapo", overlong_share=0.5)
    answers = [
        scored(rollout(prompt("1"), [4] * size, member=size, finish="interrupted"), float(size == 2)) for size in (2, 6)
    ]
    assert gather(by, [answers], BUDGET).reward_R.tolist() == pytest.approx([1.0, -0.5])


def test_overlong_answers_earn_less_and_outcomes_stay_as_they_were_scored():
    """Budget 8, cache share 0.5: 4 tokens are free, the 6th and 8th take off 0.5 and 1. Equal outcomes stay equal."""
    by = objective("dapo", overlong_share=0.5)
    answers = [scored(rollout(prompt("1"), [4] * size, member=size), 1.0) for size in (4, 6, 8)]
    gathered = gather(by, [answers], BUDGET)
    assert gathered.reward_R.tolist() == pytest.approx([1.0, 0.5, 0.0])
    assert gathered.rewards == [1.0] * 3
    assert (gathered.metrics["reward_mean"], gathered.metrics["shaped_reward_mean"]) == (1.0, pytest.approx(0.5))
    assert gathered.metrics["dropped_rollouts/zero_variance"] == 3
