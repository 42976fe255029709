"""Which worker computes on how many CPU cores.

Two workers that together use more threads than there are cores slow each other down tenfold: the threads of a matrix
product wait for one another, each behind the other worker's. So a worker asks before each unit of work (an engine for
one token, a trainer for one micro-batch) and gets all cores while it is the only busy one, a fair part while others
are busy too; nobody gets a core that somebody else holds. (torch has one thread count per process: who sets it last
sets it for all. Fair parts are equal parts, so whoever computes beside another has set the same.)
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch


class Cores(Protocol):
    """One worker's claim to cores."""

    def busy(self) -> AbstractContextManager[None]:
        """Within the block the worker has work, and counts when cores are shared out."""
        ...

    def unit(self) -> AbstractContextManager[float]:
        """Within the block, which stands in a busy one, tensor operations use the cores that are held: this share of
        all, below 1 while others hold some.
        """
        ...


def dismiss_helpers() -> None:
    """End the threads that have helped this one with its tensors; new ones come when they are needed.

    GNU's OpenMP gives every thread that computes helpers of its own and keeps them. As soon as all of them together are
    more than the cores, it lets those who wait sleep instead of spin, and waking them takes longer than most operations
    of a decoding step: the engine took 1.5 times as long per token. So whoever has nothing to do keeps no helpers.
    """
    openmp = _gnu_openmp()
    if openmp is not None:
        openmp.omp_pause_resource_all(_HARD)


_HARD = 2
"""`omp_pause_hard`: give up all that can be had again."""


@functools.cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """The one that torch has loaded; None where it uses another, or none."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = [line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line]
    library = ctypes.CDLL(paths[0]) if paths else None
    return library if hasattr(library, "omp_pause_resource_all") else None


class FixedCores:
    """The same number of threads, whatever else goes on. Every worker of a process must be given the same."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    @contextmanager
    def busy(self) -> Iterator[None]:
        try:
            yield
        finally:
            dismiss_helpers()

    @contextmanager
    def unit(self) -> Iterator[float]:
        torch.set_num_threads(self._num_threads)
        yield 1.0


class CorePool:
    """`total` cores that several workers share, each through `SharedCores` of its own."""

    def __init__(self, total: int) -> None:
        self._free = self.total = total
        self._num_busy = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def busy(self) -> Iterator[None]:
        with self._changed:
            self._num_busy += 1
        try:
            yield
        finally:
            dismiss_helpers()
            with self._changed:
                self._num_busy -= 1

    def take(self, *, all_of_them: bool = False) -> int:
        """Waits until it is its turn and a fair part is free, or all cores are -> how many it has now.

        First come, first served: who gives back and comes again at once comes after those who wait. Who waits is
        busy, so whoever held more gets less at its next unit.
        """
        with self._changed:
            assert self._num_busy, "a unit of work stands inside a busy block"
            turn = object()
            self._waiting.append(turn)
            while self._waiting[0] is not turn or self._free < (self.total if all_of_them else self._fair_part()):
                self._changed.wait()
            self._waiting.popleft()
            part = self.total if all_of_them else self._fair_part()
            self._free -= part
            self._changed.notify_all()
            return part

    def _fair_part(self) -> int:
        return max(1, self.total // self._num_busy)

    def give_back(self, held: int) -> None:
        with self._changed:
            self._free += held
            self._changed.notify_all()


class SharedCores:
    """One worker's claim to the cores of a pool.

    always_all: it waits until all cores are free, so that its sums are split among the same number of threads always.
    """

    def __init__(self, pool: CorePool, *, always_all: bool = False) -> None:
        self._pool, self._always_all = pool, always_all

    def busy(self) -> AbstractContextManager[None]:
        return self._pool.busy()

    @contextmanager
    def unit(self) -> Iterator[float]:
        held = self._pool.take(all_of_them=self._always_all)
        try:
            torch.set_num_threads(held)
            yield held / self._pool.total
        finally:
            self._pool.give_back(held)
