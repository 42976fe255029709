"""Stages that play a `Case`: plain ones, and awkward ones whose results take the long way round at the same instant."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway import clock
from headway.schedule import loop
from headway.schedule.bound import lag_bound
from headway.schedule.ledger import Ledger, Settings
from headway.schedule.pass_rates import PassRates
from headway.schedule.policy import Rules
from headway.stages import Generated, Restored, Scored, Ticket, Trained
from headway.trace import Event, Trace
from headway.types import Receipt, VersionRun
from tests.schedule.reference_simulator import Case, History


@dataclass(frozen=True)
class Sampled:
    """A rollout, as these stages pass it on: whose it is, and a run for each time it held a lane."""

    group: int
    member: int
    runs: tuple[VersionRun, ...]


@dataclass
class _Flight:
    """version, before: of its ticket; ended: set with what was sampled of `wanted` in this stretch."""

    version: int
    before: tuple[VersionRun, ...]
    began_s: float
    ended: asyncio.Future[float]


class Plain:
    """Each verb is one wait. `saved` are the accounts it was given to keep, as they would be read back; `kept` the
    rollouts that were saved with each."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.saved: list[dict[str, Any]] = []
        self.kept: list[list[Restored]] = []
        self.in_flight: dict[int, _Flight] = {}
        self.num_cancelled = 0

    async def wait(self, duration: float) -> None:
        if duration:
            await asyncio.sleep(duration)

    async def generate(self, ticket: Ticket) -> Generated:
        before: tuple[VersionRun, ...] = ticket.ref.runs if ticket.ref else ()
        left = self.case.length(ticket.group, ticket.member)
        for run in before:
            left -= run.num_tokens
        wanted = left if ticket.max_tokens is None else min(left, ticket.max_tokens)
        loop_ = asyncio.get_running_loop()
        flight = self.in_flight[ticket.index] = _Flight(ticket.version, before, loop_.time(), loop_.create_future())
        try:
            sampled = await self.sample(flight, wanted)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            del self.in_flight[ticket.index]
        return self.generated(ticket, flight, sampled, whole=sampled == left)

    def generated(self, ticket: Ticket, flight: _Flight, sampled: float, *, whole: bool) -> Generated:
        runs = (*flight.before, VersionRun(flight.version, sampled)) if sampled else flight.before
        receipt = Receipt(f"prompt {ticket.group}", 0, runs, "stop" if whole else "interrupted")
        return Generated(Sampled(ticket.group, ticket.member, runs), receipt)

    async def sample(self, flight: _Flight, wanted: float) -> float:
        """Until so much is there, or `stop`."""
        timer = asyncio.get_running_loop().call_later(wanted, _resolve, flight.ended, wanted)
        try:
            return await flight.ended
        finally:
            timer.cancel()

    def stop(self, ticket: Ticket) -> None:
        if flight := self.in_flight.get(ticket.index):
            _resolve(flight.ended, asyncio.get_running_loop().time() - flight.began_s)

    async def score(self, ticket: Ticket, rollout: Sampled) -> Scored:
        assert (rollout.group, rollout.member) == (ticket.group, ticket.member)
        await self.wait(self.case.score_time(ticket.group, ticket.member))
        if ticket.evaluation:
            return Scored(rollout, "scored", float(ticket.group % 2))
        if self.case.is_scored(ticket.group, ticket.member):
            return Scored(rollout, "scored", self.case.reward(ticket.group, ticket.member))
        return Scored(rollout, "grader_error", None)

    async def prepare(self, groups, version):
        return groups

    async def train(self, batch) -> Trained:
        await self.wait(self.case.train_time)
        return Trained("weights", {"rollouts": sum(map(len, batch))})

    async def sync(self, weights, version) -> None:
        assert weights == "weights"
        await self.wait(self.case.sync_time)

    async def save(self, progress: Mapping[str, Any], tickets: Sequence[Any]) -> None:
        self.saved.append(json.loads(json.dumps(progress)))
        self.kept.append([restored for ticket in tickets if (restored := self.restored(ticket))])

    def restored(self, ticket: Any) -> Restored | None:
        """The rollout as a checkpoint holds it: with its score, or as far as it has come; None: nothing is there."""
        identity = ticket.group, ticket.member, ticket.version
        if ticket.outcome is not None:
            generated = Generated(ticket.ref, ticket.receipt)
            return Restored(*identity, generated, Scored(ticket.ref, ticket.outcome, ticket.reward))
        if flight := self.in_flight.get(ticket.index):
            so_far = asyncio.get_running_loop().time() - flight.began_s
            return Restored(*identity, self.generated(ticket, flight, so_far, whole=False))
        return Restored(*identity, Generated(ticket.ref, ticket.receipt)) if ticket.ref else None

    async def close(self) -> None: ...


def _resolve(ended: asyncio.Future[float], sampled: float) -> None:
    if not ended.done():
        ended.set_result(sampled)


class Awkward(Plain):
    """The same times through queues, a driver task, semaphores, gathers, task groups and random extra hops."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.pick = random.Random(case.seed)
        self.requests: asyncio.Queue[tuple[float, asyncio.Future, float]] = asyncio.Queue()
        self.gate = asyncio.Semaphore(2)
        self.driver: asyncio.Task | None = None

    async def hops(self) -> None:
        for _ in range(self.pick.randrange(6)):
            await asyncio.sleep(0)

    async def wait(self, duration: float) -> None:
        if duration:
            await self.after(duration, asyncio.get_running_loop().create_future())
        await self.the_long_way_round()

    async def sample(self, flight: _Flight, wanted: float) -> float:
        sampled = await self.after(wanted, flight.ended)
        await self.the_long_way_round()
        return sampled

    async def after(self, duration: float, ended: asyncio.Future[float]) -> float:
        """-> the duration, or what `ended` was set to before."""
        if self.driver is None:
            self.driver = asyncio.create_task(self.drive(), name="driver")
        self.requests.put_nowait((duration, ended, asyncio.get_running_loop().time()))
        return await ended

    async def the_long_way_round(self) -> None:
        answers: asyncio.Queue[None] = asyncio.Queue(1)
        await asyncio.gather(self.pass_through_the_gate(), self.pass_through_the_gate())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answers.get())
            tasks.create_task(answers.put(None))
        await self.hops()

    async def pass_through_the_gate(self) -> None:
        async with self.gate:
            await self.hops()

    async def drive(self) -> None:
        running = asyncio.get_running_loop()
        while True:
            duration, ended, asked_s = await self.requests.get()
            assert running.time() == asked_s, "the driver is late"
            running.call_later(duration, _resolve, ended, duration)

    async def prepare(self, groups, version):
        await self.hops()
        return groups

    async def close(self) -> None:
        if self.driver:
            self.driver.cancel()
            await asyncio.wait([self.driver])


@dataclass
class Played:
    """A run that is over: its events and its ledger, and whatever else `play` saw."""

    events: list[Event]
    ledger: Ledger
    ended_s: float

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    @property
    def trained_groups(self) -> list[int]:
        return [group for event in self.of("taken") for group in event["groups"]]

    @property
    def lags(self) -> list[int]:
        """Of every trained rollout."""
        return [lag for event in self.of("taken") for lag in event["lags"]]


def settings_of(case: Case, **more: Any) -> Settings:
    return Settings(
        lanes=case.lanes,
        batch_size=case.group_size * case.groups_per_batch,
        group_size=case.group_size,
        steps=case.steps,
        num_groups=case.num_groups,
        redundant=case.redundant,
        keep_redundant=case.keep_redundant,
        iteration_tokens=case.iteration_tokens,
        **more,
    )


def rules_of(case: Case, **more: Any) -> Rules:
    return Rules(
        case.run_ahead,
        order=case.order,
        window=case.window,
        max_lag=case.max_lag,
        stragglers=case.stragglers,
        max_restarts=case.max_restarts,
        in_flight=case.in_flight,
        overlap=case.overlap,
        dynamic_sampling=case.dynamic_sampling,
        deadline_s=case.deadline,
        **more,
    )


def play(
    case: Case,
    stages: Plain | None = None,
    *,
    progress: Mapping[str, Any] | None = None,
    restored: Iterable[Restored] = (),
    pass_rates: PassRates | None = None,
    rules: Rules | None = None,
    **more: Any,
) -> Played:
    """Run the real loop on virtual time to its end, holding its bound. No task may be left behind."""
    stages = stages or Plain(case)
    rules = rules or rules_of(case)
    events: list[Event] = []

    async def program() -> Played:
        bell, time = clock.Bell(), asyncio.get_running_loop().time
        ledger = Ledger(
            settings_of(case, **more),
            now=time,
            changed=bell.ring,
            trace=Trace(events.append),
            progress=progress,
            restored=restored,
            pass_rates=pass_rates,
            lag_bound=lag_bound(rules_of(case), case.groups_per_batch).lag,
        )
        try:
            await loop.run(stages, ledger, rules, bell)
        finally:
            await stages.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task outlived its run"
        return Played(events, ledger, time())

    return clock.run(program(), virtual=True)


def history_of(played: Played) -> History:
    """What the trace says, in the words of the reference simulator; up to the last version."""
    events, steps = played.events, played.ledger.settings.steps
    last = next((n for n, event in enumerate(events) if event.kind == "published" and event["version"] == steps), None)
    events = events if last is None else events[: last + 1]
    of = {kind: [event for event in events if event.kind == kind] for kind in {event.kind for event in events}}

    def handed_over(kind):
        names = ("rollout", "group", "member", "lane", "version")
        return [(e.at_s, *(e[name] for name in names)) for e in of.get(kind, ()) if not e["evaluation"]]

    return History(
        starts=handed_over("started"),
        resumes=handed_over("resumed"),
        batches=[(event.at_s, event["rollouts"], event["lags"]) for event in of.get("taken", ())],
        released=[(e.at_s, e.kind, e["group"]) for e in events if e.kind in ("failed", "dropped", "filtered")],
        published=[event.at_s for event in of.get("published", ())],
        pauses=[(event.at_s, event["rollout"], event["tokens"]) for event in of.get("paused", ())],
        aborts=[(event.at_s, event["rollout"], event["lane"]) for event in of.get("aborted", ())],
        ends=[(e.at_s, e["rollout"], e["tokens"]) for e in of.get("generated", ()) if e["rollout"] >= 0],
    ).sorted()
