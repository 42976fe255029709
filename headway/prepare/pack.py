"""Rollouts -> micro-batches: flat rows without padding, a group's prompt only once.

A row is a token that is fed to the model: the prompt's tokens, then each rollout's own tokens but the last, which
nothing follows. The prompt's last row predicts the first token of every rollout of the group; each later token is
predicted by the row before it, of its own rollout. Rollouts see their prompt and themselves, never each other.

Axes: T rows of a micro-batch, N its trained tokens, R rollouts of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from headway.models.attention import Segment
from headway.models.batch import Batch, MicroBatch
from headway.objectives import compose
from headway.objectives.named import Objective
from headway.prepare.credit import Credit
from headway.types import Rollout


def pack(credit: Credit, objective: Objective, *, version: int, micro_batch_tokens: int) -> Batch:
    """A batch with its global denominators, split into micro-batches of at most `micro_batch_tokens` rows.

    version: the weights it will be trained under. A single rollout that is longer than the budget makes a micro-batch
    of its own.
    """
    rollouts = [scored.rollout for scored in credit.rollouts]
    rollout_M = torch.tensor(
        [number for number, rollout in enumerate(rollouts) for _ in rollout.tokens], dtype=torch.long
    )
    mask_M = torch.tensor([trained for rollout in rollouts for trained in rollout.mask], dtype=torch.bool)
    totals = compose.token_weights(objective, mask_M, rollout_M, credit.group_R, credit.advantages.usable_R)
    weights_of = totals.weight_N.split([len(rollout.tokens) for rollout in rollouts])
    micro_batches = [
        _micro_batch(bin_, rollouts, credit, weights_of, version)
        for bin_ in _bins(rollouts, credit.group_R.tolist(), micro_batch_tokens)
    ]
    metrics = {
        **credit.metrics,
        "trained_tokens": totals.num_tokens,
        "micro_batches": len(micro_batches),
        "packed_rows": sum(len(micro.ids_T) for micro in micro_batches),
    }
    rewards = [scored.score.reward or 0.0 for scored in credit.rollouts]
    return Batch(
        version=version,
        micro_batches=micro_batches,
        rollouts=rollouts,
        rewards=rewards,
        num_tokens=totals.num_tokens,
        num_rollouts=totals.num_rollouts,
        num_groups=totals.num_groups,
        metrics=metrics,
    )


def _bins(rollouts: Sequence[Rollout], groups: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Consecutive rollouts that fit the budget together, counting each group's prompt once per bin."""
    current: list[int] = []
    rows = 0
    for number, rollout in enumerate(rollouts):
        prompt_rows = len(rollout.prompt.tokens)
        own_rows = max(0, len(rollout.tokens) - 1)
        shares_prompt = bool(current) and groups[current[-1]] == groups[number]
        needed = own_rows + (0 if shares_prompt else prompt_rows)
        if current and rows + needed > budget:
            yield current
            current, rows, needed = [], 0, own_rows + prompt_rows
        current.append(number)
        rows += needed
    if current:
        yield current


def _micro_batch(
    bin_: Sequence[int], rollouts: Sequence[Rollout], credit: Credit, weights_of: Sequence[torch.Tensor], version: int
) -> MicroBatch:
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    columns: list[tuple[int, int, float, float, int, int, int]] = []
    weights: list[torch.Tensor] = []
    prompt_start, prompt_group = 0, -1
    for number in bin_:
        rollout, group = rollouts[number], int(credit.group_R[number])
        prompt = rollout.prompt.tokens
        if group != prompt_group:
            prompt_start, prompt_group = len(ids), group
            segments.append(Segment(len(ids), len(prompt)))
            ids.extend(prompt)
            positions.extend(range(len(prompt)))
        own_start = len(ids)
        if len(rollout.tokens) > 1:
            segments.append(Segment(own_start, len(rollout.tokens) - 1, prompt_start, len(prompt)))
        ids.extend(rollout.tokens[:-1])
        positions.extend(range(len(prompt), len(prompt) + len(rollout.tokens) - 1))
        trained = [place for place, is_trained in enumerate(rollout.mask) if is_trained]
        last_prompt_row = prompt_start + len(prompt) - 1
        advantage = float(credit.advantages.advantage_R[number])
        columns.extend(
            (
                own_start + place - 1 if place else last_prompt_row,
                rollout.tokens[place],
                rollout.logprobs[place],
                advantage,
                version - rollout.versions[place],
                place,
                number,
            )
            for place in trained
        )
        weights.append(weights_of[number][trained])
    row, target, behaviour, advantages, lag, place, owner = zip(*columns, strict=True) if columns else ((),) * 7
    return MicroBatch(
        ids_T=torch.tensor(ids),
        positions_T=torch.tensor(positions),
        segments=tuple(segments),
        row_N=torch.tensor(row, dtype=torch.long),
        target_N=torch.tensor(target, dtype=torch.long),
        behaviour_N=torch.tensor(behaviour, dtype=torch.float32),
        advantage_N=torch.tensor(advantages, dtype=torch.float32),
        weight_N=torch.cat(weights),
        lag_N=torch.tensor(lag, dtype=torch.long),
        position_N=torch.tensor(place, dtype=torch.long),
        rollout_N=torch.tensor(owner, dtype=torch.long),
    )
