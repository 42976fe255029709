"""Rewards -> advantages, in an order that arrival has no say in."""

from __future__ import annotations

import itertools
import random

import pytest

from headway.objectives.named import objective
from headway.prepare.credit import assign_credit
from headway.types import Score, ScoredRollout
from tests.tiny import prompt, rollout, scored

GRPO, DR_GRPO = objective("grpo"), objective("dr_grpo", length=8)


def group(text: str, rewards: list[float], *, epoch: int = 0) -> list[ScoredRollout]:
    """Answers of 1, 2, 3 ... tokens."""
    return [
        scored(rollout(prompt(text), [4] * (member + 1), member=member, epoch=epoch), reward)
        for member, reward in enumerate(rewards)
    ]


def test_advantages_by_hand():
    credit = assign_credit(GRPO, [group("1+1=", [1.0, 0.0, 0.0, 0.0]), group("2+2=", [1.0, 1.0, 0.0, 0.0])])
    half = 0.5 / (1 / 3) ** 0.5
    assert credit.advantages.advantage_R.tolist() == pytest.approx(
        [1.5, -0.5, -0.5, -0.5, half, half, -half, -half], abs=1e-5
    )
    assert credit.group_R.tolist() == [0] * 4 + [1] * 4


def test_centred_advantages_by_hand():
    credit = assign_credit(DR_GRPO, [group("1+1=", [1.0, 0.0, 0.0, 0.0])])
    assert credit.advantages.advantage_R.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_metrics_by_hand():
    rollouts = [
        scored(rollout(prompt("1"), [4], member=0), 1.0),
        scored(rollout(prompt("1"), [4, 5, 6], member=1, finish="length"), 0.0),
        scored(rollout(prompt("2"), [4, 5, 6, 7], member=0, finish="length"), 1.0),
        scored(rollout(prompt("2"), [], member=1, finish="aborted"), 1.0),
    ]
    metrics = assign_credit(GRPO, [rollouts[:2], rollouts[2:]]).metrics
    assert metrics == {
        "reward_mean": 0.75,
        "reward_std": 0.5,
        "num_rollouts": 4,
        "zero_variance_groups": 1,
        "response_tokens_mean": 2.0,
        "response_tokens_max": 4,
        "truncated_share": 0.5,
    }


def test_the_order_is_that_of_prompt_epoch_and_member():
    groups = [group("2", [1.0, 0.0]), group("1", [0.0, 1.0], epoch=1), group("1", [0.25, 0.5])]
    credit = assign_credit(GRPO, groups)
    identities = [(s.rollout.prompt.uid, s.rollout.epoch, s.rollout.member, s.score.reward) for s in credit.rollouts]
    assert identities == [
        ("1", 0, 0, 0.25),
        ("1", 0, 1, 0.5),
        ("1", 1, 0, 0.0),
        ("1", 1, 1, 1.0),
        ("2", 0, 0, 1.0),
        ("2", 0, 1, 0.0),
    ]
    assert credit.group_R.tolist() == [0, 0, 1, 1, 2, 2]


def test_arrival_leaves_no_trace():
    groups = [group("1", [0.0, 1.0, 0.3]), group("2", [1.0, 0.7, 0.1]), group("3", [0.2, 0.0, 0.0])]
    expected = assign_credit(GRPO, groups)
    for order in itertools.permutations(groups):
        shuffled = [random.Random(0).sample(members, len(members)) for members in order]
        credit = assign_credit(GRPO, shuffled)
        assert credit.rollouts == expected.rollouts
        assert credit.advantages.advantage_R.tolist() == expected.advantages.advantage_R.tolist()
        assert credit.metrics == expected.metrics


def test_a_lone_rollout_has_nothing_to_compare_with():
    credit = assign_credit(GRPO, [group("1", [1.0]), group("2", [1.0, 0.0])])
    assert credit.advantages.advantage_R[0] == 0
    assert credit.advantages.usable_R.tolist() == [False, True, True]
    assert assign_credit(GRPO, [group("1", [1.0])]).metrics["reward_std"] == 0.0


def test_an_unscored_rollout_is_our_mistake():
    unscored = ScoredRollout(rollout(prompt("1"), [4], member=1), Score(None, "grader_timeout"))
    with pytest.raises(AssertionError, match="unscored"):
        assign_credit(GRPO, [[*group("1", [1.0]), unscored]])
