"""The trainer of one process: fp32 master weights and Adam state, optional bf16 products, LM head in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from headway.config import Train
from headway.models.cores import Cores, FixedCores
from headway.models.distribution import Conditions, Shape, token_logprobs
from headway.models.policy import Policy
from headway.models.rows import Rows
from headway.models.weights import assign_weights
from headway.stages import ForwardResult
from headway.train.measured import unit
from headway.train.optimizer import Optimizer
from headway.train.precision import products_in
from headway.train.state_file import read_state, write_state
from headway.work import WorkLog

Loss = Callable[[torch.Tensor], torch.Tensor]
"""logp_N with gradient, on the trainer's device -> a scalar: the part of the batch's loss that these tokens make."""


class LocalTrainer:
    """Implements `headway.stages.Trainer`.

    policy: float32 weights, which are the master copy; settings: the optimizer; shape: of every distribution, the one
    the rollouts were sampled from; num_steps: optimizer steps of the learning rate's schedule; cores: its claim to CPU
    cores, by default as many as torch would use; reference: a frozen copy of the base model, where an objective needs
    one and the policy has none of its own (an adapter's base). log: its passes with gradients ("train"), without
    ("forward"), and its optimizer steps ("update").
    """

    def __init__(
        self,
        policy: Policy,
        settings: Train,
        *,
        shape: Shape,
        num_steps: int,
        cores: Cores | None = None,
        reference: Policy | None = None,
    ) -> None:
        self._cores = cores or FixedCores(torch.get_num_threads())
        self._policy, self._settings, self._shape = policy, settings, shape
        self._reference = reference
        self.log = WorkLog()
        self._optimizer = Optimizer(policy.model.parameters(), settings, num_steps=num_steps)

    @torch.no_grad()
    def forward(self, rows: Rows, *, reference: bool = False) -> ForwardResult:
        with unit(self._cores, self.log, "forward", rows):
            rows = rows.to(self._policy.device)
            logp_N, entropy_N = self._reference_logprobs(rows) if reference else self._logprobs(self._policy, rows)
            return ForwardResult(logp_N.cpu(), entropy_N.cpu())

    def forward_backward(self, rows: Rows, loss: Loss, *, last: bool = True) -> ForwardResult:
        with unit(self._cores, self.log, "train", rows):
            logp_N, entropy_N = self._logprobs(self._policy, rows.to(self._policy.device))
            value = loss(logp_N)
            value.backward()
            return ForwardResult(logp_N.detach().cpu(), entropy_N.detach().cpu(), value.item())

    def _reference_logprobs(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        if self._reference is not None:
            return self._logprobs(self._reference, rows)
        assert self._policy.has_own_reference, "log-probs of a reference are asked for, and there is none"
        with self._policy.as_reference():
            return self._logprobs(self._policy, rows)

    def _logprobs(self, policy: Policy, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        with products_in(self._settings.compute_dtype, policy.device):
            hidden_TD = policy.hidden(rows.ids_T, rows.positions_T, policy.packed(rows.segments))
        conditions = Conditions(rows.seen() if self._shape.repetition_penalty != 1.0 else None, rows.kept)
        hidden_ND = hidden_TD.index_select(0, rows.row_N)
        return token_logprobs(policy.head, hidden_ND, rows.target_N, self._shape, conditions)

    def optim_step(self) -> dict[str, Any]:
        """-> grad_norm (before clipping), learning_rate, skipped_steps (so far), and a warning if this one was."""
        with unit(self._cores, self.log, "update"):
            return self._optimizer.step()

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._policy.weights()

    def save(self, folder: Path) -> None:
        own = {"weights": dict(self.weights()), "adapter": self._policy.fixed_state()}
        write_state({**own, **self._optimizer.state()}, folder / "trainer.pt")

    def load(self, folder: Path) -> None:
        state = read_state(folder / "trainer.pt", self._policy.device)
        self._policy.adopt(state.get("adapter", {}))
        assign_weights(self._policy.weights(), state["weights"])
        self._optimizer.restore(state)
