"""The forward passes whose results the objective needs before the first update, and no others.

Axes: M trained tokens of the packed rollouts of a batch, R all its rollouts; N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.objectives.parts import Objective
from headway.prepare.pack import Packed
from headway.stages import Critic, Trainer


@dataclass(frozen=True)
class Recorded:
    """None stands for what the objective does not need.

    proximal_M, reference_M: log-probs under the weights before the train step, and under the frozen reference. value_M:
    the critic's value of the state before each token; bootstrap_R: of the state in which a rollout was cut off, 0 for
    those that were not. On the CPU, float32.
    """

    proximal_M: torch.Tensor | None = None
    reference_M: torch.Tensor | None = None
    value_M: torch.Tensor | None = None
    bootstrap_R: torch.Tensor | None = None


def record(
    objective: Objective,
    packs: Sequence[Packed],
    num_rollouts: int,
    *,
    trainer: Trainer | None,
    critic: Critic | None,
    num_updates: int,
) -> Recorded:
    """Run what is needed, micro-batch by micro-batch. num_updates: optimizer steps that the train step will take."""
    proximal_M = reference_M = value_M = bootstrap_R = None
    packs = [pack for pack in packs if len(pack.token_N)]
    if objective.needs_proximal(num_updates):
        assert trainer is not None, f"{objective.name} needs log-probs before the update, and there is no trainer"
        proximal_M = _by_token(packs, [trainer.forward(pack.rows).logp_N for pack in packs])
    if objective.needs_reference:
        assert trainer is not None, f"{objective.name} needs log-probs of a reference, and there is no trainer"
        reference_M = _by_token(packs, [trainer.forward(pack.rows, reference=True).logp_N for pack in packs])
    if objective.needs_critic:
        assert critic is not None, f"{objective.name} needs values, and there is no critic"
        values = [critic.forward(pack.rows) for pack in packs]
        value_M = _by_token(packs, [value.value_N for value in values])
        bootstrap_R = torch.zeros(num_rollouts)
        for pack, value in zip(packs, values, strict=True):
            bootstrap_R[pack.rows.last_rollout_R] = value.bootstrap_R
    return Recorded(proximal_M, reference_M, value_M, bootstrap_R)


def _by_token(packs: Sequence[Packed], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    value_M = torch.zeros(sum(len(pack.token_N) for pack in packs))
    for pack, part_N in zip(packs, parts, strict=True):
        value_M[pack.token_N] = part_N
    return value_M
