"""An engine and a trainer that share one machine: while both work, each is slower than it would be alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SETTLED_S = 1e-9
"""What begins at the same instant as a micro-batch works beside it."""


class Contention:
    """engine, trainer: how many times as long each takes while both work; 2 for both where all that one does is missing
    to the other. units: micro-batches of a train step.

    The engine says when it has work, and is told how much slower it is now. A trainer's share of the machine is settled
    when it begins a micro-batch, and it keeps no more until that ends, whatever the engine does meanwhile; an engine's
    passes are short (`headway.models.cores`).
    """

    def __init__(self, *, engine: float, trainer: float, units: int = 1) -> None:
        self._engine_slowdown, self._trainer_slowdown, self._num_units = engine, trainer, units
        self._engine_works = False
        self.tell_engine: Callable[[float], object] = lambda slowness: None

    def engine_works(self, works: bool) -> None:
        """The engine has work from now on, or none."""
        self._engine_works = works

    async def train(self, seconds: float) -> None:
        """Returns when a train step is done that takes so long alone."""
        self.tell_engine(self._engine_slowdown)
        try:
            for _ in range(self._num_units):
                await asyncio.sleep(SETTLED_S)
                await asyncio.sleep(seconds / self._num_units * (self._trainer_slowdown if self._engine_works else 1.0))
        finally:
            self.tell_engine(1.0)
