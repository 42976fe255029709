"""A scenario, played on virtual time: the run dies, is resumed from its newest whole checkpoint, and so on to its end.

Loop, ledger and rules are those of a real run; only the five verbs fail here, and the disk is a list.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway import clock
from headway.simulate.doubles import Doubles, Times
from headway.simulate.engines import ConstantRate
from headway.simulate.faults import Death, Disturbance, Fault, Scenario
from headway.stages import Generated, Lost, Reference, Restored, Scored, Stages, Ticket, Trained
from headway.trace import Event, Trace
from headway.types import Outcome, Receipt, VersionRun

MAX_EVENTS = 20_000
"""A life with more of them goes round in circles: scenarios are small."""


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint: written in which life, after how many of its events, and what stands in it (JSON)."""

    life: int
    num_events: int
    text: str

    @property
    def progress(self) -> dict[str, Any]:
        return json.loads(self.text)["progress"]

    @property
    def restored(self) -> list[Restored]:
        return [_restored(saved) for saved in json.loads(self.text)["rollouts"]]


@dataclass
class Life:
    """From a start or a resume to an end or a death.

    began_from: the checkpoint it resumed (None: it began afresh); died_of: the fault that ended it (None: it came to
    its end); error: what ended it without having been asked to; hit: the faults that took effect; most_in_flight: the
    most rollouts that the engine ever held at once.
    """

    began_from: Saved | None
    events: list[Event] = field(default_factory=list)
    died_of: Fault | None = None
    error: str = ""
    hit: list[Fault] = field(default_factory=list)
    most_in_flight: int = 0


@dataclass
class History:
    """All lives of a run, and every checkpoint that became whole, oldest first."""

    lives: list[Life] = field(default_factory=list)
    disk: list[Saved] = field(default_factory=list)


class Acknowledges(Protocol):
    """The part of a ledger that a late acknowledgement reaches."""

    def report_published(self, version: int) -> None: ...


@dataclass(frozen=True)
class LifeParts:
    """What one life is made of. made: to be called with its ledger."""

    stages: Stages
    trace: Trace
    progress: Mapping[str, Any] | None
    restored: Sequence[Restored]
    made: Callable[[Acknowledges], object]


Live = Callable[[Scenario, LifeParts], Coroutine[Any, Any, object]]
"""Drives one life of a scenario to its end."""


class Died(Exception):
    """A fault has ended the run."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class DiskFull(Died, OSError):
    """What a write to a full disk raises."""


def play(scenario: Scenario, live: Live) -> History:
    """Every life of the scenario's run, until one comes to its end, or breaks in a way that no fault explains."""
    history = History()
    while True:
        newest = history.disk[-1] if history.disk else None
        life = Life(began_from=newest)
        history.lives.append(life)
        _play_life(scenario, live, history, life)
        if life.died_of is None:
            return history


def _play_life(scenario: Scenario, live: Live, history: History, life: Life) -> None:
    number = len(history.lives) - 1

    async def program() -> None:
        stages = FaultyDoubles(scenario, number, life, history.disk)
        trace = Trace(life.events.append, _Killer(scenario.of("kill", number), life))
        saved = life.began_from
        progress, restored = (saved.progress, saved.restored) if saved else (None, ())
        await live(scenario, LifeParts(stages, trace, progress, restored, stages.told_of))

    try:
        clock.run(program(), virtual=True)
    except Died as death:
        life.died_of = death.fault
    except Exception as error:
        silent = [fault for fault in life.hit if fault.kind == "silent engine" and "acknowledged" in str(error)]
        if silent:
            life.died_of = silent[0]
        else:
            life.error = f"{type(error).__name__}: {error}"


class _Killer:
    """A listener that ends the process at the trace event of its number."""

    def __init__(self, kills: Sequence[Fault], life: Life) -> None:
        self._kills, self._life = {int(kill.at): kill for kill in kills}, life

    def __call__(self, event: Event) -> None:
        num_events = len(self._life.events)
        if num_events in self._kills:
            raise Died(self._kills[num_events])
        if num_events >= MAX_EVENTS:
            raise RuntimeError(f"{MAX_EVENTS} events, and no end in sight")


class CrashingEngine(ConstantRate):
    """The lane model, of which rollouts can be lost."""

    def lose(self, key: int) -> None:
        done = self._lanes[key].done
        if not done.done():
            done.set_exception(Lost("its engine crashed"))


class FaultyDoubles(Doubles):
    """The doubles, and what befalls them in one life of a scenario."""

    def __init__(self, scenario: Scenario, number: int, life: Life, disk: list[Saved]) -> None:
        simulated = scenario.config.simulate
        super().__init__(
            scenario.length,
            Times(simulated.train_time, simulated.sync_time, simulated.score_time),
            num_members=scenario.num_members,
            pinned=scenario.config.schedule.in_flight in (None, "pinned"),
            engine=CrashingEngine,
        )
        self._scenario, self._number, self._life, self._disk = scenario, number, life, disk
        self._calls: dict[str, int] = {}
        self._hanging: dict[int, asyncio.Future[None]] = {}
        self._returned: dict[int, Reference] = {}
        self._ledger: Acknowledges | None = None
        self._loop = asyncio.get_running_loop()
        for fault in (*self._of("engine crash"), *self._of("lost rollout")):
            self._loop.call_later(fault.at, self._lose, fault)

    def told_of(self, ledger: Acknowledges) -> None:
        self._ledger = ledger

    def _of(self, kind: Death | Disturbance) -> list[Fault]:
        return self._scenario.of(kind, self._number)

    def _due(self, kind: Death | Disturbance, call: int) -> Fault | None:
        """The fault of this kind that strikes at a verb's call of this number."""
        return self._hit(fault for fault in self._of(kind) if fault.at == call)

    def _now_in(self, kind: Death | Disturbance) -> Fault | None:
        now = self._loop.time()
        return self._hit(fault for fault in self._of(kind) if fault.at <= now < fault.at + fault.for_s)

    def _hit(self, faults: Iterable[Fault]) -> Fault | None:
        fault = next(iter(faults), None)
        if fault is not None and fault not in self._life.hit:
            self._life.hit.append(fault)
        return fault

    def _call(self, verb: str) -> int:
        self._calls[verb] = self._calls.get(verb, 0) + 1
        return self._calls[verb]

    # ---- generate

    async def generate(self, ticket: Ticket) -> Generated:
        hangs = self._due("hung rollout", self._call("generate"))
        num_in_flight = len(self._in_flight) + len(self._hanging) + 1
        self._life.most_in_flight = max(self._life.most_in_flight, num_in_flight)
        if hangs is None:
            generated = await super().generate(ticket)
            self._returned[ticket.index] = generated.ref
            return generated
        hanging = self._hanging[ticket.index] = self._loop.create_future()
        try:
            await hanging
            raise AssertionError("a rollout that hangs only ends by being lost")
        finally:
            del self._hanging[ticket.index]

    def _lose(self, fault: Fault) -> None:
        """The oldest rollout in flight, or all of them."""
        in_flight = sorted([*self._in_flight, *self._hanging])
        assert isinstance(self.engine, CrashingEngine)
        for index in in_flight if fault.kind == "engine crash" else in_flight[:1]:
            self._hit([fault])
            if index not in self._hanging:
                self.engine.lose(index)
            elif not self._hanging[index].done():
                self._hanging[index].set_exception(Lost("its engine crashed"))

    # ---- the other verbs

    async def score(self, ticket: Ticket, rollout: Reference) -> Scored:
        if slow := self._now_in("slow scorer"):
            await asyncio.sleep(slow.for_s)
        failing = self._now_in("failing scorer")
        scored = await super().score(ticket, rollout)
        return Scored(rollout, "grader_timeout", None) if failing else scored

    def grade(self, ticket: Ticket) -> tuple[Outcome, float | None]:
        reward = 0.0 if ticket.evaluation else self._scenario.reward(ticket.group, ticket.member)
        return "grader_error" if reward is None else "scored", reward

    async def train(self, batch: Reference) -> Trained:
        crash = self._due("trainer crash", self._call("train"))
        if crash:
            await asyncio.sleep(self._scenario.config.simulate.train_time / 2)
            raise Died(crash)
        return await super().train(batch)

    async def sync(self, weights: Reference, version: int) -> None:
        call = self._call("sync")
        await super().sync(weights, version)
        silent = self._hit(fault for fault in self._of("silent engine") if fault.at <= call)
        if silent or self._due("lost sync", call):
            await self._loop.create_future()
        again = self._due("duplicated sync", call)
        if again:
            assert self._ledger is not None, "weights were sent before there was a ledger"
            self._loop.call_later(again.for_s, self._ledger.report_published, version)

    async def save(self, progress: Mapping[str, Any], tickets: Sequence[Ticket]) -> None:
        """Read at once, or half-way; whole at the end."""
        num_events = 1 + max(i for i, event in enumerate(self._life.events) if event.kind == "saving")
        account = json.loads(json.dumps(progress))
        rollouts = None if self._scenario.reads_late else self._kept(tickets)
        await asyncio.sleep(self._scenario.save_s / 2)
        full = self._due("full disk", self._call("save"))
        if full:
            raise DiskFull(full)
        rollouts = self._kept(tickets) if rollouts is None else rollouts
        await asyncio.sleep(self._scenario.save_s / 2)
        self._disk.append(Saved(self._number, num_events, json.dumps({"progress": account, "rollouts": rollouts})))

    def _kept(self, tickets: Sequence[Any]) -> list[dict[str, Any]]:
        """Finished rollouts with their score, others as far as they have come; what has no token yet begins again."""
        kept = [_as_data(ticket, self.so_far(ticket)) for ticket in tickets]
        return [rollout for rollout in kept if rollout is not None]

    def so_far(self, ticket: Ticket) -> Reference:
        if ticket.index in self._in_flight:
            return super().so_far(ticket)
        return self._returned.get(ticket.index, ticket.ref)


def _as_data(ticket: Any, ref: Reference) -> dict[str, Any] | None:
    if not ref:
        return None
    finish = ticket.receipt.finish if ticket.receipt and ticket.receipt.version_runs == ref else "interrupted"
    return {
        "group": ticket.group,
        "member": ticket.member,
        "version": ticket.version,
        "runs": [[run.version, run.num_tokens] for run in ref],
        "finish": finish,
        "scored": {"outcome": ticket.outcome, "reward": ticket.reward} if ticket.outcome else None,
    }


def _restored(saved: Mapping[str, Any]) -> Restored:
    runs = tuple(VersionRun(version, num_tokens) for version, num_tokens in saved["runs"])
    scored = saved["scored"]
    return Restored(
        saved["group"],
        saved["member"],
        saved["version"],
        Generated(runs, Receipt(f"prompt {saved['group']}", 0, runs, saved["finish"])),
        Scored(runs, scored["outcome"], scored["reward"]) if scored else None,
    )
