"""What trainer and critic share. Steps, clipping and skipping themselves are tested through the trainer."""

from __future__ import annotations

import copy

import pytest
import torch

from headway.config import Train
from headway.train.optimizer import Optimizer


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


def test_a_learning_rate_of_its_own_goes_before_the_settings_and_keeps_their_schedule():
    settings = Train(learning_rate=0.5, learning_rate_schedule="linear", warmup_steps=1)
    optimizer = Optimizer([parameter()], settings, num_steps=5, learning_rate=0.1)
    assert [optimizer.step()["learning_rate"] for _ in range(5)] == pytest.approx([0.1, 0.1, 0.075, 0.05, 0.025])


def test_what_requires_no_gradient_is_left_alone():
    frozen, free = parameter(), parameter()
    frozen.requires_grad_(False)
    optimizer = Optimizer([frozen, free], Train(learning_rate=0.1, weight_decay=0.5), num_steps=1)
    frozen.grad = free.grad = torch.ones(2)
    optimizer.step()
    assert frozen.tolist() == [1.0, 1.0]
    assert free.tolist() == pytest.approx([0.85, 0.85])


def test_gradients_are_gone_after_a_step():
    one = parameter()
    optimizer = Optimizer([one], Train(learning_rate=0.1), num_steps=1)
    one.grad = torch.ones(2)
    optimizer.step()
    assert one.grad is None


def test_a_restored_optimizer_goes_on_where_it_was():
    one, other = parameter(), parameter()
    settings = Train(learning_rate=0.1, learning_rate_schedule="cosine")
    first = Optimizer([one], settings, num_steps=6)
    for scale in (1.0, float("nan"), 2.0):
        one.grad = torch.tensor([scale, -scale])
        first.step()
    second = Optimizer([other], settings, num_steps=6)
    other.data.copy_(one.data)
    second.restore(copy.deepcopy(first.state()))
    for scale in (3.0, 1.0):
        one.grad, other.grad = (torch.tensor([scale, scale]) for _ in range(2))
        assert first.step() == second.step()
        assert torch.equal(one, other)
