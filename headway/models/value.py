"""A value function: the base transformer of a policy, with a scalar head on its last hidden states.

Axes: T rows of a forward pass, N rows that are asked for, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from headway.models.attention import AttentionPlan
from headway.models.policy import Policy, last_hidden


class ValueModel(torch.nn.Module):
    """`V = w h + b` in float32, from hidden states h of Headway's attention; w and b begin as 0, and so does every V.

    It takes over the transformer of a policy that nobody else uses; the LM head is left behind.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.base: Any = policy.model.base_model
        size = policy.head.weight_VD.shape[1]
        self.weight_D = torch.nn.Parameter(torch.zeros(size, dtype=torch.float32, device=policy.device))
        self.bias = torch.nn.Parameter(torch.zeros((), dtype=torch.float32, device=policy.device))

    @property
    def device(self) -> torch.device:
        return self.weight_D.device

    def hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Last hidden states [T, D] of a flat list of rows; `plan` says which rows see which."""
        return last_hidden(self.base, ids_T, positions_T, plan)

    def values(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N] in float32, whatever the dtype of the hidden states."""
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return hidden_ND.float() @ self.weight_D + self.bias
