"""Canaries: a few short rollouts sampled wholly under the newest published version.

Where generation runs ahead, every trained token is stale, and its mismatch is staleness and numerics in one. Canaries
are scored by the trainer under the version that sampled them, which leaves numerics alone. They take neither a ticket's
lane nor a slot, and are outside every count.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headway.data import PromptSource
from headway.generate.episode import Sampling, rollout_of
from headway.stages import Generator
from headway.types import Rollout

NUM_ROLLOUTS = 2
"""Of each version; that many spare lanes an engine needs for them."""


@dataclass(frozen=True)
class CanarySettings:
    """num_tokens: of all canaries of a version together, at most; sampling: as that of training rollouts; seed."""

    num_tokens: int
    sampling: Sampling
    seed: int

    @property
    def lengths(self) -> list[int]:
        """Token budgets of the rollouts of one version."""
        shares = [(self.num_tokens + member) // NUM_ROLLOUTS for member in reversed(range(NUM_ROLLOUTS))]
        return [min(share, self.sampling.max_new_tokens) for share in shares if share]


class Canaries:
    """Those of one engine. They answer prompts of the training data, other ones under each version."""

    def __init__(self, engine: Generator, source: PromptSource, settings: CanarySettings) -> None:
        self._engine, self._source, self._settings = engine, source, settings
        self._asked: list[asyncio.Task[Rollout]] = []

    async def start(self, version: int) -> None:
        """Begin to sample those of `version`, which the engine has just acknowledged; those before are given up."""
        await self.close()
        self._asked = [
            asyncio.create_task(self._sample(version, member, length), name=f"canary {member} of version {version}")
            for member, length in enumerate(self._settings.lengths)
        ]

    async def _sample(self, version: int, member: int, length: int) -> Rollout:
        prompt, epoch = self._source.at((version * NUM_ROLLOUTS + member) % len(self._source))
        sampling, seed_key = self._settings.sampling, (self._settings.seed, "canary", version, member)
        request = sampling.request(prompt, seed_key, max_new_tokens=length, spare=True)
        sample = await self._engine.sample(request)
        return rollout_of(prompt, epoch, member, sample)

    async def finished(self) -> list[Rollout]:
        """Those that were started last, once all of them have ended; each is given out once."""
        asked, self._asked = self._asked, []
        return list(await asyncio.gather(*asked))

    async def close(self) -> None:
        """Give up what is still being sampled."""
        asked, self._asked = self._asked, []
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
