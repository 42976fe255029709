"""One train step: what it learns, in how many optimizer steps, and the batches from which there is nothing to learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.batch import Batch
from headway.models.distribution import Shape
from headway.models.policy import Policy
from headway.models.weights import fingerprint, named_weights
from headway.objectives.named import objective
from headway.train.local import LocalTrainer
from headway.train.step import StepResult, train_step
from headway.types import Rollout
from tests.batches import Counted, make_critic, make_trainer, many_groups, prepared
from tests.tiny import make_policy, own_logprobs, prompt, rollout, scored

GRPO = objective("grpo", kl_coefficient=0, corrections=["tis"], reduction="token_mean")
PPO = objective("ppo")
ASKED = prompt("1+2=")


def batch_of(answers: Sequence[Rollout], rewards: Sequence[float], *, version: int = 0, budget: int = 99) -> Batch:
    group = [scored(answer, reward) for answer, reward in zip(answers, rewards, strict=True)]
    return prepared(GRPO, [group], version=version, budget=budget)


def answer(policy: Policy, member: int, tokens: Sequence[int], **options) -> Rollout:
    """One that this policy sampled, by its log-probs."""
    with torch.no_grad():
        logprobs = own_logprobs(policy, ASKED.tokens, tokens).tolist()
    return rollout(ASKED, tokens, member=member, logprobs=logprobs, **options)


def saved(trainer: LocalTrainer, folder: Path) -> bytes:
    trainer.save(folder)
    return (folder / "trainer.pt").read_bytes()


def do_step(trainer: LocalTrainer, batch: Batch) -> StepResult:
    return train_step(trainer, None, GRPO, batch)


# ---- learning


def test_steps_raise_the_log_prob_of_what_is_rewarded(policy):
    trainer = make_trainer(policy, learning_rate=3e-3)
    good, bad = [3, 27], [4, 5, 6]
    history = []
    for version in range(5):
        with torch.no_grad():
            history.append([own_logprobs(policy, ASKED.tokens, tokens).sum().item() for tokens in (good, bad)])
        answers = [answer(policy, member, tokens) for member, tokens in enumerate((good, bad))]
        do_step(trainer, batch_of(answers, [1.0, 0.0], version=version))
    assert [good for good, _ in history] == sorted(good for good, _ in history)
    assert [bad for _, bad in history] == sorted((bad for _, bad in history), reverse=True)
    assert history[-1][0] > history[0][0] + 0.1


def test_on_policy_ratios_are_1_and_the_loss_is_minus_the_mean_advantage(policy):
    """Advantages are +-0.707107; 2 of 5 tokens have the positive one: loss = 0.707107 (3 - 2) / 5."""
    result = do_step(
        make_trainer(policy), batch_of([answer(policy, 0, [3, 27]), answer(policy, 1, [4, 5, 6])], [1.0, 0.0])
    )
    assert result.metrics["loss"] == pytest.approx(0.5**0.5 / 5, abs=1e-5)
    assert result.metrics["ratio_min"] == pytest.approx(1.0, abs=1e-5)
    assert result.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert result.metrics["mismatch_kl_k3"] < 1e-8
    assert [len(ratios) for ratios in result.log_ratios] == [2, 3]
    assert max(abs(ratio) for ratios in result.log_ratios for ratio in ratios) < 1e-5


def test_log_ratios_are_the_trainers_minus_the_recorded(policy):
    told = answer(policy, 0, [3, 27])
    shifted = rollout(ASKED, told.tokens, logprobs=[told.logprobs[0] - 0.5, told.logprobs[1] + 0.25])
    result = do_step(make_trainer(policy), batch_of([shifted, answer(policy, 1, [4])], [1.0, 0.0]))
    assert result.log_ratios[0] == pytest.approx([0.5, -0.25], abs=1e-5)


def test_metrics_name_lags_and_loss_parts(policy):
    old = answer(policy, 0, [3, 27], versions=[2, 3])
    metrics = do_step(
        make_trainer(policy), batch_of([old, answer(policy, 1, [4], versions=[3])], [1.0, 0.0], version=3)
    ).metrics
    assert (metrics["tokens/lag_0"], metrics["tokens/lag_1"]) == (2, 1)
    assert metrics["learning_rate"] == 1e-3
    assert metrics["optimizer_steps"] == 1
    assert metrics["skipped_steps"] == 0
    assert metrics["entropy"] > 0
    assert (metrics["trained_tokens"], metrics["num_rollouts"]) == (3, 2)


def test_equal_rewards_teach_nothing(policy):
    before = fingerprint(policy.weights())
    answers = [answer(policy, 0, [3, 27]), answer(policy, 1, [4, 5, 6])]
    metrics = do_step(make_trainer(policy), batch_of(answers, [1.0, 1.0])).metrics
    assert (metrics["loss"], metrics["grad_norm"], metrics["zero_variance_groups"]) == (0.0, 0.0, 1)
    assert fingerprint(policy.weights()) == before


# ---- B06: truncated, all truncated


def test_b06_a_masked_rollout_leaves_the_loss_and_keeps_its_length(policy):
    """Finished answer: 3 tokens; truncated one: 5, all masked. The loss is over 3 tokens, the lengths are of both."""
    finished = answer(policy, 0, [3, 4, 27])
    truncated = answer(policy, 1, [5, 6, 7, 8, 9], mask=[False] * 5, finish="length")
    batch = batch_of([finished, truncated], [1.0, 0.0])
    result = do_step(make_trainer(policy), batch)
    assert result.metrics["loss"] == pytest.approx(-(0.5**0.5), abs=1e-5)
    assert {
        name: result.metrics[name] for name in ("trained_tokens", "response_tokens_mean", "response_tokens_max")
    } == {
        "trained_tokens": 3,
        "response_tokens_mean": 4.0,
        "response_tokens_max": 5,
    }
    assert result.metrics["truncated_share"] == 0.5
    assert [len(ratios) for ratios in result.log_ratios] == [3, 0]


def test_b06_what_is_masked_gives_no_gradient(policy):
    """Whatever stands in the masked answer and its log-probs, the step is the same."""
    learned = []
    for tokens, logprob in (([5, 6, 7], -2.0), ([9, 9, 9, 9], -torch.inf)):
        policy = make_policy()
        masked = rollout(
            ASKED, tokens, member=1, logprobs=[logprob] * len(tokens), mask=[False] * len(tokens), finish="length"
        )
        do_step(make_trainer(policy), batch_of([answer(policy, 0, [3, 4, 27]), masked], [1.0, 0.0], budget=5))
        learned.append(policy.head.weight_VD.detach().clone())
    torch.testing.assert_close(learned[0], learned[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("tokens", [[3, 4, 5], []], ids=["all masked", "all empty"])
def test_b06_a_batch_without_a_trained_token_changes_nothing_and_says_so(policy, tmp_path, tokens):
    """Adam would go on moving the weights by its momentum, had the step not been skipped."""
    trainer = make_trainer(policy)
    do_step(trainer, batch_of([answer(policy, 0, [3, 27]), answer(policy, 1, [4, 5, 6])], [1.0, 0.0]))
    before = saved(trainer, tmp_path)
    masked = [rollout(ASKED, tokens, member=member, mask=[False] * len(tokens)) for member in range(2)]
    result = do_step(trainer, batch_of(masked, [1.0, 0.0]))
    assert saved(trainer, tmp_path) == before
    assert "no token of this batch may be trained" in result.metrics["warning"]
    assert result.log_ratios == [[], []]
    assert result.metrics["trained_tokens"] == 0


def test_a_micro_batch_without_a_trained_token_is_passed_over(policy):
    masked = rollout(ASKED, [5, 6, 7], member=0, mask=[False] * 3)
    batch = batch_of([masked, answer(policy, 1, [3, 4, 27])], [0.0, 1.0], budget=5)
    assert [micro.empty for micro in batch.micro_batches] == [True, False]
    assert do_step(make_trainer(policy), batch).metrics["loss"] == pytest.approx(-(0.5**0.5), abs=1e-5)


def test_a_recorded_log_prob_that_is_no_number_ends_in_a_skipped_step_or_a_finite_one(policy):
    """B07: nothing that is recorded may put a nan into the weights."""
    for logprob in (-torch.inf, torch.nan, -300.0):
        broken = rollout(ASKED, [3, 27], logprobs=[logprob, -1.0])
        do_step(make_trainer(policy), batch_of([broken, answer(policy, 1, [4, 5])], [1.0, 0.0]))
        assert all(tensor.isfinite().all() for tensor in policy.weights().values())


# ---- several optimizer steps


def test_parts_are_trained_as_separate_batches_would_be():
    """Each under its own denominators, bit for bit. This objective needs no log-probs from before the first part."""
    by, groups = objective("glm5_async"), many_groups(num=4)
    policy, one_by_one = make_policy(), make_policy()
    batch = prepared(by, groups, optimizer_steps=2, budget=30)
    train_step(make_trainer(policy), None, by, batch)
    alone = make_trainer(one_by_one)
    for part in batch.optimizer_steps:
        whose = {batch.rollouts[number].prompt.uid for micro in part for number in micro.tokens.rollout_N.tolist()}
        own = [group for group in groups if group[0].rollout.prompt.uid in whose]
        assert 0 < len(own) < len(groups)
        train_step(alone, None, by, prepared(by, own, budget=30))
    assert fingerprint(policy.weights()) == fingerprint(one_by_one.weights())
    assert fingerprint(policy.weights()) != fingerprint(make_policy().weights())


def test_the_ratio_of_a_later_part_is_against_the_weights_before_the_train_step():
    """A learning rate so high that the clip acts in the second part, and nowhere in the first."""
    by = objective("grpo", kl_coefficient=0)
    policy = make_policy()
    trainer = make_trainer(policy, learning_rate=0.05)
    batch = prepared(by, many_groups(num=4), optimizer_steps=2, trainer=trainer)
    result = train_step(trainer, None, by, batch)
    assert 0 < result.metrics["acted_share/clip"] < 1
    single = prepared(by, many_groups(num=4), trainer=trainer)
    assert train_step(trainer, None, by, single).metrics.get("acted_share/clip", 0.0) == 0.0


@pytest.mark.parametrize("passes", [1, 3])
def test_every_pass_takes_every_part(passes):
    trainer = Counted(make_trainer(make_policy()))
    batch = prepared(GRPO, many_groups(), optimizer_steps=2, passes=passes, trainer=trainer, budget=30)
    trainer.calls.clear()
    metrics = train_step(trainer, None, GRPO, batch, passes=passes).metrics
    num = len(batch.micro_batches)
    assert trainer.calls == {"forward_backward": num * passes, "optim_step": 2 * passes}
    assert metrics["optimizer_steps"] == 2 * passes
    assert metrics["tokens"] == batch.metrics["trained_tokens"]


def test_a_clip_that_acts_in_a_later_pass_is_counted():
    """In the first pass every ratio to the weights before the step is 1, and no clip acts; it does later on."""
    shares = []
    for passes in (1, 4):
        trainer = make_trainer(make_policy(), learning_rate=0.05)
        batch = prepared(GRPO, many_groups(), passes=passes, trainer=trainer)
        shares.append(train_step(trainer, None, GRPO, batch, passes=passes).metrics["acted_share/clip"])
    assert shares[0] == 0
    assert 0 < shares[1] < 1


def test_the_schedule_counts_optimizer_steps():
    trainer = make_trainer(make_policy(), learning_rate=0.1, learning_rate_schedule="linear", num_steps=8)
    rates = []
    for _ in range(2):
        batch = prepared(GRPO, many_groups(num=4), optimizer_steps=2, passes=2, trainer=trainer)
        rates.append(train_step(trainer, None, GRPO, batch, passes=2).metrics["learning_rate"])
    assert rates == pytest.approx([0.1 * 5 / 8, 0.1 * 1 / 8])


def test_mismatch_is_measured_once_per_token_under_the_weights_before_the_train_step():
    """Whatever number of optimizer steps and passes follows."""
    found: list[dict[str, Any]] = []
    ratios = []
    for optimizer_steps, passes in ((1, 1), (3, 1), (2, 2)):
        trainer = make_trainer(make_policy(), learning_rate=0.05)
        batch = prepared(GRPO, many_groups(), optimizer_steps=optimizer_steps, passes=passes, trainer=trainer)
        result = train_step(trainer, None, GRPO, batch, passes=passes)
        names = ("tokens", "mismatch_kl_k1", "mismatch_kl_k3", "ratio_max", "ess_share", "tokens/lag_1")
        found.append({name: result.metrics[name] for name in names})
        ratios.append(result.log_ratios)
    for figures, log_ratios in zip(found[1:], ratios[1:], strict=True):
        assert figures == pytest.approx(found[0], rel=1e-5)
        for ours, theirs in zip(log_ratios, ratios[0], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


def test_without_log_probs_before_the_step_only_the_first_optimizer_step_measures():
    """Nothing in this objective needs them, and afterwards the weights have moved."""
    by = objective("glm5_async")
    trainer = make_trainer(make_policy())
    batch = prepared(by, many_groups(), optimizer_steps=2, trainer=trainer)
    result = train_step(trainer, None, by, batch)
    first = sum(len(micro.tokens.rollout_N) for micro in batch.optimizer_steps[0])
    assert 0 < result.metrics["tokens"] == first < batch.metrics["trained_tokens"]
    measured = {number for micro in batch.optimizer_steps[0] for number in micro.tokens.rollout_N.tolist()}
    assert {number for number, ratios in enumerate(result.log_ratios) if ratios} == measured


def test_an_interpolated_proximal_policy_is_compared_with_the_true_one():
    by = objective("decoupled_ppo", proximal="interpolated")
    trainer = Counted(make_trainer(make_policy()))
    batch = prepared(by, many_groups(), optimizer_steps=2, trainer=trainer)
    assert not trainer.calls
    metrics = train_step(trainer, None, by, batch).metrics
    assert metrics["interpolation_error_max"] >= metrics["interpolation_error_mean"] > 0


def test_a_part_without_a_trained_token_is_skipped_and_said():
    asked = [prompt("1+2="), prompt("3+4=")]
    masked = [rollout(asked[0], [5, 6], member=member, mask=[False] * 2) for member in range(2)]
    trained = [rollout(asked[1], [5, 6 + member], member=member) for member in range(2)]
    groups = [[scored(answer, float(answer.member)) for answer in members] for members in (masked, trained)]
    trainer = Counted(make_trainer(make_policy()))
    batch = prepared(GRPO, groups, optimizer_steps=2, passes=2, trainer=trainer)
    metrics = train_step(trainer, None, GRPO, batch, passes=2).metrics
    assert trainer.calls["optim_step"] == metrics["optimizer_steps"] == 2
    place = 1 + next(place for place, part in enumerate(batch.optimizer_steps) if all(micro.empty for micro in part))
    assert metrics["warning"] == f"part {place} of 2 has no token to train and was skipped"


def test_a_batch_all_of_which_is_filtered_out_changes_nothing_and_says_so(policy):
    by = objective("dapo")
    before = fingerprint(policy.weights())
    batch = prepared(by, [[scored(answer(policy, member, [3, 27]), 1.0) for member in range(2)]])
    result = train_step(make_trainer(policy), None, by, batch)
    assert "no token of this batch may be trained" in result.metrics["warning"]
    assert (result.metrics["dropped_rollouts/zero_variance"], result.log_ratios) == (2, [[], []])
    assert fingerprint(policy.weights()) == before


def test_warnings_of_several_optimizer_steps_are_said_once():
    class Broken(LocalTrainer):
        def optim_step(self) -> dict[str, Any]:
            return {**super().optim_step(), "warning": "the gradient is not finite (nan)"}

    policy = make_policy()
    trainer = Broken(policy, make_trainer(policy)._settings, shape=Shape(), num_steps=9)
    batch = prepared(GRPO, many_groups(), optimizer_steps=2, trainer=trainer)
    assert train_step(trainer, None, GRPO, batch).metrics["warning"] == "the gradient is not finite (nan)"


# ---- value warm-up


def test_value_warm_up_leaves_the_policys_bits_and_teaches_the_critic(tmp_path: Path):
    policy = make_policy()
    trainer, critic = make_trainer(policy), make_critic(policy)
    groups = many_groups()
    train_step(trainer, critic, PPO, prepared(PPO, groups, critic=critic))
    before, critics = saved(trainer, tmp_path), fingerprint(named_weights(critic._model))
    batch = prepared(PPO, groups, critic=critic, optimizer_steps=2, trainer=trainer)
    metrics = train_step(trainer, critic, PPO, batch, train_policy=False).metrics
    assert saved(trainer, tmp_path) == before
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert fingerprint(named_weights(critic._model)) != critics
    assert metrics["value_warmup"] is True
    assert metrics["value_loss"] > 0
    assert metrics["tokens"] == batch.metrics["trained_tokens"]
    assert "grad_norm" not in metrics
    assert "loss" in metrics


def test_a_step_after_warm_up_says_nothing_of_it():
    policy = make_policy()
    trainer, critic = make_trainer(policy), make_critic(policy)
    metrics = train_step(trainer, critic, PPO, prepared(PPO, many_groups(), critic=critic)).metrics
    assert "value_warmup" not in metrics
    assert metrics["grad_norm"] > 0
