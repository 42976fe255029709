"""Engines with somebody who meddles at every token boundary, always at the same one for the same seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from headway.generate.torch_engine import TorchEngine
from headway.models.policy import Policy
from headway.stages import Sample, SampleRequest

TURNS = 6
"""Of the event loop, after which everybody who was answered has said what he wants next."""


@dataclass
class Meddled:
    """An engine, requests that wait for their time to be handed over, and those in flight."""

    engine: TorchEngine
    in_flight: list[SampleRequest] = field(default_factory=list)
    _to_come: list[asyncio.Event] = field(default_factory=list)
    _asked: list[asyncio.Task[Any]] = field(default_factory=list)

    def ask(self, question: Coroutine[Any, Any, Any]) -> None:
        """Something besides samples, which is awaited in the end."""
        self._asked = [task for task in self._asked if not task.done() or task.exception()]
        self._asked.append(asyncio.create_task(question))

    async def answered(self) -> None:
        """All that was asked has been."""
        await asyncio.gather(*self._asked)

    def arrive(self, num: int) -> None:
        """So many more requests are handed over."""
        for _ in range(min(num, len(self._to_come))):
            self._to_come.pop().set()

    async def answers(self, requests: Sequence[SampleRequest], *, first: int) -> list[Sample]:
        """The whole answers, in the order of the requests; the `first` ones are handed over at once."""
        gates = [asyncio.Event() for _ in requests]
        tasks = [asyncio.create_task(self._whole(*pair)) for pair in zip(requests, gates, strict=True)]
        self._to_come = gates[::-1]
        self.arrive(first)
        while under_way := [task for task in tasks if not task.done()]:  # those done would end each wait at once
            if not self.in_flight:
                self.arrive(1)
            await asyncio.wait(under_way, timeout=0.001, return_when=asyncio.FIRST_COMPLETED)
            if any(task.done() and task.exception() for task in (*tasks, *self._asked)):
                break  # the first one is raised here
        await self.answered()
        return await asyncio.gather(*tasks)

    async def _whole(self, request: SampleRequest, gate: asyncio.Event) -> Sample:
        """One that is interrupted, or pauses, goes on at once, and pauses no more."""
        await gate.wait()
        while True:
            self.in_flight.append(request)
            try:
                sample = await self.engine.sample(request)
            finally:
                self.in_flight.remove(request)
            if sample.finish != "interrupted":
                return sample
            request = replace(request, so_far=sample, pause_after=None)


@contextmanager
def meddled_with(
    policy: Policy, engine: TorchEngine, meddle: Callable[[Meddled], Awaitable[None]]
) -> Iterator[Meddled]:
    """`meddle` runs on the event loop before each pass, while the engine waits: what it orders is obeyed after it."""
    loop = asyncio.get_running_loop()
    meddled = Meddled(engine)

    async def turn() -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        await meddle(meddled)
        for _ in range(TURNS):
            await asyncio.sleep(0)

    def before(*_: Any) -> None:
        asyncio.run_coroutine_threadsafe(turn(), loop).result()

    hook = policy.model.base_model.register_forward_pre_hook(before)
    try:
        yield meddled
    finally:
        hook.remove()
