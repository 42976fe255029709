"""What a trainer's forward pass takes: flat rows without padding, and what each trained token counts.

Axes: T rows of a micro-batch, N its trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from headway.models.attention import Segment
from headway.types import Rollout


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass takes.

    ids_T, positions_T: the rows; segments: which rows see which. Per trained token: row_N predicts it, target_N is its
    id, behaviour_N its log-prob when it was sampled, advantage_N and weight_N (of the reduction) what it counts,
    lag_N its age in versions, position_N its place in its rollout, rollout_N its rollout's number in the batch.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    segments: tuple[Segment, ...]
    row_N: torch.Tensor
    target_N: torch.Tensor
    behaviour_N: torch.Tensor
    advantage_N: torch.Tensor
    weight_N: torch.Tensor
    lag_N: torch.Tensor
    position_N: torch.Tensor
    rollout_N: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{n: value.to(device) for n, value in values.items() if isinstance(value, torch.Tensor)})


@dataclass(frozen=True)
class Batch:
    """What one train step takes, under weights `version`. The denominators behind `weight_N` are those of all of it.

    num_tokens: trained ones; num_rollouts, num_groups: those with at least one trained token. rollouts and rewards are
    in the order that `MicroBatch.rollout_N` counts in.
    """

    version: int
    micro_batches: list[MicroBatch]
    rollouts: list[Rollout]
    rewards: list[float]
    num_tokens: int
    num_rollouts: int
    num_groups: int
    metrics: dict[str, Any]
