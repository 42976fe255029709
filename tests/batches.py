"""Scored rollouts made up at random, the batches they make, and the trainers and critics that take them."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.batch import Batch
from headway.config import Train
from headway.models.distribution import Shape
from headway.models.policy import Policy
from headway.models.rows import Rows
from headway.models.value import ValueModel
from headway.objectives.parts import Objective
from headway.prepare.prepare import prepare_batch
from headway.train.critic import LocalCritic
from headway.train.local import LocalTrainer
from headway.types import Prompt, Rollout, ScoredRollout
from tests.tiny import rollout, scored


def asked(uid: str, *tokens: int) -> Prompt:
    return Prompt(uid, uid, tokens)


def random_answer(rng: random.Random, prompt: Prompt, member: int) -> Rollout:
    """0 to 9 tokens, masked here and there, cut off now and then."""
    length = rng.choice([0, *range(1, 10), *range(1, 10)])
    masked = rng.random() < 0.1
    return rollout(
        prompt,
        rng.choices(range(20), k=length),
        member=member,
        logprobs=[rng.uniform(-5, -1) for _ in range(length)],
        versions=[rng.randint(0, 2) for _ in range(length)],
        mask=[not masked and rng.random() < 0.85 for _ in range(length)],
        finish=rng.choice(["stop", "stop", "length"]),
    )


def many_groups(num: int = 5, size: int = 4, seed: int = 0) -> list[list[ScoredRollout]]:
    """Groups of answers to prompts of 1 to 6 tokens, with rewards, old log-probs, versions and masks."""
    rng = random.Random(seed)
    groups = []
    for number in range(num):
        prompt = asked(f"p{number}", *rng.choices(range(20), k=rng.randint(1, 6)))
        groups.append(
            [scored(random_answer(rng, prompt, member), rng.choice([0.0, 0.3, 1.0])) for member in range(size)]
        )
    return groups


def prepared(by: Objective, groups: Sequence[Sequence[ScoredRollout]], *, budget: int = 4096, **options: Any) -> Batch:
    options = {"version": 2, "budget_tokens": 9, **options}
    return prepare_batch(by, groups, micro_batch_tokens=budget, **options)


def data_of(batch: Batch) -> tuple[int, int, int]:
    """How many tokens are data, and of how many rollouts and groups."""
    data = [
        (rollout, group)
        for micro in batch.micro_batches
        for rollout, group, is_data in zip(
            micro.tokens.rollout_N.tolist(), micro.tokens.group_N.tolist(), micro.tokens.mask_N.tolist(), strict=True
        )
        if is_data
    ]
    return len(data), len({rollout for rollout, _ in data}), len({group for _, group in data})


def make_trainer(
    policy: Policy, *, temperature: float = 1.0, num_steps: int = 10, with_reference: bool = False, **settings: Any
) -> LocalTrainer:
    """with_reference: it gets a frozen copy of the policy as it is now."""
    return LocalTrainer(
        policy,
        Train(**{"learning_rate": 1e-3, **settings}),
        shape=Shape(temperature),
        num_steps=num_steps,
        reference=copy.deepcopy(policy) if with_reference else None,
    )


def make_critic(policy: Policy, *, learning_rate: float = 1e-3, num_steps: int = 10, **settings: Any) -> LocalCritic:
    """Over a copy of the policy's transformer; its head says a bit more than 0 already, so that values differ."""
    model = ValueModel(copy.deepcopy(policy))
    with torch.no_grad():
        model.weight_D += 0.1 * torch.linspace(-1, 1, len(model.weight_D), device=model.device)
    return LocalCritic(
        model, Train(**{"learning_rate": 1e-5, **settings}), learning_rate=learning_rate, num_steps=num_steps
    )


@dataclass
class Counted:
    """A trainer or a critic, and how often each of its verbs was called."""

    inner: Any
    calls: Counter[str] = field(default_factory=Counter)

    def forward(self, rows: Rows, *, reference: bool = False) -> Any:
        self.calls["reference" if reference else "forward"] += 1
        return self.inner.forward(rows, reference=True) if reference else self.inner.forward(rows)

    def forward_backward(self, rows: Rows, loss: Any, **options: Any) -> Any:
        self.calls["forward_backward"] += 1
        return self.inner.forward_backward(rows, loss, **options)

    def optim_step(self) -> Any:
        self.calls["optim_step"] += 1
        return self.inner.optim_step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
