"""The critic of one process: a value function with an optimizer, a learning rate and a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headway.config import Train
from headway.models.attention import PackedAttention
from headway.models.cores import Cores, FixedCores
from headway.models.rows import Rows
from headway.models.value import ValueModel
from headway.models.weights import assign_weights, named_weights
from headway.stages import Values
from headway.train.measured import unit
from headway.train.optimizer import Optimizer
from headway.train.precision import products_in
from headway.train.state_file import read_state, write_state
from headway.types import UserError
from headway.work import WorkLog

Loss = Callable[[torch.Tensor], torch.Tensor]
"""value_N with gradient, on the critic's device -> a scalar: the part of the batch's value loss that these make."""

FILE = "critic.pt"


class LocalCritic:
    """Implements `headway.stages.Critic`.

    model: float32 weights; settings: of the optimizer and of the matrix products, as the policy's; learning_rate: its
    own; num_steps: optimizer steps of the learning rate's schedule; cores: its claim to CPU cores. log: its passes with
    gradients ("critic train"), without ("critic forward"), and its optimizer steps ("critic update").
    """

    def __init__(
        self, model: ValueModel, settings: Train, *, learning_rate: float, num_steps: int, cores: Cores | None = None
    ) -> None:
        self._cores = cores or FixedCores(torch.get_num_threads())
        self._model, self._settings = model, settings
        self.log = WorkLog()
        self._optimizer = Optimizer(model.parameters(), settings, num_steps=num_steps, learning_rate=learning_rate)

    @torch.no_grad()
    def forward(self, rows: Rows) -> Values:
        with unit(self._cores, self.log, "critic forward", rows):
            value_N, bootstrap_R = self._values(rows)
            return Values(value_N.cpu(), bootstrap_R.cpu())

    def forward_backward(self, rows: Rows, loss: Loss) -> Values:
        with unit(self._cores, self.log, "critic train", rows):
            value_N, bootstrap_R = self._values(rows)
            value = loss(value_N)
            value.backward()
            return Values(value_N.detach().cpu(), bootstrap_R.detach().cpu(), value.item())

    def _values(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._model.device
        rows = rows.to(device)
        plan = PackedAttention(rows.segments, device)
        with products_in(self._settings.compute_dtype, device):
            hidden_TD = self._model.hidden(rows.ids_T, rows.positions_T, plan)
        value_N = self._model.values(hidden_TD.index_select(0, rows.row_N))
        return value_N, self._model.values(hidden_TD.index_select(0, rows.last_row_R))

    def optim_step(self) -> dict[str, Any]:
        """As `LocalTrainer.optim_step`."""
        with unit(self._cores, self.log, "critic update"):
            return self._optimizer.step()

    def save(self, folder: Path) -> None:
        write_state({"weights": named_weights(self._model), **self._optimizer.state()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Raises UserError where the checkpoint has no critic."""
        if not (folder / FILE).is_file():
            raise UserError(
                f"{folder} holds no critic: the run that wrote it had an objective without one; resume with that one"
            )
        state = read_state(folder / FILE, self._model.device)
        assign_weights(named_weights(self._model), state["weights"])
        self._optimizer.restore(state)
