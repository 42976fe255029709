"""Stages that play a `Case`: plain ones, and awkward ones whose results take the long way round at the same instant."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway import clock
from headway.schedule import loop
from headway.schedule.ledger import Ledger, Settings
from headway.schedule.pass_rates import PassRates
from headway.schedule.policy import Rules
from headway.stages import Generated, Scored, Trained
from headway.trace import Event, Trace
from headway.types import Receipt, VersionRun
from tests.schedule.reference_simulator import Case, History


class Plain:
    """Each verb is one sleep. `saved` are the accounts it was given to keep, as they would be read back."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.saved: list[dict[str, Any]] = []
        self.num_cancelled = 0

    async def wait(self, duration: float) -> None:
        if duration:
            await asyncio.sleep(duration)

    async def generate(self, ticket) -> Generated:
        length = self.case.length(abs(ticket.index))
        try:
            await self.wait(length)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return Generated(
            ticket.index, Receipt(f"prompt {ticket.group}", 0, (VersionRun(ticket.version, length),), "stop")
        )

    async def score(self, ticket, rollout) -> Scored:
        assert rollout == ticket.index
        await self.wait(self.case.score_time(abs(ticket.index)))
        if ticket.evaluation:
            return Scored(rollout, "scored", float(ticket.group % 2))
        scored = self.case.is_scored(ticket.group, ticket.member)
        return Scored(rollout, "scored", 1.0) if scored else Scored(rollout, "grader_error", None)

    async def prepare(self, groups, version):
        return groups

    async def train(self, batch) -> Trained:
        await self.wait(self.case.train_time)
        return Trained("weights", {"rollouts": sum(map(len, batch))})

    async def sync(self, weights, version) -> None:
        assert weights == "weights"
        await self.wait(self.case.sync_time)

    async def save(self, progress: Mapping[str, Any]) -> None:
        self.saved.append(json.loads(json.dumps(progress)))

    async def close(self) -> None: ...


class Awkward(Plain):
    """The same times through queues, a driver task, semaphores, gathers, task groups and random extra hops."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.pick = random.Random(case.seed)
        self.requests: asyncio.Queue[tuple[float, asyncio.Future]] = asyncio.Queue()
        self.gate = asyncio.Semaphore(2)
        self.driver: asyncio.Task | None = None

    async def hops(self) -> None:
        for _ in range(self.pick.randrange(6)):
            await asyncio.sleep(0)

    async def wait(self, duration: float) -> None:
        if self.driver is None:
            self.driver = asyncio.create_task(self.drive(), name="driver")
        answers: asyncio.Queue[None] = asyncio.Queue(1)
        if duration:
            done = asyncio.get_running_loop().create_future()
            self.requests.put_nowait((duration, done))
            await done
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
            duration, done = await self.requests.get()
            running.call_later(duration, lambda done=done: done.done() or done.set_result(None))

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


def settings_of(case: Case, **more: Any) -> Settings:
    return Settings(
        lanes=case.lanes,
        batch_size=case.group_size * case.groups_per_batch,
        group_size=case.group_size,
        steps=case.steps,
        num_groups=case.num_groups,
        **more,
    )


def play(
    case: Case,
    stages: Plain | None = None,
    *,
    progress: Mapping[str, Any] | None = None,
    pass_rates: PassRates | None = None,
    **more: Any,
) -> Played:
    """Run the real loop on virtual time to its end. No task may be left behind."""
    stages = stages or Plain(case)
    events: list[Event] = []

    async def program() -> Played:
        bell, time = clock.Bell(), asyncio.get_running_loop().time
        ledger = Ledger(
            settings_of(case, **more),
            now=time,
            changed=bell.ring,
            trace=Trace(events.append),
            progress=progress,
            pass_rates=pass_rates,
        )
        try:
            await loop.run(stages, ledger, Rules(case.run_ahead), bell)
        finally:
            await stages.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task outlived its run"
        return Played(events, ledger, time())

    return clock.run(program(), virtual=True)


def history_of(played: Played) -> History:
    """What the trace says, in the words of the reference simulator."""
    return History(
        starts=[
            (event.at_s, *(event[name] for name in ("rollout", "group", "member", "lane", "version")))
            for event in played.of("started")
            if not event["evaluation"]
        ],
        batches=[(event.at_s, event["rollouts"], event["lags"]) for event in played.of("taken")],
        failed=[(event.at_s, event["group"]) for event in played.of("failed")],
        published=[event.at_s for event in played.of("published")],
    )
