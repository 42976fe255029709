"""Rollouts -> micro-batches: flat rows without padding, a group's prompt only once.

A row is a token that is fed to the model: the prompt's tokens, then each rollout's own tokens but the last, which
nothing follows. (Where a critic asks what would have followed, an answer that was cut off has its last token too.) The
prompt's last row predicts the first token of every rollout of the group; each later token is predicted by the row
before it, of its own rollout. Rollouts see their prompt and themselves, never each other.

Axes: R rollouts of the batch, M the trained tokens of those that are packed, in order; T rows of a micro-batch, N its
trained tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from headway.models.attention import Segment
from headway.models.rows import Rows
from headway.types import Rollout


@dataclass(frozen=True)
class Packed:
    """A micro-batch's rows, and which of the trained tokens M of the batch are its own: `x_M[token_N]` are theirs."""

    rows: Rows
    token_N: torch.Tensor


@dataclass(frozen=True)
class Packing:
    """How a batch is packed.

    micro_batch_tokens: rows of a micro-batch at most; a unit that is longer makes a micro-batch of its own.
    optimizer_steps: parts of a batch. whole_groups: the unit that is never split is the group, not the rollout.
    bootstrap: the row after the last token of a rollout that was cut off is wanted.
    """

    micro_batch_tokens: int
    optimizer_steps: int = 1
    whole_groups: bool = False
    bootstrap: bool = False


def deal(rollouts: Sequence[Rollout], groups: Sequence[int], wanted: Sequence[int], num_parts: int) -> list[list[int]]:
    """The wanted rollouts (numbers, ascending) in at most `num_parts` parts of nearly equal numbers of groups.

    Groups are dealt out in the order of a hash of their identity: in the order of their names, prompts that are named
    alike (and are of one kind, often) would be in one part. A part without a group is left out.
    """
    members = [list(numbers) for _, numbers in groupby(wanted, key=lambda number: groups[number])]
    members.sort(key=lambda numbers: _shuffled_place(rollouts[numbers[0]]))
    parts = [members[first::num_parts] for first in range(num_parts)]
    return [sorted(number for numbers in part for number in numbers) for part in parts if part]


def _shuffled_place(rollout: Rollout) -> bytes:
    return hashlib.blake2b(f"{rollout.epoch} {rollout.prompt.uid}".encode(), digest_size=16).digest()


def pack(
    rollouts: Sequence[Rollout], groups: Sequence[int], wanted: Sequence[int], packing: Packing
) -> list[list[Packed]]:
    """The wanted rollouts (numbers, ascending) as micro-batches, by the optimizer step they are for.

    groups: the group of each of all rollouts, where a group's rollouts are neighbours.
    """
    first_token_of, num_tokens = {}, 0
    for number in wanted:
        first_token_of[number] = num_tokens
        num_tokens += sum(rollouts[number].mask)
    return [
        [
            _pack_one(numbers, rollouts, groups, first_token_of, packing)
            for numbers in _bins(part, rollouts, groups, packing)
        ]
        for part in deal(rollouts, groups, wanted, packing.optimizer_steps)
    ]


def _bins(
    part: Sequence[int], rollouts: Sequence[Rollout], groups: Sequence[int], packing: Packing
) -> Iterator[list[int]]:
    """Consecutive units that fit the budget together, counting each group's prompt once per bin."""
    current: list[int] = []
    rows = 0
    for unit in _units(part, groups, packing):
        prompt_rows = len(rollouts[unit[0]].prompt.tokens)
        own_rows = sum(_num_own_rows(rollouts[number], packing) for number in unit)
        shares_prompt = bool(current) and groups[current[-1]] == groups[unit[0]]
        needed = own_rows + (0 if shares_prompt else prompt_rows)
        if current and rows + needed > packing.micro_batch_tokens:
            yield current
            current, rows, needed = [], 0, own_rows + prompt_rows
        current = [*current, *unit]
        rows += needed
    if current:
        yield current


def _units(part: Sequence[int], groups: Sequence[int], packing: Packing) -> list[list[int]]:
    if not packing.whole_groups:
        return [[number] for number in part]
    return [list(numbers) for _, numbers in groupby(part, key=lambda number: groups[number])]


def _bootstraps(rollout: Rollout, packing: Packing) -> bool:
    return packing.bootstrap and rollout.truncated and bool(rollout.tokens)


def _num_own_rows(rollout: Rollout, packing: Packing) -> int:
    return len(rollout.tokens) if _bootstraps(rollout, packing) else max(0, len(rollout.tokens) - 1)


def _pack_one(
    numbers: Sequence[int],
    rollouts: Sequence[Rollout],
    groups: Sequence[int],
    first_token_of: dict[int, int],
    packing: Packing,
) -> Packed:
    draft = _Draft()
    prompt_start, prompt_group = 0, -1
    for number in numbers:
        rollout = rollouts[number]
        prompt = rollout.prompt.tokens
        if groups[number] != prompt_group:
            prompt_start, prompt_group = draft.append(prompt, first_position=0), groups[number]
        own_tokens = rollout.tokens[: _num_own_rows(rollout, packing)]
        shared = (prompt_start, len(prompt))
        own_start = draft.append(own_tokens, first_position=len(prompt), shared=shared)
        trained = [place for place, is_trained in enumerate(rollout.mask) if is_trained]
        last_prompt_row = prompt_start + len(prompt) - 1
        draft.rows += [own_start + place - 1 if place else last_prompt_row for place in trained]
        draft.targets += [rollout.tokens[place] for place in trained]
        draft.kept += [None if rollout.kept is None else rollout.kept[place] for place in trained]
        draft.tokens += range(first_token_of[number], first_token_of[number] + len(trained))
        if _bootstraps(rollout, packing):
            draft.last_rows.append(own_start + len(own_tokens) - 1)
            draft.last_rollouts.append(number)
    return draft.packed()


@dataclass
class _Draft:
    """A micro-batch while rollouts are still added."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    last_rows: list[int] = field(default_factory=list)
    last_rollouts: list[int] = field(default_factory=list)
    kept: list[Sequence[int] | None] = field(default_factory=list)

    def append(self, ids: Sequence[int], *, first_position: int, shared: tuple[int, int] = (0, 0)) -> int:
        """Add a segment that sees the rows `shared` (start, length) -> its first row."""
        start = len(self.ids)
        if ids:
            self.segments.append(Segment(start, len(ids), *shared))
        self.ids.extend(ids)
        self.positions.extend(range(first_position, first_position + len(ids)))
        return start

    def packed(self) -> Packed:
        rows = Rows(
            ids_T=_indices(self.ids),
            positions_T=_indices(self.positions),
            segments=tuple(self.segments),
            row_N=_indices(self.rows),
            target_N=_indices(self.targets),
            last_row_R=_indices(self.last_rows),
            last_rollout_R=_indices(self.last_rollouts),
            kept=tuple(self.kept) if any(ids is not None for ids in self.kept) else None,
        )
        return Packed(rows, _indices(self.tokens))


def _indices(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long)
