"""Engines under observation: what passes they make, and a way to hold one up at a chosen pass."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from headway.generate.torch_engine import TorchEngine
from headway.models.attention import PackedAttention
from headway.models.cores import FixedCores
from headway.models.policy import Policy
from headway.stages import Generator, Sample, SampleRequest
from headway.types import Prompt
from tests import tiny

T = TypeVar("T")

LIMIT_S = 30.0
"""What takes longer hangs."""


def run(program: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(program, LIMIT_S))


def ask(
    prompt: Prompt | str, max_new_tokens: int = 8, *, member: int = 0, temperature: float = 1.0, **options: Any
) -> SampleRequest:
    prompt = tiny.prompt(prompt) if isinstance(prompt, str) else prompt
    return SampleRequest(prompt, (0, prompt.uid, 0, member, 0), max_new_tokens, temperature, **options)


@asynccontextmanager
async def engine_of(
    policy: Policy,
    *,
    lanes: int = 4,
    decode: Callable[[Sequence[int]], str] = tiny.decode,
    version: int = 0,
    spare_lanes: int = 0,
) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(
        policy, lanes=lanes, decode=decode, cores=FixedCores(1), version=version, spare_lanes=spare_lanes
    )
    try:
        yield engine
    finally:
        await engine.close()


def answers(policy: Policy, requests: Sequence[SampleRequest], **options: Any) -> list[Sample]:
    """All requests at once to a new engine; answers in their order."""

    async def program() -> list[Sample]:
        async with engine_of(policy, **options) as engine:
            return await asyncio.gather(*(engine.sample(request) for request in requests))

    return run(program())


class Passes:
    """The forward passes of a policy from now on: ("prefill" or "decode", number of rows) of each.

    before: called with the number of each pass before it is made, on the engine's thread.
    """

    def __init__(self, policy: Policy, before: Callable[[int], object] = lambda number: None) -> None:
        self.seen: list[tuple[str, int]] = []
        self._before = before
        self._gates: dict[int, tuple[threading.Event, threading.Event]] = {}
        policy.model.base_model.register_forward_pre_hook(self._notice, with_kwargs=True)

    def _notice(self, module: Any, arguments: Any, options: dict[str, Any]) -> None:
        number = len(self.seen)
        kind = "prefill" if isinstance(options["attention_plan"], PackedAttention) else "decode"
        self.seen.append((kind, options["input_ids"].shape[1]))
        if gate := self._gates.get(number):
            reached, released = gate
            reached.set()
            assert released.wait(LIMIT_S)
        self._before(number)

    def hold(self, *numbers: int) -> None:
        """Let the engine stand before these passes until `held_at` has been there."""
        self._gates |= {number: (threading.Event(), threading.Event()) for number in numbers}

    @asynccontextmanager
    async def held_at(self, number: int) -> AsyncIterator[None]:
        """Inside, the engine stands before its pass `number`; commands given meanwhile are obeyed after that pass."""
        reached, released = self._gates.setdefault(number, (threading.Event(), threading.Event()))
        try:
            assert await asyncio.to_thread(reached.wait, LIMIT_S)
            yield
            await asyncio.sleep(0.01)  # tasks that were begun inside have given their commands
        finally:
            released.set()


async def sample_together(engine: Generator, passes: Passes, requests: Sequence[SampleRequest]) -> list[Sample]:
    """Hand over all requests at one token boundary. The pass before it is forgotten."""
    number = len(passes.seen)
    plug = asyncio.create_task(engine.sample(ask("m", 1)))
    async with passes.held_at(number):
        tasks = [asyncio.create_task(engine.sample(request)) for request in requests]
    await plug
    samples = await asyncio.gather(*tasks)
    del passes.seen[number]
    return samples
