"""Which worker computes on how many CPU cores.

Two workers that together use more threads than there are cores slow each other down tenfold: the threads of a matrix
product wait for one another, each behind the other worker's. So a worker asks before each unit of work (an engine for
one token, a trainer for one micro-batch) and gets all cores while it is the only busy one, a fair part while others
are busy too; nobody gets a core that somebody else holds. (torch has one thread count per process: who sets it last
sets it for all. Fair parts are equal parts, so whoever computes beside another has set the same.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class Cores(Protocol):
    """One worker's claim to cores."""

    def busy(self) -> AbstractContextManager[None]:
        """Within the block the worker has work, and counts when cores are shared out."""
        ...

    def unit(self) -> AbstractContextManager[int]:
        """Within the block, which stands in a busy one, tensor operations use the cores that are held: so many."""
        ...


class FixedCores:
    """The same number of threads, whatever else goes on. Every worker of a process must be given the same."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def unit(self) -> Iterator[int]:
        torch.set_num_threads(self._num_threads)
        yield self._num_threads


class SharedCores:
    """One of several workers' claims to the same `total` cores; `another()` makes a further one's."""

    def __init__(self, total: int) -> None:
        self._pool = _Pool(total)

    def another(self) -> SharedCores:
        claim = SharedCores(self._pool.total)
        claim._pool = self._pool
        return claim

    @contextmanager
    def busy(self) -> Iterator[None]:
        with self._pool.changed:
            self._pool.num_busy += 1
        try:
            yield
        finally:
            with self._pool.changed:
                self._pool.num_busy -= 1

    @contextmanager
    def unit(self) -> Iterator[int]:
        held = self._pool.take_fair_part()
        try:
            torch.set_num_threads(held)
            yield held
        finally:
            self._pool.give_back(held)


class _Pool:
    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self.num_busy = 0
        self.changed = threading.Condition()

    def take_fair_part(self) -> int:
        """Waits until a fair part is free. Who waits is busy, so whoever holds more gets less at its next unit."""
        with self.changed:
            assert self.num_busy, "a unit of work stands inside a busy block"
            while self.free < self._fair_part():
                self.changed.wait()
            part = self._fair_part()
            self.free -= part
            return part

    def _fair_part(self) -> int:
        return max(1, self.total // self.num_busy)

    def give_back(self, held: int) -> None:
        with self.changed:
            self.free += held
            self.changed.notify_all()
