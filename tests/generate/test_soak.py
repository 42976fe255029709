"""Hours of rollouts with everything that may come between: nothing leaks, and at idle every block is accounted for.

SmolLM2-135M at 300 tokens per second samples 2.2 million tokens in two hours, here 64,000 rollouts. A tiny model takes
minutes for them, in the same engine; the everyday test has 20 seconds' worth.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from headway.generate.lane import Lane
from headway.generate.prefixes import Prefix
from headway.generate.torch_engine import EngineStatus, TorchEngine
from headway.models.policy import with_parity
from headway.stages import Force, Sample, SampleRequest
from headway.types import Prompt
from tests.generate.harness import accounted, engine_of, run
from tests.generate.meddling import Meddled, meddled_with
from tests.tiny import make_policy

TWO_HOURS = 2_200_000
"""Tokens."""

LANES = 64
OUTSTANDING = 96
"""Rollouts that are asked for at a time."""

DEEDS = {"abort": 0.04, "interrupt": 0.04, "peek": 0.03, "load": 0.03, "nap": 0.02, "check": 0.02}
"""How likely each is at a token boundary."""


@dataclass
class Idle:
    """What there is when everything has been answered. resident_mb: of the process; the others are numbers of live
    objects.
    """

    status: EngineStatus
    resident_mb: float
    tensors: int
    lanes: int
    prefixes: int
    tasks: int


@dataclass
class Soak:
    """Rollouts of one engine, those of a prompt in groups of four, and what was done to them."""

    engine: TorchEngine
    versions: list[dict[str, torch.Tensor]]
    chance: random.Random
    num_tokens: int = 0
    num_rollouts: int = 0
    done: Counter[str] = field(default_factory=Counter)
    _in_flight: dict[SampleRequest, asyncio.Task[None]] = field(default_factory=dict)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _version: int = 0

    def requests(self) -> Iterator[SampleRequest]:
        number = 0
        while True:
            ids = tuple(self.chance.randrange(28) for _ in range(self.chance.randint(1, 60)))
            for member in range(4):
                length = min(150, int(self.chance.lognormvariate(3.2, 0.9)) + 1)
                yield SampleRequest(
                    Prompt(f"virtual {number}", "", ids),
                    (number, member),
                    length,
                    top_k=self.chance.choice([0] * 7 + [5]),
                    force=self.chance.choice([None, None, Force(10, (1, 2, 3))]),
                    spare=self.chance.random() < 0.02,
                )
            number += 1

    async def sample(self, num_tokens: int) -> None:
        """So many more tokens at least, and then all that is in flight to its end."""
        wanted, requests = self.num_tokens + num_tokens, self.requests()
        tasks: set[asyncio.Task[None]] = set()
        while self.num_tokens < wanted:
            while len(tasks) < OUTSTANDING:
                tasks.add(asyncio.create_task(self._whole(next(requests))))
            _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*tasks)

    async def _whole(self, request: SampleRequest) -> None:
        """One that is interrupted goes on; one that is given up is gone."""
        sample = await self._once(request)
        while sample is not None and sample.finish == "interrupted":
            sample = await self._once(replace(request, so_far=sample))
        if sample is not None:
            self.num_tokens += len(sample.tokens)
            self.num_rollouts += 1

    async def _once(self, request: SampleRequest) -> Sample | None:
        task = self._in_flight[request] = asyncio.ensure_future(self.engine.sample(request))
        try:
            return await task
        except asyncio.CancelledError:
            return None
        finally:
            del self._in_flight[request]

    async def meddle(self, meddled: Meddled) -> None:
        for deed, likely in DEEDS.items():
            if self.chance.random() < likely and self._in_flight:
                self.done[deed] += 1
                self._do(deed, meddled)

    def _do(self, deed: str, meddled: Meddled) -> None:
        request, task = self.chance.choice(list(self._in_flight.items()))
        if deed == "abort":
            task.cancel()
        elif deed == "interrupt":
            self.engine.interrupt(request)
        elif deed == "peek":
            meddled.ask(self.engine.peek(request))
        elif deed == "load":
            self._version += 1
            meddled.ask(self._load(recompute=self.chance.random() < 0.5))
        elif deed == "nap":
            meddled.ask(self._nap())
        else:
            meddled.ask(accounted(self.engine))

    async def _load(self, *, recompute: bool) -> None:
        async with self._one_at_a_time:
            await self.engine.load(self.versions[self._version % 2], self._version, recompute=recompute)

    async def _nap(self) -> None:
        async with self._one_at_a_time:
            await self.engine.sleep(weights=True)
            await self.engine.load(self.versions[self._version % 2], self._version)
            await self.engine.wake()

    async def at_idle(self) -> Idle:
        while (status := await self.engine.status()).num_lanes:  # one that was given up goes at the next boundary
            await asyncio.sleep(0.001)
        await accounted(self.engine)
        gc.collect()
        kinds = Counter(type(one) for one in gc.get_objects())
        return Idle(status, resident_mb(), kinds[torch.Tensor], kinds[Lane], kinds[Prefix], len(asyncio.all_tasks()))


def resident_mb() -> float:
    with suppress(FileNotFoundError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0  # a system that does not say


def soaked(num_tokens: int, num_stops: int, limit_s: float) -> tuple[Soak, list[Idle]]:
    """So many tokens, with so many stops at which everything is answered.

    Parity is bitwise, because then few different numbers of rows are multiplied: the library of the products keeps some
    hundred kilobytes for each, up to a bound of its own, which would hide a leak.
    """
    policy = with_parity(make_policy(max_position_embeddings=256), "bitwise")
    versions = [make_policy(seed=seed, max_position_embeddings=256).weights() for seed in range(2)]

    async def program() -> tuple[Soak, list[Idle]]:
        async with engine_of(policy, lanes=LANES, spare_lanes=2, cache_blocks=120, prefill_tokens=256) as engine:
            soak = Soak(engine, versions, random.Random(0))
            idle = []
            for _ in range(num_stops):
                with meddled_with(policy, engine, soak.meddle) as meddled:
                    await soak.sample(num_tokens // num_stops)
                    await meddled.answered()
                idle.append(await soak.at_idle())
            return soak, idle

    return run(program(), limit_s)


@pytest.mark.parametrize(
    ("num_tokens", "num_stops", "limit_s"),
    [
        pytest.param(TWO_HOURS // 360, 2, 300, id="20 seconds"),
        pytest.param(TWO_HOURS // 8, 4, 1800, id="a quarter of an hour", marks=pytest.mark.slow),
        pytest.param(TWO_HOURS, 12, 3600, id="two hours", marks=pytest.mark.soak),
    ],
)
def test_nothing_leaks(num_tokens, num_stops, limit_s):
    soak, idle = soaked(num_tokens, num_stops, limit_s)
    assert soak.num_tokens >= num_tokens
    assert soak.done.keys() == DEEDS.keys(), "everything has happened"
    assert idle[-1].status.num_preempted > num_stops
    for now in idle:
        assert (now.status.num_lanes, now.status.num_waiting) == (0, 0)
        assert now.status.blocks_free + now.status.blocks_unused == now.status.blocks
        assert now.lanes <= 1, "no rollout is held by anybody, unless by who works on its last one"
        assert now.prefixes <= LANES
        assert now.tasks <= 2
        assert now.tensors <= idle[0].tensors + LANES, "known prompts have a state each"
        assert now.resident_mb <= idle[0].resident_mb + 20
