"""Doubles of the five verbs: each takes its time and passes on what it was given."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.simulate.contention import Contention
from headway.simulate.engines import ConstantRate, Engine
from headway.simulate.workload import Lengths
from headway.stages import Generated, Reference, Scored, Ticket, Trained
from headway.types import Outcome, Receipt, VersionRun

OfVersion = float | Callable[[int], float]
"""A time, or what gives the time of a version."""


@dataclass(frozen=True)
class Times:
    """How long each verb takes: in seconds, or in the units of the lengths.

    train: of the version that a step begins from; sync, save: of the version that is sent or saved; score: of a ticket.
    """

    train: OfVersion
    sync: OfVersion = 0.0
    score: float | Callable[[Ticket], float] = 0.0
    save: OfVersion = 0.0


@dataclass
class _InFlight:
    """A rollout that is being sampled. before: its runs from earlier stretches; swaps: (tokens of this stretch, new
    version) at every update since it began."""

    version: int
    before: tuple[VersionRun, ...]
    swaps: list[tuple[float, int]] = field(default_factory=list)

    @property
    def newest(self) -> int:
        return self.swaps[-1][1] if self.swaps else self.version


class Doubles:
    """Implements `headway.stages.Stages`; a rollout's reference is its version runs, which are all there is of it.

    lengths: of a rollout by its identity, group x num_members + member, so that one that begins again is as long as
    before; longest: a rollout that comes to it ends there, with finish "length"; engine: made on the running loop;
    pinned: a rollout keeps the weights it began with, else new ones take hold at once, and with recompute its cache is
    computed again. contention: with the engine, where the trainer shares its machine.
    """

    def __init__(
        self,
        lengths: Lengths,
        times: Times,
        *,
        num_members: int = 1,
        longest: float = math.inf,
        pinned: bool = True,
        recompute: bool = False,
        engine: Callable[[], Engine] = ConstantRate,
        contention: Contention | None = None,
    ) -> None:
        self._contention = contention
        self._lengths, self._times = lengths, times
        self._num_members, self._longest = num_members, longest
        self._pinned, self._recompute = pinned, recompute
        self._make_engine = engine
        self._engine: Engine | None = None
        self._in_flight: dict[int, _InFlight] = {}

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    def length(self, ticket: Ticket) -> float:
        """Of the ticket's whole rollout, were it not for `longest`."""
        return self._lengths(ticket.group if ticket.evaluation else ticket.group * self._num_members + ticket.member)

    async def generate(self, ticket: Ticket) -> Generated:
        whole = self.length(ticket)
        length = min(whole, self._longest)
        before: tuple[VersionRun, ...] = ticket.ref or ()
        done = sum(run.num_tokens for run in before)
        wanted = length - done if ticket.max_tokens is None else min(length - done, ticket.max_tokens)
        flight = self._in_flight[ticket.index] = _InFlight(ticket.version, before)
        try:
            sampled = await self.engine.decode(ticket.index, wanted, done) if wanted > 0 else 0.0
        finally:
            del self._in_flight[ticket.index]
        finish = "interrupted" if sampled < length - done else "stop" if length == whole else "length"
        runs = _joined(before, _runs(flight, sampled))
        return Generated(runs, Receipt(f"prompt {ticket.group}", 0, runs, finish))

    def so_far(self, ticket: Ticket) -> Reference:
        """What there is of a rollout at this moment; None where nothing of it has been returned."""
        flight = self._in_flight.get(ticket.index)
        return _joined(flight.before, _runs(flight, self.engine.sampled(ticket.index))) if flight else ticket.ref

    def stop(self, ticket: Ticket) -> None:
        if ticket.index in self._in_flight:
            self.engine.stop(ticket.index)

    def grade(self, ticket: Ticket) -> tuple[Outcome, float | None]:
        """The outcome and the reward of a rollout that has ended."""
        return "scored", 0.0 if ticket.evaluation else None

    async def score(self, ticket: Ticket, rollout: Reference) -> Scored:
        if score_s := _time(self._times.score, ticket):
            await asyncio.sleep(score_s)
        return Scored(rollout, *self.grade(ticket))

    async def prepare(self, groups: Sequence[Sequence[Reference]], version: int) -> Reference:
        """The version it is trained under: all that `train` asks of a batch."""
        return version

    async def train(self, batch: Reference) -> Trained:
        train_s = _time(self._times.train, batch)
        await (self._contention.train(train_s) if self._contention else asyncio.sleep(train_s))
        return Trained(weights=None)

    async def sync(self, weights: Reference, version: int) -> None:
        if sync_s := _time(self._times.sync, version):
            await asyncio.sleep(sync_s)
        if not self._pinned:
            for index, flight in self._in_flight.items():
                if flight.newest < version:  # weights that are sent again change nothing
                    flight.swaps.append((self.engine.sampled(index), version))
        if self._recompute:
            self.engine.recompute()

    async def save(self, progress: Mapping[str, Any], tickets: Sequence[Ticket]) -> None:
        if save_s := _time(self._times.save, progress["version"]):
            await asyncio.sleep(save_s)


def _time(time: float | Callable[[Any], float], what: Any) -> float:
    return time(what) if callable(time) else time


def _runs(flight: _InFlight, sampled: float) -> tuple[VersionRun, ...]:
    """The runs of this stretch, in which so much was sampled."""
    starts = [(0.0, flight.version), *flight.swaps]
    ends = [at for at, _ in flight.swaps] + [sampled]
    return tuple(VersionRun(version, end - at) for (at, version), end in zip(starts, ends, strict=True) if end > at)


def _joined(before: tuple[VersionRun, ...], after: tuple[VersionRun, ...]) -> tuple[VersionRun, ...]:
    """Two neighbouring runs of one version are one."""
    if before and after and before[-1].version == after[0].version:
        both = VersionRun(after[0].version, before[-1].num_tokens + after[0].num_tokens)
        return (*before[:-1], both, *after[1:])
    return before + after
