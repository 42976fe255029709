"""A batch among ranks: every micro-batch once, as many passes on each, and one account of what all did."""

from __future__ import annotations

import copy

import pytest

from headway.objectives.named import objective
from headway.train.ranks import share
from headway.train.step import train_step
from tests.batches import make_trainer, many_groups, prepared

GRPO = objective("grpo", kl_coefficient=0, corrections=["tis"], reduction="token_mean")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("optimizer_steps", [1, 2])
def test_every_micro_batch_is_trained_once_and_all_make_as_many_passes(policy, num_ranks, optimizer_steps):
    trainer = make_trainer(policy)
    batch = prepared(GRPO, many_groups(), budget=20, optimizer_steps=optimizer_steps, trainer=trainer)
    shares = [share(batch, rank, num_ranks) for rank in range(num_ranks)]
    for place, part in enumerate(batch.optimizer_steps):
        hands = [one.optimizer_steps[place] for one in shares]
        assert len({len(hand) for hand in hands}) == 1
        trained = [id(micro) for hand in hands for micro in hand if not micro.filler]
        assert sorted(trained) == sorted(id(micro) for micro in part if not micro.empty)
        assert all(micro.empty for hand in hands for micro in hand if micro.filler)


def test_a_part_without_a_trained_token_has_no_pass_on_any_rank():
    batch = prepared(GRPO, many_groups(num=1, size=2), budget=20)
    nothing = [micro for micro in batch.micro_batches if micro.empty]
    bare = type(batch)(batch.version, [nothing], batch.rollouts, batch.rewards, batch.metrics)
    assert [share(bare, rank, 2).optimizer_steps for rank in range(2)] == [[[]], [[]]]


def test_rows_are_dealt_evenly():
    batch = prepared(GRPO, many_groups(num=12), budget=20)
    rows = [
        sum(len(micro.rows.ids_T) for micro in share(batch, rank, 3).micro_batches if not micro.filler)
        for rank in range(3)
    ]
    assert max(rows) - min(rows) <= 20


class Others:
    """Ranks that were played one after the other."""

    rank, num = 0, 2

    def __init__(self, before) -> None:
        self.before = before

    def gather(self, mine):
        self.before.append(mine)
        return self.before


def test_the_account_of_all_ranks_is_that_of_one_that_does_it_all(policy):
    """Played one after the other: losses, diagnostics and log-ratios of the two together are those of the whole."""
    batch = prepared(GRPO, many_groups(), budget=20)
    whole = train_step(make_trainer(copy.deepcopy(policy)), None, GRPO, batch)
    done: list = []
    for rank in range(2):
        result = train_step(make_trainer(copy.deepcopy(policy)), None, GRPO, share(batch, rank, 2), ranks=Others(done))
    assert result.log_ratios == whole.log_ratios
    same = {name: value for name, value in whole.metrics.items() if name not in ("grad_norm", "loss")}
    assert {name: result.metrics[name] for name in same} == same
    assert result.metrics["loss"] == pytest.approx(whole.metrics["loss"], abs=1e-7)
