"""Scored rollouts -> a batch: ordered, selected, packed, recorded, credited, with the denominators of all of it.

Axes: R rollouts of the batch; M the trained tokens of those that are packed, in order; P those of one optimizer step; N
those of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from headway.batch import Batch, MicroBatch
from headway.objectives import compose
from headway.objectives.parts import Objective
from headway.objectives.tokens import Tokens
from headway.prepare.credit import Gathered, gather
from headway.prepare.pack import Packed, Packing, pack
from headway.prepare.record import Recorded, record
from headway.stages import Critic, Trainer
from headway.types import Rollout, ScoredRollout


def prepare_batch(
    objective: Objective,
    groups: Sequence[Sequence[ScoredRollout]],
    *,
    version: int,
    micro_batch_tokens: int,
    budget_tokens: int,
    optimizer_steps: int = 1,
    passes: int = 1,
    trainer: Trainer | None = None,
    critic: Critic | None = None,
) -> Batch:
    """A batch, ready to train under weights `version`.

    micro_batch_tokens: rows of a micro-batch at most; budget_tokens: the token budget of a rollout; optimizer_steps:
    parts of the batch, each with an optimizer step of its own in each of `passes` passes. trainer and critic are asked
    only for what the objective needs before the first update.

    Rollouts that are no data are not packed, unless a KL divergence goes into the rewards: then what the scored ones
    are compared with is known only after a forward pass over them.
    """
    gathered = gather(objective, groups, budget_tokens)
    usable_R, baseline_R = gathered.selection.usable_R, gathered.selection.baseline_R
    needed_R = usable_R | baseline_R if objective.reward_kl > 0 else usable_R
    wanted = needed_R.nonzero()[:, 0].tolist()
    packing = Packing(micro_batch_tokens, optimizer_steps, objective.level == "pair", objective.needs_critic)
    parts = pack(gathered.rollouts, gathered.group_R.tolist(), wanted, packing)
    recorded = record(
        objective,
        [one for part in parts for one in part],
        len(gathered.rollouts),
        trainer=trainer,
        critic=critic,
        num_updates=optimizer_steps * passes,
    )
    known, metrics = _known(objective, gathered, _sampled(gathered.rollouts, wanted, version), recorded)
    return _batch(objective, gathered, parts, known, version, gathered.metrics | metrics)


@dataclass(frozen=True)
class _Sampled:
    """What came with each trained token M from where it was sampled."""

    rollout_M: torch.Tensor
    behaviour_M: torch.Tensor
    lag_M: torch.Tensor
    position_M: torch.Tensor


def _sampled(rollouts: Sequence[Rollout], wanted: Sequence[int], version: int) -> _Sampled:
    trained = [
        (number, logprob, version - sampled_by, place)
        for number in wanted
        for place, (logprob, sampled_by, is_trained) in enumerate(
            zip(rollouts[number].logprobs, rollouts[number].versions, rollouts[number].mask, strict=True)
        )
        if is_trained
    ]
    number, logprob, lag, place = zip(*trained, strict=True) if trained else ((), (), (), ())
    return _Sampled(
        torch.tensor(number, dtype=torch.long),
        torch.tensor(logprob, dtype=torch.float32),
        torch.tensor(lag, dtype=torch.long),
        torch.tensor(place, dtype=torch.long),
    )


def _known(
    objective: Objective, gathered: Gathered, sampled: _Sampled, recorded: Recorded
) -> tuple[Tokens, dict[str, Any]]:
    """All that the objective is told of the trained tokens M but the weights of its reductions, and its metrics."""
    rollout_M = sampled.rollout_M
    credit = compose.credit(
        objective,
        gathered.selection,
        gathered.reward_R,
        gathered.group_R,
        rollout_M,
        proximal_M=recorded.proximal_M,
        reference_M=recorded.reference_M,
        value_M=recorded.value_M,
        bootstrap_R=recorded.bootstrap_R,
    )
    tokens = Tokens(
        mask_N=gathered.selection.usable_R[rollout_M],
        rollout_N=rollout_M,
        group_N=gathered.group_R[rollout_M],
        behaviour_N=sampled.behaviour_M,
        lag_N=sampled.lag_M,
        advantage_N=credit.advantage_M.float(),
        weights=(),
        proximal_N=recorded.proximal_M,
        reference_N=recorded.reference_M,
        value_N=recorded.value_M,
        return_N=None if credit.return_M is None else credit.return_M.float(),
        position_N=sampled.position_M,
    )
    return tokens, {**credit.metrics, **_value_metrics(tokens)}


def _batch(
    objective: Objective,
    gathered: Gathered,
    parts: Sequence[Sequence[Packed]],
    known: Tokens,
    version: int,
    metrics: dict[str, Any],
) -> Batch:
    return Batch(
        version=version,
        optimizer_steps=[_optimizer_step(objective, gathered, part, known) for part in parts],
        rollouts=gathered.rollouts,
        rewards=gathered.rewards,
        metrics={
            **metrics,
            "trained_tokens": int(known.mask_N.sum()),
            "micro_batches": sum(map(len, parts)),
            "packed_rows": sum(len(one.rows.ids_T) for part in parts for one in part),
        },
    )


def _optimizer_step(
    objective: Objective, gathered: Gathered, part: Sequence[Packed], known: Tokens
) -> list[MicroBatch]:
    """The denominators are those of the whole optimizer step, known before its first backward: no split changes it."""
    token_P = torch.cat([one.token_N for one in part])
    weights = compose.token_weights(
        objective, known.mask_N[token_P], known.rollout_N[token_P], gathered.group_R, gathered.selection.usable_R
    )
    sizes = [len(one.token_N) for one in part]
    of_each = zip(*(weight_P.split(sizes) for weight_P in weights), strict=True)
    tokens = [
        replace(_slice(known, one.token_N), weights=weights_N) for one, weights_N in zip(part, of_each, strict=True)
    ]
    normaliser = compose.normaliser(objective, tokens)
    return [
        MicroBatch(one.rows, replace(its_own, normaliser=normaliser)) for one, its_own in zip(part, tokens, strict=True)
    ]


def _slice(known: Tokens, token_N: torch.Tensor) -> Tokens:
    columns: dict[str, Any] = {field.name: getattr(known, field.name) for field in fields(known)}
    return replace(known, **{name: x[token_N] for name, x in columns.items() if isinstance(x, torch.Tensor)})


def _value_metrics(known: Tokens) -> dict[str, float]:
    """How well the critic knew what was coming: 1 - var(return - value) / var(return); left out where that is 0 / 0."""
    if known.value_N is None or known.return_N is None or not known.mask_N.any():
        return {}
    value_N, return_N = known.value_N[known.mask_N].double(), known.return_N[known.mask_N].double()
    metrics = {"value_mean": value_N.mean().item(), "return_mean": return_N.mean().item()}
    if variance := return_N.var(correction=0).item():
        metrics["value_explained_variance"] = 1 - (return_N - value_N).var(correction=0).item() / variance
    return metrics
