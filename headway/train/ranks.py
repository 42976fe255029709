"""A batch among several ranks that train together, and one account of what they did.

Every rank makes as many passes over the model as every other, for a pass is a joint one where weights are divided: who
has fewer micro-batches passes over a filler, whose tokens count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import torch

from headway.batch import Batch, MicroBatch

T = TypeVar("T")


class Ranks(Protocol):
    """Those that train together, as one of them sees them."""

    @property
    def rank(self) -> int: ...

    @property
    def num(self) -> int: ...

    def gather(self, mine: T) -> list[T]:
        """What each rank gives, by rank; all of them call it."""
        ...


def share(batch: Batch, rank: int, num_ranks: int) -> Batch:
    """A rank's micro-batches of every optimizer step; rollouts, rewards and metrics stay those of the whole batch."""
    return replace(batch, optimizer_steps=[_dealt(part, rank, num_ranks) for part in batch.optimizer_steps])


def _dealt(part: Sequence[MicroBatch], rank: int, num_ranks: int) -> list[MicroBatch]:
    """The largest first, each to the rank that has the fewest rows, so that ranks end at about the same time."""
    hands: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    rows = [0] * num_ranks
    counted = [micro for micro in part if not micro.empty]
    for micro in sorted(counted, key=_num_rows, reverse=True):
        fewest = min(range(num_ranks), key=lambda each: (rows[each], each))
        hands[fewest].append(micro)
        rows[fewest] += _num_rows(micro)
    if not counted:
        return []
    filler = _filler(min(counted, key=_num_rows))
    return hands[rank] + [filler] * (max(map(len, hands)) - len(hands[rank]))


def _num_rows(micro: MicroBatch) -> int:
    return len(micro.rows.ids_T)


def _filler(micro: MicroBatch) -> MicroBatch:
    nothing = tuple(torch.zeros_like(weight_N) for weight_N in micro.tokens.weights)
    return MicroBatch(micro.rows, replace(micro.tokens, weights=nothing), filler=True)
