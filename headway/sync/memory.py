"""Sync within one process: the engine copies the trainer's tensors into its own storage at a token boundary."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from headway.models.weights import fingerprint
from headway.stages import Generator


@dataclass(frozen=True)
class MemorySync:
    """verify: compare a hash of every weight on both sides afterwards. recompute: the keys and values of rollouts in
    flight are computed again under the new weights. dtypes: in which the engine keeps weights, by name, where that is
    another one than they are sent in.

    The trainer changes no weight until the hand-over is acknowledged, so nothing is staged in between.
    """

    engine: Generator
    verify: bool
    recompute: bool = False
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    async def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        await self.engine.load(weights, version, recompute=self.recompute)
        if self.verify:
            sent, received = await asyncio.gather(
                asyncio.to_thread(fingerprint, weights, self.dtypes), self.engine.fingerprint()
            )
            if sent != received:
                raise RuntimeError(
                    f"the engine's weights differ from the trainer's after version {version} was handed over "
                    f"(hash {received[:12]} instead of {sent[:12]}); nothing sampled from them can be trusted"
                )
