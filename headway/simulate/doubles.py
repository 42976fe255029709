"""Doubles of the five verbs: each takes its time and passes on what it was given."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headway.simulate.workload import Lengths
from headway.stages import Generated, Reference, Scored, Ticket, Trained
from headway.types import Receipt, VersionRun


@dataclass(frozen=True)
class Times:
    """How long each verb takes, in the units of the lengths."""

    train: float
    sync: float = 0.0
    score: float = 0.0


class Doubles:
    """The lane model: a rollout of length n holds its lane for n units of time, whatever the other lanes do.

    in_flight: "pinned" (a rollout keeps the weights it began with) or "keep" (new weights take hold at once; the
    rollout's receipt says how much of it each version sampled).
    """

    def __init__(self, lengths: Lengths, times: Times, in_flight: Literal["pinned", "keep"] = "pinned") -> None:
        self._lengths, self._times, self._in_flight = lengths, times, in_flight
        self._published_at: list[tuple[float, int]] = []

    async def generate(self, ticket: Ticket) -> Generated:
        length = self._lengths(abs(ticket.index))
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(length)
        runs = self._version_runs(ticket.version, began, length)
        return Generated(ticket.index, Receipt(f"prompt {ticket.group}", 0, runs, "stop"))

    def _version_runs(self, version: int, began: float, length: float) -> tuple[VersionRun, ...]:
        if self._in_flight == "pinned":
            return (VersionRun(version, length),)
        first = bisect_right(self._published_at, (began, version))
        swaps = [(at, new) for at, new in self._published_at[first:] if at < began + length]
        starts = [(began, version), *swaps]
        ends = [at for at, _ in swaps] + [began + length]
        return tuple(VersionRun(new, end - at) for (at, new), end in zip(starts, ends, strict=True) if end > at)

    async def score(self, ticket: Ticket, rollout: Reference) -> Scored:
        if self._times.score:
            await asyncio.sleep(self._times.score)
        return Scored(rollout, "scored", None if not ticket.evaluation else 0.0)

    async def prepare(self, groups: Sequence[Sequence[Reference]], version: int) -> Reference:
        return groups

    async def train(self, batch: Reference) -> Trained:
        await asyncio.sleep(self._times.train)
        return Trained(weights=None)

    async def sync(self, weights: Reference, version: int) -> None:
        if self._times.sync:
            await asyncio.sleep(self._times.sync)
        self._published_at.append((asyncio.get_running_loop().time(), version))

    async def save(self, progress: Mapping[str, Any]) -> None:
        pass
