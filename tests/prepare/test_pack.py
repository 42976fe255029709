"""Packing: rows and targets by hand, cases B11 and B12, and that a packed gradient is that of one rollout at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import fields

import pytest
import torch

from headway.config import Train
from headway.models.attention import Segment
from headway.models.batch import Batch, MicroBatch
from headway.models.policy import Policy
from headway.objectives.named import Objective, objective
from headway.prepare.credit import assign_credit
from headway.prepare.pack import pack
from headway.train.local import LocalTrainer
from headway.train.step import micro_batch_loss, train_step
from headway.types import Prompt, Rollout, ScoredRollout
from tests import tiny
from tests.tiny import make_bigram, make_policy, rollout, scored

GRPO = objective("grpo")
CPU = torch.device("cpu")


def packed(
    groups: Sequence[Sequence[ScoredRollout]], *, version: int = 0, budget: int = 4096, by: Objective = GRPO
) -> Batch:
    return pack(assign_credit(by, groups), by, version=version, micro_batch_tokens=budget)


def asked(uid: str, *tokens: int) -> Prompt:
    return Prompt(uid, uid, tokens)


# ---- by hand


def test_two_groups_by_hand():
    """Group a: prompt 1 2 3, answers 4 5 and 6. Group b: prompt 7, answers 8 9 4 and 5 5.

    Rows:     1 2 3 4 | 7 8 9 5
    Position: 0 1 2 3 | 0 1 2 1
    """
    a, b = asked("a", 1, 2, 3), asked("b", 7)
    batch = packed(
        [
            [
                scored(rollout(b, [8, 9, 4], member=0, logprobs=[-0.3, -0.4, -0.5], versions=[3, 4, 5]), 0.0),
                scored(rollout(b, [5, 5], member=1, logprobs=[-0.6, -0.7], versions=[5, 5]), 1.0),
            ],
            [
                scored(rollout(a, [4, 5], member=0, logprobs=[-0.1, -0.2], versions=[4, 4]), 1.0),
                scored(rollout(a, [6], member=1, logprobs=[-0.9], versions=[5]), 0.0),
            ],
        ],
        version=5,
    )
    (micro,) = batch.micro_batches
    assert micro.ids_T.tolist() == [1, 2, 3, 4, 7, 8, 9, 5]
    assert micro.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 1]
    assert micro.segments == (
        Segment(0, 3),
        Segment(3, 1, 0, 3),
        Segment(4, 1),
        Segment(5, 2, 4, 1),
        Segment(7, 1, 4, 1),
    )
    assert micro.row_N.tolist() == [2, 3, 2, 4, 5, 6, 4, 7]
    assert micro.target_N.tolist() == [4, 5, 6, 8, 9, 4, 5, 5]
    assert micro.behaviour_N.tolist() == pytest.approx([-0.1, -0.2, -0.9, -0.3, -0.4, -0.5, -0.6, -0.7])
    assert micro.lag_N.tolist() == [1, 1, 0, 2, 1, 0, 0, 0]
    assert micro.position_N.tolist() == [0, 1, 0, 0, 1, 2, 0, 1]
    assert micro.rollout_N.tolist() == [0, 0, 1, 2, 2, 2, 3, 3]
    plus, minus = 0.5**0.5, -(0.5**0.5)
    assert micro.advantage_N.tolist() == pytest.approx([plus] * 2 + [minus] * 4 + [plus] * 2, abs=1e-5)
    assert micro.weight_N.tolist() == pytest.approx([1 / 8] * 2 + [1 / 4] + [1 / 12] * 3 + [1 / 8] * 2)
    assert (batch.rewards, batch.num_tokens, batch.num_rollouts) == ([1.0, 0.0, 0.0, 1.0], 8, 4)
    assert {name: batch.metrics[name] for name in ("trained_tokens", "micro_batches", "packed_rows")} == {
        "trained_tokens": 8,
        "micro_batches": 1,
        "packed_rows": 8,
    }


B11_LOGITS = [[0.0, 1.0, 2.0], [2.0, 0.0, 1.0], [1.0, 2.0, 0.0]]
"""Of the next token, by the token before."""


def test_b11_packed_log_probs_are_those_of_the_row_before():
    """Without the shift the first answer's sum would be -7.222818; across the documents -1.407606 would be added."""
    groups = [
        [scored(rollout(asked("1", 0, 1), [2, 2, 0]), 1.0)],
        [scored(rollout(asked("2", 1), [0, 0]), 1.0)],
    ]
    (micro,) = packed(groups).micro_batches
    trainer = LocalTrainer(make_bigram(B11_LOGITS), Train(), temperature=1.0, num_steps=1)
    logp_N = trainer.forward(micro).logp_N
    expected = [-1.407606, -2.407606, -1.407606, -0.407606, -2.407606]
    assert logp_N.tolist() == pytest.approx(expected, abs=1e-5)
    assert logp_N.sum().item() == pytest.approx(-8.038030, abs=1e-5)


# ---- what is trained


def trained(answers: Sequence[Rollout], budget: int = 4096) -> list[tuple[int, int]]:
    """(rollout, target) of every trained token; the rollouts are of one group."""
    batch = packed([[scored(answer, float(number)) for number, answer in enumerate(answers)]], budget=budget)
    return [
        pair
        for micro in batch.micro_batches
        for pair in zip(micro.rollout_N.tolist(), micro.target_N.tolist(), strict=True)
    ]


def test_b12a_the_sampled_end_token_is_trained_and_nothing_after_it():
    p = asked("p", 1)
    assert trained([rollout(p, [5, 7, 2], member=0), rollout(p, [9], member=1)]) == [(0, 5), (0, 7), (0, 2), (1, 9)]


def test_b12b_an_answer_that_was_cut_off_has_its_own_length():
    p = asked("p", 1)
    answers = [rollout(p, [5, 7, 9], member=0, finish="length"), rollout(p, [0, 0, 0, 0, 0], member=1)]
    assert trained(answers) == [(0, 5), (0, 7), (0, 9), *[(1, 0)] * 5]


def test_b12d_a_prompt_that_holds_the_end_id_keeps_all_its_rows():
    p = asked("p", 2, 5, 2)
    (micro,) = packed([[scored(rollout(p, [6], member=member), member) for member in range(2)]]).micro_batches
    assert micro.ids_T.tolist() == [2, 5, 2]
    assert micro.segments == (Segment(0, 3),)


def test_b12e_masked_tokens_are_rows_and_are_not_trained():
    """Token 8 stands for what the environment wrote: the model sees it, and is not taught it."""
    p = asked("p", 1)
    answers = [
        rollout(p, [5, 8, 6, 2], member=0, mask=[True, False, True, False]),
        rollout(p, [7, 3], member=1, mask=[False, True]),
    ]
    assert trained(answers) == [(0, 5), (0, 6), (1, 3)]
    (micro,) = packed([[scored(answer, float(number)) for number, answer in enumerate(answers)]]).micro_batches
    assert micro.ids_T.tolist() == [1, 5, 8, 6, 7]
    assert micro.row_N.tolist() == [0, 2, 4]
    assert micro.position_N.tolist() == [0, 2, 1]
    assert micro.weight_N.tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 2])


def test_an_answer_without_tokens_adds_no_row_and_no_count():
    p = asked("p", 1, 2)
    batch = packed([[scored(rollout(p, [], member=0), 0.0), scored(rollout(p, [5, 6], member=1), 1.0)]])
    (micro,) = batch.micro_batches
    assert micro.ids_T.tolist() == [1, 2, 5]
    assert micro.rollout_N.tolist() == [1, 1]
    assert (batch.num_rollouts, batch.num_tokens) == (1, 2)
    assert micro.weight_N.tolist() == [0.5, 0.5]


def test_a_batch_without_a_trained_token_says_so():
    p = asked("p", 1)
    batch = packed([[scored(rollout(p, [5, 6], member=member, mask=[False, False]), member) for member in range(2)]])
    assert batch.num_tokens == 0
    assert [len(micro.target_N) for micro in batch.micro_batches] == [0]


# ---- micro-batches


def many_groups(num: int = 5, size: int = 4) -> list[list[ScoredRollout]]:
    """Groups of answers of 1 to 9 tokens to prompts of 1 to 6, with rewards, old log-probs, versions and some masks."""
    rng = random.Random(0)
    groups = []
    for number in range(num):
        p = asked(f"p{number}", *rng.choices(range(20), k=rng.randint(1, 6)))
        groups.append([scored(random_answer(rng, p, member), rng.choice([0.0, 0.3, 1.0])) for member in range(size)])
    return groups


def random_answer(rng: random.Random, p: Prompt, member: int) -> Rollout:
    length = rng.randint(1, 9)
    return rollout(
        p,
        rng.choices(range(20), k=length),
        member=member,
        logprobs=[rng.uniform(-5, -1) for _ in range(length)],
        versions=[0] * length,
        mask=[rng.random() < 0.85 for _ in range(length)],
    )


def contents(batch: Batch) -> list[object]:
    """Everything in the micro-batches, as plain values."""
    values = [getattr(micro, field.name) for micro in batch.micro_batches for field in fields(MicroBatch)]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]


@pytest.mark.parametrize("budget", [12, 4096])
def test_arrival_leaves_no_trace(budget):
    groups = many_groups()
    expected = packed(groups, budget=budget)
    for seed in range(3):
        rng = random.Random(seed)
        shuffled = [rng.sample(members, len(members)) for members in rng.sample(groups, len(groups))]
        batch = packed(shuffled, budget=budget)
        assert contents(batch) == contents(expected)
        assert (batch.rollouts, batch.rewards, batch.metrics) == (expected.rollouts, expected.rewards, expected.metrics)


@pytest.mark.parametrize("budget", [1, 8, 13, 20, 50, 4096])
def test_the_budget_is_kept_and_every_token_is_there_once(budget):
    batch = packed(many_groups(), budget=budget)
    for micro in batch.micro_batches:
        num_rollouts = sum(segment.prefix_length > 0 for segment in micro.segments)
        assert len(micro.ids_T) <= budget or num_rollouts <= 1
    found = [
        item
        for micro in batch.micro_batches
        for item in zip(micro.rollout_N.tolist(), micro.position_N.tolist(), micro.target_N.tolist(), strict=True)
    ]
    assert found == [
        (number, place, token)
        for number, answer in enumerate(batch.rollouts)
        for place, token in enumerate(answer.tokens)
        if answer.mask[place]
    ]
    assert sum(micro.weight_N.sum().item() for micro in batch.micro_batches) == pytest.approx(1.0, abs=1e-6)


def test_a_rollout_that_is_longer_than_the_budget_is_alone():
    """Rows: prompt 2, and answers of 1, 9, 1 rows; the budget is 5."""
    p = asked("p", 1, 2)
    answers = [rollout(p, [3] * length, member=member) for member, length in enumerate((2, 10, 2))]
    batch = packed([[scored(answer, float(number)) for number, answer in enumerate(answers)]], budget=5)
    assert [len(micro.ids_T) for micro in batch.micro_batches] == [3, 11, 3]
    assert [set(micro.rollout_N.tolist()) for micro in batch.micro_batches] == [{0}, {1}, {2}]


def test_a_prompt_is_counted_once_per_micro_batch():
    """Prompt of 4 rows, answers of 2 rows each: three of them fit into 10 rows."""
    p = asked("p", 1, 2, 3, 4)
    answers = [scored(rollout(p, [5, 6, 7], member=member), float(member)) for member in range(4)]
    assert [len(micro.ids_T) for micro in packed([answers], budget=10).micro_batches] == [10, 6]


# ---- one rollout at a time


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def packed_gradients(
    policy: Policy, batch: Batch, by: Objective, temperature: float
) -> tuple[float, dict[str, torch.Tensor]]:
    trainer = LocalTrainer(policy, Train(), temperature=temperature, num_steps=1)
    policy.model.zero_grad()
    losses = [
        trainer.forward_backward(micro, lambda logp_N, micro: micro_batch_loss(by, logp_N, micro)).loss
        for micro in batch.micro_batches
        if len(micro.target_N)
    ]
    return sum(losses), gradients(policy)


def plain_gradients(policy: Policy, groups, temperature: float, cap: float) -> tuple[float, dict[str, torch.Tensor]]:
    """GRPO as it is written in a textbook, one rollout after the other through the model of `transformers`."""
    model = tiny.plain(policy)
    rollouts = [s.rollout for members in groups for s in members]
    num_with_tokens = sum(any(answer.mask) for answer in rollouts)
    total = 0.0
    for members in groups:
        rewards = torch.tensor([s.score.reward for s in members], dtype=torch.float64)
        std = rewards.std().item()
        for s in members:
            advantage = (s.score.reward - rewards.mean().item()) / (std + 1e-6) if std else 0.0
            answer = s.rollout
            if not any(answer.mask):
                continue
            ids = torch.tensor([[*answer.prompt.tokens, *answer.tokens]])
            logits_TV = model(input_ids=ids, use_cache=False).logits[0] / temperature
            first = len(answer.prompt.tokens) - 1
            logp_T = torch.log_softmax(logits_TV, -1)[range(first, first + len(answer.tokens)), list(answer.tokens)]
            behaviour_T, mask_T = torch.tensor(answer.logprobs), torch.tensor(answer.mask)
            weight_T = (logp_T.detach() - behaviour_T).exp().clamp(max=cap)
            loss_T = -weight_T * advantage * (logp_T - logp_T.detach()).exp()
            loss = loss_T[mask_T].mean() / num_with_tokens
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_packed_gradient_is_that_of_one_rollout_at_a_time(architecture, temperature):
    policy, groups = make_policy(architecture), many_groups()
    plain_loss, plain = plain_gradients(policy, groups, temperature, cap=2.0)
    loss, ours = packed_gradients(policy, packed(groups), GRPO, temperature)
    assert loss == pytest.approx(plain_loss, abs=1e-5)
    assert ours.keys() == plain.keys()
    for name in ours:
        assert (ours[name] - plain[name]).abs().max() <= 2e-5 * plain[name].abs().max(), name


@pytest.mark.parametrize("by", [GRPO, objective("dr_grpo", length=9), objective("grpo", reduction="token_mean")])
def test_b01_the_gradient_is_the_same_for_every_split_into_micro_batches(by):
    """B01: the denominators are the batch's. Means of the micro-batches' own means would give other gradients."""
    policy, groups = make_policy(), many_groups()
    whole_loss, whole = packed_gradients(policy, packed(groups, by=by), by, 1.0)
    splits = {budget: packed(groups, budget=budget, by=by) for budget in (1, 7, 12, 25, 60)}
    assert len({len(batch.micro_batches) for batch in splits.values()}) == 5
    for batch in splits.values():
        loss, split = packed_gradients(policy, batch, by, 1.0)
        assert loss == pytest.approx(whole_loss, abs=1e-6)
        for name in whole:
            assert (split[name] - whole[name]).abs().max() <= 1e-5 * whole[name].abs().max(), name


def test_b01_a_train_step_reports_the_same_for_every_split():
    reported, learned = [], []
    for budget in (1, 12, 4096):
        policy = make_policy()
        trainer = LocalTrainer(policy, Train(learning_rate=1e-3), temperature=1.0, num_steps=1)
        result = train_step(trainer, GRPO, packed(many_groups(), budget=budget))
        reported.append({name: v for name, v in result.metrics.items() if name not in ("micro_batches", "packed_rows")})
        learned.append(policy.head.weight_VD.detach().clone())
        assert [len(ratios) for ratios in result.log_ratios] == [
            sum(s.rollout.mask) for members in many_groups() for s in members
        ]
    for metrics, head_VD in zip(reported[1:], learned[1:], strict=True):
        assert metrics == pytest.approx(reported[0], abs=1e-5, rel=1e-4)
        torch.testing.assert_close(head_VD, learned[0], atol=1e-4, rtol=0)


def test_identities_and_not_token_values_tell_groups_apart():
    """The same prompt in two epochs is two groups with a baseline each."""
    p = asked("p", 1, 2)
    groups = [
        [scored(rollout(p, [5, 6], member=member, epoch=epoch), float(member * epoch)) for member in range(2)]
        for epoch in range(2)
    ]
    batch = packed(groups)
    assert batch.num_groups == 2
    (micro,) = batch.micro_batches
    assert micro.advantage_N.tolist() == pytest.approx([0, 0, 0, 0, *[-(0.5**0.5)] * 2, *[0.5**0.5] * 2], abs=1e-5)
    assert [number for number, _ in itertools.groupby(micro.rollout_N.tolist())] == [0, 1, 2, 3]
