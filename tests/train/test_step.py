"""One train step: what it learns, and the batches from which there is nothing to learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from headway.config import Train
from headway.models.batch import Batch
from headway.models.policy import Policy
from headway.models.weights import fingerprint
from headway.objectives.named import objective
from headway.prepare.credit import assign_credit
from headway.prepare.pack import pack
from headway.train.local import LocalTrainer
from headway.train.step import StepResult, train_step
from headway.types import Rollout
from tests.tiny import make_policy, own_logprobs, prompt, rollout, scored

GRPO = objective("grpo", reduction="token_mean")
CPU = torch.device("cpu")
ASKED = prompt("1+2=")


def make_trainer(policy: Policy, learning_rate: float = 3e-3) -> LocalTrainer:
    return LocalTrainer(policy, Train(learning_rate=learning_rate), temperature=1.0, num_steps=100)


def batch_of(answers: Sequence[Rollout], rewards: Sequence[float], *, version: int = 0, budget: int = 99) -> Batch:
    credit = assign_credit(GRPO, [[scored(answer, reward) for answer, reward in zip(answers, rewards, strict=True)]])
    return pack(credit, GRPO, version=version, micro_batch_tokens=budget)


def answer(policy: Policy, member: int, tokens: Sequence[int], **options) -> Rollout:
    """One that this policy sampled, by its log-probs."""
    with torch.no_grad():
        logprobs = own_logprobs(policy, ASKED.tokens, tokens).tolist()
    return rollout(ASKED, tokens, member=member, logprobs=logprobs, **options)


def saved(trainer: LocalTrainer, folder: Path) -> bytes:
    trainer.save(folder)
    return (folder / "trainer.pt").read_bytes()


def do_step(trainer: LocalTrainer, batch: Batch) -> StepResult:
    return train_step(trainer, GRPO, batch)


# ---- learning


def test_steps_raise_the_log_prob_of_what_is_rewarded(policy):
    trainer = make_trainer(policy)
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
    assert metrics["learning_rate"] == 3e-3
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
    assert [len(micro.target_N) for micro in batch.micro_batches] == [0, 3]
    assert do_step(make_trainer(policy), batch).metrics["loss"] == pytest.approx(-(0.5**0.5), abs=1e-5)


def test_a_recorded_log_prob_that_is_no_number_ends_in_a_skipped_step_or_a_finite_one(policy):
    """B07: nothing that is recorded may put a nan into the weights."""
    for logprob in (-torch.inf, torch.nan, -300.0):
        broken = rollout(ASKED, [3, 27], logprobs=[logprob, -1.0])
        do_step(make_trainer(policy), batch_of([broken, answer(policy, 1, [4, 5])], [1.0, 0.0]))
        assert all(tensor.isfinite().all() for tensor in policy.weights().values())
