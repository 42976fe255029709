"""Training with critic and reference on a GPU: what is computed there is what is computed on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from headway.models.policy import Policy, as_policy
from headway.objectives.named import objective
from headway.train.step import train_step
from tests.batches import make_critic, make_trainer, many_groups, prepared
from tests.tiny import make_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", ["ppo", "online_dpo", "gspo"])
def test_a_train_step_is_the_same_on_both(name: str):
    by = objective(name, reward_kl=0.1) if name == "ppo" else objective(name)
    model: Any = make_model()
    policies: list[Policy] = [as_policy(copy.deepcopy(model).to(device)) for device in ("cpu", "cuda")]
    metrics = []
    for policy in policies:
        trainer = make_trainer(policy, with_reference=True)
        critic = make_critic(policy) if by.needs_critic else None
        batch = prepared(by, many_groups(), budget=30, optimizer_steps=2, trainer=trainer, critic=critic)
        metrics.append(train_step(trainer, critic, by, batch).metrics)
    for figure in ("loss", "grad_norm", *(("value_loss", "reward_kl") if name == "ppo" else ())):
        assert metrics[1][figure] == pytest.approx(metrics[0][figure], rel=1e-3, abs=1e-4)
