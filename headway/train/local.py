"""The trainer of one process: fp32 master weights and Adam state, optional bf16 products, LM head in fp32."""

from __future__ import annotations

import contextlib
import errno
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint import broken
from headway.config import Train
from headway.models.attention import PackedAttention
from headway.models.batch import MicroBatch
from headway.models.cores import Cores, FixedCores
from headway.models.distribution import token_logprobs
from headway.models.policy import Policy
from headway.models.weights import assign_weights
from headway.stages import ForwardResult

Loss = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
"""(logp_N with gradient, the micro-batch) -> a scalar: the part of the batch's loss that these tokens make."""


class LocalTrainer:
    """Implements `headway.stages.Trainer`.

    policy: float32 weights, which are the master copy; settings: the optimizer; temperature: of every log-prob, the one
    the rollouts were sampled at; num_steps: the length of the learning rate's schedule; cores: its claim to CPU cores,
    by default as many as torch would use.
    """

    def __init__(
        self, policy: Policy, settings: Train, *, temperature: float, num_steps: int, cores: Cores | None = None
    ) -> None:
        self._cores = cores or FixedCores(torch.get_num_threads())
        self._policy, self._settings, self._temperature, self._num_steps = policy, settings, temperature, num_steps
        self._parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._steps_taken = self._steps_skipped = 0

    @torch.no_grad()
    def forward(self, batch: MicroBatch) -> ForwardResult:
        with self._cores.unit():
            logp_N, entropy_N = self._logprobs(batch.to(self._policy.device))
        return ForwardResult(logp_N.cpu(), entropy_N.cpu())

    def forward_backward(self, batch: MicroBatch, loss: Loss) -> ForwardResult:
        with self._cores.unit():
            batch = batch.to(self._policy.device)
            logp_N, entropy_N = self._logprobs(batch)
            value = loss(logp_N, batch)
            value.backward()
        return ForwardResult(logp_N.detach().cpu(), entropy_N.detach().cpu(), value.item())

    def _logprobs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        plan = PackedAttention(batch.segments, self._policy.device)
        with self._compute_dtype():
            hidden_TD = self._policy.hidden(batch.ids_T, batch.positions_T, plan)
        return token_logprobs(self._policy.head, hidden_TD[batch.row_N], batch.target_N, self._temperature)

    def _compute_dtype(self) -> contextlib.AbstractContextManager[Any]:
        if self._settings.compute_dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self._policy.device.type, dtype=torch.bfloat16)

    def optim_step(self) -> dict[str, Any]:
        """-> grad_norm (before clipping), learning_rate, skipped_steps (so far), and a warning if this one was."""
        with self._cores.unit():
            return self._step()

    def _step(self) -> dict[str, Any]:
        rate = self._learning_rate()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None]).item()
        metrics = {"grad_norm": norm, "learning_rate": rate, "skipped_steps": self._steps_skipped}
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._settings.max_grad_norm, torch.tensor(norm))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        else:
            self._steps_skipped += 1
            metrics |= {
                "skipped_steps": self._steps_skipped,
                "grad_norm": None,
                "warning": f"the gradient is not finite ({norm}): this step was skipped and the weights are unchanged",
            }
        self._steps_taken += 1
        self.discard_gradients()
        return metrics

    def discard_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _learning_rate(self) -> float:
        """Of the coming step: a linear rise over the warm-up, then the schedule down to 0 at `num_steps`."""
        settings, step = self._settings, self._steps_taken
        if step < settings.warmup_steps:
            return settings.learning_rate * (step + 1) / settings.warmup_steps
        remaining = max(1, self._num_steps - settings.warmup_steps)
        progress = min(1.0, (step - settings.warmup_steps) / remaining)
        factor = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }[settings.learning_rate_schedule]
        return settings.learning_rate * factor

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._policy.weights()

    def save(self, folder: Path) -> None:
        state = {
            "weights": dict(self.weights()),
            "optimizer": self._optimizer.state_dict(),
            "steps_taken": self._steps_taken,
            "steps_skipped": self._steps_skipped,
        }
        path = folder / "trainer.pt"
        try:
            torch.save(state, path)
        except RuntimeError as error:  # how torch says that a file can't be written
            raise OSError(errno.EIO, f"could not be written whole, is the disk full? ({error})", str(path)) from None

    def load(self, folder: Path) -> None:
        try:
            state = torch.load(folder / "trainer.pt", map_location=self._policy.device, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise broken(folder, error) from None
        assign_weights(self._policy.model, state["weights"])
        own = self._optimizer.state_dict()  # whose settings are this run's; those that were saved are not taken
        self._optimizer.load_state_dict({**own, "state": state["optimizer"]["state"]})
        self._steps_taken, self._steps_skipped = state["steps_taken"], state["steps_skipped"]
