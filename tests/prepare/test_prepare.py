"""Whole batches: columns by hand, that arrival and splits leave no trace, that a packed gradient is the plain one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headway.batch import Batch
from headway.models.policy import Policy
from headway.models.rows import Rows
from headway.objectives.named import PRESETS, objective
from headway.objectives.parts import Objective
from headway.objectives.tokens import Tokens
from headway.train.step import train_step
from headway.types import Score, ScoredRollout
from tests import tiny
from tests.batches import asked, data_of, make_critic, make_trainer, many_groups, prepared
from tests.tiny import make_policy, rollout, scored

GRPO = objective("grpo", kl_coefficient=0, corrections=["tis"])


# ---- by hand


def test_two_groups_by_hand():
    a, b = asked("a", 1, 2, 3), asked("b", 7)
    batch = prepared(
        GRPO,
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
    ((micro,),) = batch.optimizer_steps
    tokens = micro.tokens
    assert micro.rows.target_N.tolist() == [4, 5, 6, 8, 9, 4, 5, 5]
    assert tokens.behaviour_N.tolist() == pytest.approx([-0.1, -0.2, -0.9, -0.3, -0.4, -0.5, -0.6, -0.7])
    assert tokens.lag_N.tolist() == [1, 1, 0, 2, 1, 0, 0, 0]
    assert tokens.position_N is not None
    assert tokens.position_N.tolist() == [0, 1, 0, 0, 1, 2, 0, 1]
    assert tokens.rollout_N.tolist() == [0, 0, 1, 2, 2, 2, 3, 3]
    assert tokens.group_N.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert tokens.mask_N.all()
    plus, minus = 0.5**0.5, -(0.5**0.5)
    assert tokens.advantage_N.tolist() == pytest.approx([plus] * 2 + [minus] * 4 + [plus] * 2, abs=1e-5)
    assert tokens.advantage_N.dtype == torch.float32
    (weight_N,) = tokens.weights
    assert weight_N.tolist() == pytest.approx([1 / 8] * 2 + [1 / 4] + [1 / 12] * 3 + [1 / 8] * 2)
    for name in ("proximal_N", "reference_N", "value_N", "return_N", "normaliser"):
        assert getattr(tokens, name) is None
    assert (batch.version, batch.rewards, data_of(batch)) == (5, [1.0, 0.0, 0.0, 1.0], (8, 4, 2))
    assert {name: batch.metrics[name] for name in ("trained_tokens", "micro_batches", "packed_rows")} == {
        "trained_tokens": 8,
        "micro_batches": 1,
        "packed_rows": 8,
    }


def test_masked_tokens_are_not_among_the_tokens():
    p = asked("p", 1)
    answers = [
        rollout(p, [5, 8, 6, 2], member=0, mask=[True, False, True, False]),
        rollout(p, [7, 3], member=1, mask=[False, True]),
    ]
    (micro,) = prepared(GRPO, [[scored(answer, float(number)) for number, answer in enumerate(answers)]]).micro_batches
    assert micro.tokens.position_N is not None
    assert micro.tokens.position_N.tolist() == [0, 2, 1]
    assert micro.tokens.weights[0].tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 2])


def test_an_answer_without_tokens_adds_no_count():
    p = asked("p", 1, 2)
    batch = prepared(GRPO, [[scored(rollout(p, [], member=0), 0.0), scored(rollout(p, [5, 6], member=1), 1.0)]])
    (micro,) = batch.micro_batches
    assert micro.tokens.rollout_N.tolist() == [1, 1]
    assert data_of(batch) == (2, 1, 1)
    assert micro.tokens.weights[0].tolist() == [0.5, 0.5]


def test_a_batch_without_a_trained_token_says_so():
    p = asked("p", 1)
    answers = [rollout(p, [5, 6], member=member, mask=[False, False]) for member in range(2)]
    batch = prepared(GRPO, [[scored(answer, float(number)) for number, answer in enumerate(answers)]])
    assert data_of(batch) == (0, 0, 0)
    assert batch.metrics["trained_tokens"] == 0
    assert all(micro.empty for micro in batch.micro_batches)


# ---- what is no data is not packed


def test_rollouts_that_are_no_data_are_not_packed_and_still_reported():
    by = objective("dapo")
    same, other, a = asked("same", 1, 2, 3), asked("other", 4), asked("a", 5)
    groups = [
        [scored(rollout(same, [7, 8], member=member), 1.0) for member in range(2)],
        [scored(rollout(other, [9, 9], member=member), float(member)) for member in range(2)],
        [scored(rollout(a, [6], member=0), 1.0), ScoredRollout(rollout(a, [6], member=1), Score(None, "grader_error"))],
    ]
    batch = prepared(by, groups)
    (micro,) = batch.micro_batches
    assert micro.rows.ids_T.tolist() == [4, 9, 9]
    assert micro.tokens.rollout_N.tolist() == [2, 2, 3, 3]
    assert [answer.prompt.uid for answer in batch.rollouts] == ["a", "a", "other", "other", "same", "same"]
    assert batch.rewards == [1.0, None, 0.0, 1.0, 1.0, 1.0]
    assert data_of(batch) == (4, 2, 1)
    assert batch.metrics["trained_tokens"] == 4
    assert batch.metrics["dropped_rollouts/zero_variance"] == 2
    assert batch.metrics["dropped_rollouts/unscored"] == 1


def test_a_batch_all_of_which_is_filtered_out_has_no_optimizer_step():
    answers = [scored(rollout(asked("p", 1), [7, 8], member=member), 1.0) for member in range(2)]
    batch = prepared(objective("dapo"), [answers])
    assert (batch.optimizer_steps, batch.metrics["trained_tokens"], len(batch.rollouts)) == ([], 0, 2)


def test_with_a_divergence_in_the_rewards_scored_rollouts_are_packed_for_their_baseline():
    """Cut-off answers are no data here, yet the others are compared with them, after the divergence is taken off."""
    by = objective("dr_grpo", length=9, reward_kl=0.1, filters=("truncated",))
    policy = make_policy()
    trainer = make_trainer(policy, with_reference=True)
    with torch.no_grad():
        policy.head.weight_VD.mul_(1.1)
    p = asked("p", 1, 2)
    answers = [rollout(p, [3, 4], member=0), rollout(p, [5, 6, 7], member=1, finish="length")]
    batch = prepared(by, [[scored(answers[0], 1.0), scored(answers[1], 0.0)]], trainer=trainer)
    (micro,) = batch.micro_batches
    tokens = micro.tokens
    assert tokens.mask_N.tolist() == [True] * 2 + [False] * 3
    assert tokens.weights[0].tolist() == pytest.approx([1 / 9] * 2 + [0] * 3)
    assert tokens.proximal_N is not None
    assert tokens.reference_N is not None
    taken_off = [(tokens.proximal_N - tokens.reference_N)[own].sum().item() * 0.1 for own in (slice(2), slice(2, 5))]
    expected = ((1 - taken_off[0]) - (0 - taken_off[1])) / 2
    assert tokens.advantage_N[:2].tolist() == pytest.approx([expected] * 2, abs=1e-5)
    assert min(map(abs, taken_off)) > 1e-3
    assert data_of(batch) == (2, 1, 1)
    assert batch.metrics["trained_tokens"] == 2


# ---- arrival


def contents(batch: Batch) -> list[object]:
    """Everything in the micro-batches, as plain values."""
    found: list[object] = []
    for micro in batch.micro_batches:
        values = [getattr(micro.rows, field.name) for field in fields(Rows)]
        values += [getattr(micro.tokens, field.name) for field in fields(Tokens)]
        found += [value.tolist() if isinstance(value, torch.Tensor) else str(value) for value in values]
    return found


@pytest.mark.parametrize(("budget", "optimizer_steps"), [(12, 1), (4096, 1), (30, 3)])
def test_arrival_leaves_no_trace(budget, optimizer_steps):
    groups = many_groups()
    expected = prepared(
        GRPO, groups, budget=budget, optimizer_steps=optimizer_steps, trainer=make_trainer(make_policy())
    )
    for seed in range(3):
        rng = random.Random(seed)
        shuffled = [rng.sample(members, len(members)) for members in rng.sample(groups, len(groups))]
        batch = prepared(
            GRPO, shuffled, budget=budget, optimizer_steps=optimizer_steps, trainer=make_trainer(make_policy())
        )
        assert contents(batch) == contents(expected)
        assert (batch.rollouts, batch.rewards, batch.metrics) == (expected.rollouts, expected.rewards, expected.metrics)


def test_identities_and_not_token_values_tell_groups_apart():
    """The same prompt in two epochs is two groups with a baseline each."""
    p = asked("p", 1, 2)
    groups = [
        [scored(rollout(p, [5, 6], member=member, epoch=epoch), float(member * epoch)) for member in range(2)]
        for epoch in range(2)
    ]
    batch = prepared(GRPO, groups)
    assert data_of(batch) == (8, 4, 2)
    (micro,) = batch.micro_batches
    plus = 0.5**0.5
    assert micro.tokens.advantage_N.tolist() == pytest.approx([0, 0, 0, 0, -plus, -plus, plus, plus], abs=1e-5)
    assert [number for number, _ in itertools.groupby(micro.tokens.rollout_N.tolist())] == [0, 1, 2, 3]


# ---- one rollout at a time


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class NoStep:
    """A trainer or critic that keeps its gradients, and never moves."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def optim_step(self) -> dict[str, Any]:
        return {"grad_norm": 0.0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def packed_gradients(
    by: Objective, groups: Sequence[Sequence[ScoredRollout]], *, temperature: float = 1.0, **options: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(metrics, the policy's gradients, the critic's) of one train step on the tiny policy."""
    policy = make_policy(options.pop("architecture", "llama"))
    trainer = make_trainer(policy, temperature=temperature, with_reference=True)
    with torch.no_grad():
        policy.head.weight_VD.mul_(1.05)  # so that it is not its reference
    critic = make_critic(policy) if by.needs_critic else None
    batch = prepared(by, groups, trainer=trainer, critic=critic, **options)
    result = train_step(NoStep(trainer), NoStep(critic) if critic else None, by, batch)
    return result.metrics, gradients(policy.model), gradients(critic._model) if critic else {}


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
    return total, gradients(model)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_packed_gradient_is_that_of_one_rollout_at_a_time(architecture, temperature):
    policy, groups = make_policy(architecture), many_groups()
    with torch.no_grad():
        policy.head.weight_VD.mul_(1.05)
    plain_loss, plain = plain_gradients(policy, groups, temperature, cap=2.0)
    metrics, ours, _ = packed_gradients(GRPO, groups, architecture=architecture, temperature=temperature)
    assert metrics["loss"] == pytest.approx(plain_loss, abs=1e-5)
    assert ours.keys() == plain.keys()
    for name in ours:
        assert (ours[name] - plain[name]).abs().max() <= 2e-5 * plain[name].abs().max(), name


# ---- splits


def of_every_kind() -> list[Objective]:
    """Every preset, and what none of them has: a divergence in the rewards, self-normalised and sequence weights."""
    presets = [replace(objective(name), length=9) for name in PRESETS]
    return [
        *presets,
        objective("grpo", kl_coefficient=0, corrections=["tis"], reduction="token_mean"),
        objective("reinforce_pp", reward_kl=0.1),
        objective("ppo", reward_kl=0.1, whiten=False),
        objective("olmo3", self_normalise=True),
        objective("rloo", corrections=["sequence_tis:5", "veto"]),
    ]


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name] - theirs[name]).abs().max() <= 2e-5 * theirs[name].abs().max() + 1e-9, name


@pytest.mark.parametrize("by", of_every_kind(), ids=lambda by: f"{by.name}-{','.join(by.corrections)}")
def test_b01_neither_gradients_nor_figures_depend_on_the_split_into_micro_batches(by):
    """B01: the denominators are the batch's. Means of the micro-batches' own means would give other gradients."""
    groups = many_groups()
    figures, of_policy, of_critic = packed_gradients(by, groups)
    assert bool(of_critic) == by.needs_critic
    assert all(any(gradient.any() for gradient in found.values()) for found in (of_policy, of_critic) if found)
    sizes = {figures["micro_batches"]}
    for budget in (1, 12, 25, 60):
        split_figures, split_policy, split_critic = packed_gradients(by, groups, budget=budget)
        sizes.add(split_figures["micro_batches"])
        same(split_policy, of_policy)
        same(split_critic, of_critic)
        for name in set(figures) - {"micro_batches", "packed_rows"}:
            assert split_figures[name] == pytest.approx(figures[name], abs=1e-5, rel=1e-4), name
    assert len(sizes) >= 3


@given(seed=st.integers(0, 10_000), budget=st.integers(1, 80), optimizer_steps=st.integers(1, 3))
@hypothesis_settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", ["grpo", "ppo", "online_dpo", "gspo"])
def test_random_batches_split_anyhow_give_the_same_gradients(name, seed, budget, optimizer_steps):
    """Empty answers, masks and whole groups of equal rewards among them. Gradients are of all optimizer steps."""
    by = objective(name)
    groups = many_groups(num=3, size=3, seed=seed)
    whole_figures, whole, of_critic = packed_gradients(by, groups, optimizer_steps=optimizer_steps)
    figures, split, split_critic = packed_gradients(by, groups, optimizer_steps=optimizer_steps, budget=budget)
    same(split, whole)
    same(split_critic, of_critic)
    assert figures.get("loss", 0.0) == pytest.approx(whole_figures.get("loss", 0.0), abs=1e-5, rel=1e-4)
