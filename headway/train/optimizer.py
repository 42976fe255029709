"""One optimizer over some parameters: Adam, a learning rate with a schedule, clipping, and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from headway.config import Train


class Optimizer:
    """Of a policy or of a critic. parameters: float32, those that require no gradient are left alone.

    settings: of Adam, the schedule and clipping; learning_rate: instead of the one in `settings`; num_steps: the length
    of the schedule, in optimizer steps. adam, steps_taken, steps_skipped: what a checkpoint keeps.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        settings: Train,
        *,
        num_steps: int,
        learning_rate: float | None = None,
    ) -> None:
        peak = settings.learning_rate if learning_rate is None else learning_rate
        assert peak is not None, "a configuration that was read as a whole names its learning rate"
        self._peak, self._settings, self._num_steps = peak, settings, num_steps
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.adam = torch.optim.AdamW(
            self._parameters,
            lr=peak,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.steps_taken = self.steps_skipped = 0

    def step(self) -> dict[str, Any]:
        """-> grad_norm (before clipping), learning_rate, skipped_steps (so far), and a warning if this one was."""
        rate = self._learning_rate()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None]).item()
        metrics = {"grad_norm": norm, "learning_rate": rate, "skipped_steps": self.steps_skipped}
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._settings.max_grad_norm, torch.tensor(norm))
            for group in self.adam.param_groups:
                group["lr"] = rate
            self.adam.step()
        else:
            self.steps_skipped += 1
            metrics |= {
                "skipped_steps": self.steps_skipped,
                "grad_norm": None,
                "warning": f"the gradient is not finite ({norm}): this step was skipped and the weights are unchanged",
            }
        self.steps_taken += 1
        self.adam.zero_grad()
        return metrics

    def _learning_rate(self) -> float:
        """Of the coming step: a linear rise over the warm-up, then the schedule down to 0 at `num_steps`."""
        settings, step = self._settings, self.steps_taken
        if step < settings.warmup_steps:
            return self._peak * (step + 1) / settings.warmup_steps
        remaining = max(1, self._num_steps - settings.warmup_steps)
        progress = min(1.0, (step - settings.warmup_steps) / remaining)
        factor = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }[settings.learning_rate_schedule]
        return self._peak * factor

    def state(self) -> dict[str, Any]:
        """What a resume needs beside the weights."""
        return {
            "optimizer": self.adam.state_dict(),
            "steps_taken": self.steps_taken,
            "steps_skipped": self.steps_skipped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over moments and counts; the settings are this run's, not those that were saved."""
        own = self.adam.state_dict()
        self.adam.load_state_dict({**own, "state": state["optimizer"]["state"]})
        self.steps_taken, self.steps_skipped = state["steps_taken"], state["steps_skipped"]
