"""Engines under observation: what passes they make, and a way to hold one up at a chosen pass."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import pytest

from headway.generate.torch_engine import PREFILL_TOKENS, TorchEngine
from headway.models.cores import Cores, FixedCores
from headway.models.paged import CachedPass, block_bytes
from headway.models.policy import Policy
from headway.stages import Generator, Sample, SampleRequest
from headway.types import Prompt
from tests import tiny

T = TypeVar("T")

LIMIT_S = 60.0
"""What takes longer hangs."""


def run(program: Coroutine[Any, Any, T], limit_s: float = LIMIT_S) -> T:
    return asyncio.run(asyncio.wait_for(program, limit_s))


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
    cache_blocks: int | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
    cores: Cores | None = None,
) -> AsyncIterator[TorchEngine]:
    """cache_blocks: the cache's budget, in blocks instead of bytes."""
    engine = TorchEngine(
        policy,
        lanes=lanes,
        decode=decode,
        cores=cores or FixedCores(1),
        version=version,
        spare_lanes=spare_lanes,
        cache_bytes=None if cache_blocks is None else cache_blocks * block_bytes(policy.cache_shapes, policy.dtype),
        prefill_tokens=prefill_tokens,
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


class Pass(NamedTuple):
    """Rows of a forward pass: the newest tokens of so many rollouts under way, and so many of prompts and resumed
    rollouts.
    """

    new: int
    prefilled: int = 0


class Passes:
    """The forward passes of a policy from now on.

    before: called with the number of each pass before it is made, on the engine's thread.
    """

    def __init__(self, policy: Policy, before: Callable[[int], object] = lambda number: None) -> None:
        self.seen: list[Pass] = []
        self._before = before
        self._gates: dict[int, tuple[threading.Event, threading.Event]] = {}
        policy.model.base_model.register_forward_pre_hook(self._notice, with_kwargs=True)

    def _notice(self, module: Any, arguments: Any, options: dict[str, Any]) -> None:
        number = len(self.seen)
        plan: CachedPass = options["attention_plan"]
        self.seen.append(Pass(plan._num_singles, plan.num_rows - plan._num_singles))
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


def assert_same(sample: Sample, expected: Sample, tolerance: float = 1e-5) -> None:
    """The same answer, with log-probs that are equal to rounding."""
    assert replace(sample, logprobs=()) == replace(expected, logprobs=())
    assert sample.logprobs == pytest.approx(expected.logprobs, abs=tolerance)


async def accounted(engine: TorchEngine) -> None:
    """At a token boundary: every block of the cache is free, or held by one rollout or one prompt."""

    def look() -> None:
        prefixes = {lane.prefix for lane in engine._lanes if lane.prefix} | set(engine._prefixes._known.values())
        held = [block for lane in engine._lanes for block in lane.own]
        held += [block for prefix in prefixes for block in prefix.blocks]
        assert sorted([*held, *engine._blocks._free]) == list(range(engine._blocks.total))
        for prefix in prefixes:
            assert prefix.num_readers == sum(lane.prefix is prefix for lane in engine._lanes)
        assert engine._prefixes._num_unused == sum(
            not prefix.num_readers for prefix in engine._prefixes._known.values()
        )
        assert all(lane.prefix is None and not lane.own for lane in engine._waiting)

    await engine._ask(look)


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
