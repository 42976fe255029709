"""One train step over any trainer: gradients of all micro-batches under global denominators, then one optimizer step.

The step is blind to algorithms: the objective gives the loss of a micro-batch from log-probs, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headway.models.batch import Batch, MicroBatch
from headway.objectives import compose
from headway.objectives.diagnostics import MismatchDiagnostics
from headway.objectives.named import Objective
from headway.stages import Trainer


@dataclass(frozen=True)
class StepResult:
    """metrics: figures of the step by name; log_ratios: log pi - log mu per trained token, by rollout."""

    metrics: dict[str, Any]
    log_ratios: list[list[float]]


def train_step(trainer: Trainer, objective: Objective, batch: Batch) -> StepResult:
    """Train `batch` once. A batch without a trained token leaves weights and optimizer as they are, and says so."""
    if batch.num_tokens == 0:
        warning = "no token of this batch may be trained: the step was skipped and the weights are unchanged"
        return StepResult({**batch.metrics, "warning": warning}, [[] for _ in batch.rollouts])
    diagnostics = MismatchDiagnostics(cap=objective.weight_cap if objective.weight == "truncated" else None)
    log_ratios: list[list[float]] = [[] for _ in batch.rollouts]
    total_loss = 0.0
    for micro in batch.micro_batches:
        if not len(micro.target_N):
            continue
        result = trainer.forward_backward(micro, lambda logp_N, micro: micro_batch_loss(objective, logp_N, micro))
        total_loss += result.loss or 0.0
        diagnostics.add(
            result.logp_N,
            micro.behaviour_N,
            torch.ones_like(micro.target_N, dtype=torch.bool),
            micro.lag_N,
            micro.position_N,
            micro.advantage_N,
            result.entropy_N,
        )
        log_ratio_N = (result.logp_N - micro.behaviour_N).tolist()
        for rollout, log_ratio in zip(micro.rollout_N.tolist(), log_ratio_N, strict=True):
            log_ratios[rollout].append(log_ratio)
    step = trainer.optim_step()
    return StepResult({**batch.metrics, "loss": total_loss, **step, **diagnostics.result()}, log_ratios)


def micro_batch_loss(objective: Objective, logp_N: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """The micro-batch's part of the batch's loss. With one optimizer step per batch, pi_prox is the current policy."""
    mask_N = torch.ones_like(micro.target_N, dtype=torch.bool)
    loss, _ = compose.loss(objective, logp_N, micro.behaviour_N, None, micro.advantage_N, mask_N, micro.weight_N)
    return loss
