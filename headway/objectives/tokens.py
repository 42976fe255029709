"""The trained tokens of a batch or micro-batch, as an objective sees them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Flat tokens N of whole rollouts (for pair terms, of whole groups). Padded input is a special case: mask it.

    mask_N: bool, True for trained tokens. What stands under the mask, or belongs to a rollout that is no data, changes
    nothing, be it inf or nan. rollout_N: int >= 0, whose token it is, in ascending order; group_N: int >= 0, of which
    prompt. behaviour_N: log-probs recorded at sampling; lag_N: int, age in versions. advantage_N: of each token.
    weights: for each term of the objective the slice of its `reduce.token_weights`. proximal_N, reference_N: log-probs
    under the weights before this train step and under the frozen reference. value_N, return_N: the critic's values
    before this train step, and what they should have been. position_N: int >= 0, place in its rollout, for diagnostics.
    normaliser: the batch's mean weight, for self-normalisation.

    None stands for what the objective does not need; a proximal_N of None means that it equals the current log-probs.
    """

    mask_N: Tensor
    rollout_N: Tensor
    group_N: Tensor
    behaviour_N: Tensor
    lag_N: Tensor
    advantage_N: Tensor
    weights: tuple[Tensor, ...]
    proximal_N: Tensor | None = None
    reference_N: Tensor | None = None
    value_N: Tensor | None = None
    return_N: Tensor | None = None
    position_N: Tensor | None = None
    normaliser: tuple[float, ...] | None = None

    def to(self, device: torch.device) -> Tokens:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved, weights=tuple(weight_N.to(device) for weight_N in self.weights))
