"""The critic of one process: its values, its learning, its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import Train
from headway.models.rows import Rows
from headway.models.value import ValueModel
from headway.models.weights import fingerprint, named_weights
from headway.objectives.named import objective
from headway.prepare.pack import Packing, pack
from headway.train.critic import LocalCritic
from headway.train.step import train_step
from headway.types import UserError
from tests.batches import make_critic, make_trainer, many_groups, prepared
from tests.tiny import make_policy, prompt, rollout, scored

PPO = objective("ppo", lam=1.0)


def answers() -> Rows:
    """Two answers to one prompt; the second was cut off."""
    asked = prompt("1+2=")
    both = [rollout(asked, [3, 27], member=0), rollout(asked, [4, 5, 6], member=1, finish="length")]
    ((one,),) = pack(both, [0, 0], [0, 1], Packing(99, bootstrap=True))
    return one.rows


def away_from(target: float):
    return lambda value_N: (value_N - target).square().sum()


def test_a_new_critic_says_0():
    critic = LocalCritic(ValueModel(make_policy()), Train(), learning_rate=0.1, num_steps=1)
    values = critic.forward(answers())
    assert values.value_N.tolist() == [0.0] * 5
    assert values.bootstrap_R.tolist() == [0.0]
    assert values.loss is None


def test_forward_and_forward_backward_agree(policy):
    critic = make_critic(policy)
    before = critic.forward(answers())
    result = critic.forward_backward(answers(), away_from(1.0))
    assert torch.equal(result.value_N, before.value_N)
    assert torch.equal(result.bootstrap_R, before.bootstrap_R)
    assert result.loss == pytest.approx((before.value_N - 1).square().sum().item())
    assert not result.value_N.requires_grad


def test_bfloat16_products_are_near_the_float32_ones_and_leave_masters_in_float32(policy):
    exact, rough = (make_critic(policy, compute_dtype=name).forward(answers()) for name in ("float32", "bfloat16"))
    assert rough.value_N.dtype == torch.float32
    assert 0 < (rough.value_N - exact.value_N).abs().max() < 0.1
    critic = make_critic(policy, compute_dtype="bfloat16")
    critic.forward_backward(answers(), away_from(1.0))
    critic.optim_step()
    assert {tensor.dtype for tensor in named_weights(critic._model).values()} == {torch.float32}


def test_it_shares_no_storage_with_the_policy(policy):
    before = fingerprint(policy.weights())
    critic = make_critic(policy)
    for _ in range(3):
        critic.forward_backward(answers(), away_from(1.0))
        critic.optim_step()
    assert fingerprint(policy.weights()) == before


def test_a_critic_learns_a_constant_reward():
    """Every answer earns 0.7, whatever it is: so every value should become 0.7, and all advantages 0.

    Answers that were cut off are worth what would have come: their values too go to 0.7 x (1 + what is bootstrapped),
    so there are none here.
    """
    policy, critic = make_policy(), LocalCritic(ValueModel(make_policy()), Train(), learning_rate=0.01, num_steps=200)
    trainer = make_trainer(policy)
    asked = prompt("1+2=")
    group = [scored(rollout(asked, [3 + member, 5, 27], member=member), 0.7) for member in range(4)]
    history = []
    for version in range(60):
        batch = prepared(PPO, [group], version=version, critic=critic)
        metrics = train_step(trainer, critic, PPO, batch, train_policy=False).metrics
        history.append(metrics["value_loss"])
    assert history[0] == pytest.approx(0.7**2 / 2, abs=1e-6)
    assert history[-1] < 1e-3
    values = critic.forward(batch.micro_batches[0].rows).value_N
    assert values.tolist() == pytest.approx([0.7] * len(values), abs=0.05)


def test_its_loss_is_by_hand(policy):
    """lambda 1: returns are the rewards. 1/2 mean (V - R)^2 over all tokens; at V = V_old the clip does not act."""
    critic = make_critic(policy)
    group = [scored(rollout(prompt("1+2="), [3, 27], member=member), float(member)) for member in range(2)]
    batch = prepared(PPO, [group], critic=critic)
    (micro,) = batch.micro_batches
    assert micro.tokens.value_N is not None
    expected = 0.5 * (micro.tokens.value_N - torch.tensor([0.0, 0.0, 1.0, 1.0])).square().mean()
    metrics = train_step(make_trainer(policy), critic, PPO, batch).metrics
    assert metrics["value_loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert metrics["critic_grad_norm"] > 0
    assert (metrics["critic_learning_rate"], metrics["critic_skipped_steps"]) == (1e-3, 0)
    assert metrics["learning_rate"] == 1e-3


# ---- its file


def steps(critic: LocalCritic, targets: list[float]) -> list[dict[str, Any]]:
    found = []
    for target in targets:
        critic.forward_backward(answers(), away_from(target))
        found.append(critic.optim_step())
    return found


def test_a_loaded_critic_goes_on_bit_for_bit(tmp_path: Path):
    options = {"learning_rate_schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.01, "num_steps": 8}
    critic = make_critic(make_policy(seed=0), **options)
    steps(critic, [1.0, float("inf"), -1.0])
    critic.save(tmp_path)
    resumed = make_critic(make_policy(seed=1), **options)
    resumed.load(tmp_path)
    assert steps(resumed, [0.5, float("nan"), 2.0]) == steps(critic, [0.5, float("nan"), 2.0])
    assert fingerprint(named_weights(resumed._model)) == fingerprint(named_weights(critic._model))


def test_a_checkpoint_without_a_critic_is_refused(policy, tmp_path: Path):
    make_trainer(policy).save(tmp_path)
    with pytest.raises(UserError, match="holds no critic"):
        make_critic(policy).load(tmp_path)


def test_a_damaged_file_names_the_checkpoint(policy, tmp_path: Path):
    (tmp_path / "critic.pt").write_bytes(b"PK\x03\x04 not all of it")
    with pytest.raises(UserError, match=f"{tmp_path} can't be read"):
        make_critic(policy).load(tmp_path)


def test_whole_ppo_steps_teach_policy_and_critic():
    policy = make_policy()
    trainer, critic = make_trainer(policy, learning_rate=1e-3), make_critic(policy, learning_rate=3e-3)
    before = fingerprint(policy.weights()), fingerprint(named_weights(critic._model))
    losses = []
    for _ in range(8):
        batch = prepared(PPO, many_groups(), budget=30, optimizer_steps=2, trainer=trainer, critic=critic)
        losses.append(train_step(trainer, critic, PPO, batch).metrics["value_loss"])
    assert losses[-1] < losses[0]
    after = fingerprint(policy.weights()), fingerprint(named_weights(critic._model))
    assert before[0] != after[0]
    assert before[1] != after[1]
