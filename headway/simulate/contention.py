"""An engine and a trainer that share one machine: while both work, each is slower than it would be alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Contention:
    """engine, trainer: how many times as long each takes while both work; 2 for both where all that one does is missing
    to the other.

    The engine says when it has work, and is told how much slower it is now.
    """

    def __init__(self, *, engine: float, trainer: float) -> None:
        self._engine_slowdown, self._trainer_slowdown = engine, trainer
        self._engine_works = False
        self._done: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._left_s = self._at_s = 0.0  # of the train step under way, as if it were alone; and since when that holds
        self.tell_engine: Callable[[float], object] = lambda slowness: None

    def engine_works(self, works: bool) -> None:
        """The engine has work from now on, or none."""
        if works != self._engine_works:
            self._count_work()
            self._engine_works = works
            self._set_timer()

    async def train(self, seconds: float) -> None:
        """Returns when a train step is done that takes so long alone. One at a time."""
        loop = asyncio.get_running_loop()
        assert self._done is None, "one train step at a time"
        self._left_s, self._at_s, self._done = seconds, loop.time(), loop.create_future()
        self.tell_engine(self._engine_slowdown)
        self._set_timer()
        try:
            await self._done
        finally:
            if self._timer:
                self._timer.cancel()
            self._done = self._timer = None
            self.tell_engine(1.0)

    @property
    def _slowness(self) -> float:
        return self._trainer_slowdown if self._engine_works else 1.0

    def _count_work(self) -> None:
        if self._done is not None:
            now_s = asyncio.get_running_loop().time()
            self._left_s = max(0.0, self._left_s - (now_s - self._at_s) / self._slowness)
            self._at_s = now_s

    def _set_timer(self) -> None:
        if self._done is None:
            return
        if self._timer:
            self._timer.cancel()
        ends_s = self._at_s + self._left_s * self._slowness
        self._timer = asyncio.get_running_loop().call_at(ends_s, _resolve, self._done)


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
