"""A prepared batch: what `prepare` makes and `train` takes.

It stands between the verbs and their libraries because it joins two of them: the rows that a model is given
(`models.rows`) and the tokens that an objective sees (`objectives.tokens`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headway.models.rows import Rows
from headway.objectives.tokens import Tokens
from headway.types import Rollout


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass takes: whole rollouts, or whole groups where a term compares pairs.

    Trained token n is predicted by `rows.row_N[n]` and is `tokens.*_N[n]` to the objective. filler: it is passed over
    though no token of it counts, since other ranks make a pass meanwhile.
    """

    rows: Rows
    tokens: Tokens
    filler: bool = False

    @property
    def empty(self) -> bool:
        """No term of the objective counts any of its tokens, so a pass over it would give no gradient."""
        return not any(bool((weight_N != 0).any()) for weight_N in self.tokens.weights)


@dataclass(frozen=True)
class Batch:
    """What one train step takes, under weights `version`.

    optimizer_steps: its parts, each the micro-batches of one optimizer step; the weights of the reductions in
    `MicroBatch.tokens` have the denominators of all of a part. rollouts: all of the batch, in the order that
    `Tokens.rollout_N` counts in, those too that are no data and in no micro-batch. rewards: the scorers', None where
    unscored. metrics: figures of the batch by name.
    """

    version: int
    optimizer_steps: list[list[MicroBatch]]
    rollouts: list[Rollout]
    rewards: list[float | None]
    metrics: dict[str, Any]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [micro for part in self.optimizer_steps for micro in part]
