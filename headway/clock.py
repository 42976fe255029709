"""One asyncio program on two clocks: the wall, or a loop whose time jumps to the next timer.

Virtual time lives in the event loop, so a program needs no change to be simulated: `asyncio.sleep(3.0)` on a
`VirtualLoop` costs nothing and moves its clock by exactly 3.0. A virtual program in which every task waits and no
timer is set raises `Deadlock`, where on the wall it would hang for ever.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits and no timer is set."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without wall time, threads or sockets.

    `time()` is the due time of the latest timer that fired, exactly: it is assigned, never accumulated, so events
    that are due at one instant stay at one instant. The base loop is told how to run by overriding its private
    `_run_once`; `tests/test_clock.py` holds that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_order = itertools.count()
        self._num_cancelled = 0
        self._idle_callbacks: deque[Callable[[], object]] = deque()

    def time(self) -> float:
        return self._now_s

    def call_idle(self, callback: Callable[[], object]) -> None:
        """Call `callback` once nothing more can happen at this instant."""
        self._idle_callbacks.append(callback)

    def call_soon(self, callback, *args, context=None):  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(self, when, callback, *args, context=None):  # type: ignore[override]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        heapq.heappush(self._timers, (when, next(self._timer_order), timer))
        return timer

    def call_later(self, delay, callback, *args, context=None):  # type: ignore[override]
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        while not self._stopping:  # type: ignore[attr-defined]
            self._run_ready()
            self._leave_out_cancelled_timers()
            if self._stopping:  # type: ignore[attr-defined]
                return
            due_now = self._timers and self._timers[0][0] <= self._now_s
            if self._idle_callbacks and not due_now:
                self._idle_callbacks.popleft()()
            else:
                self._jump_to_next_timer()

    def _run_ready(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        while ready:
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _leave_out_cancelled_timers(self) -> None:
        """Those that are next; and all of them once they are the greater part, so that deadlines met leave nothing."""
        if self._num_cancelled > 100 and 2 * self._num_cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._num_cancelled = 0
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
            self._num_cancelled -= 1

    def _jump_to_next_timer(self) -> None:
        if not self._timers:
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
            shown = ", ".join(waiting[:8]) + (" ..." if len(waiting) > 8 else "")
            raise Deadlock(f"no timer is set and these tasks wait for ever: {shown}")
        self._now_s = max(self._now_s, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now_s:
            timer = heapq.heappop(self._timers)[2]
            if timer.cancelled():
                self._num_cancelled -= 1
            else:
                timer._scheduled = False  # type: ignore[attr-defined]
                self._ready.append(timer)  # type: ignore[attr-defined]

    def run_in_executor(self, executor, func, *args):  # type: ignore[override]
        raise RuntimeError("threads have no place on virtual time: a stage called run_in_executor")

    def _timer_handle_cancelled(self, handle) -> None:
        self._num_cancelled += handle._scheduled

    def _process_events(self, event_list) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class Bell:
    """`await bell.wait()` resumes once after it rang, when everything else of that instant has happened.

    The virtual loop knows that moment (`call_idle`); on the wall it is the next turn of the loop.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._at_end_of_instant = getattr(loop, "call_idle", loop.call_soon)
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        if not self._rung:
            self._rung = True
            if self._waiter:
                self._at_end_of_instant(self._wake)

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        self._waiter = self._loop.create_future()
        if self._rung:
            self._at_end_of_instant(self._wake)
        await self._waiter
        self._rung, self._waiter = False, None


# What a run leaves, cycles of tasks and their errors, joins the old objects without counting towards Python's own look
# among those: a process of ten thousand simulations would keep all of it. So it is counted here.
MOST_UNSEEN = 250_000
_num_unseen = 0


@contextmanager
def rare_collections(new_objects: int) -> Iterator[None]:
    """Python looks for cyclic garbage whenever 700 more objects live than before, among all that live. What was there
    before, the modules of torch and a model, is hundreds of thousands of objects and no garbage: an engine with 128
    rollouts in flight spent a fifth of its time there, a simulation of ten thousand a third. So that is left out, and
    the look comes after so many new objects.
    """
    global _num_unseen
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(before[0] and max(before[0], new_objects), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        _num_unseen += len(gc.get_objects())
        gc.unfreeze()
        if _num_unseen > MOST_UNSEEN:
            gc.collect()
            _num_unseen = 0


def run(program: Coroutine[Any, Any, T], *, virtual: bool = False) -> T:
    """Run `program` to its end on the wall clock, or on virtual time."""
    make_loop = VirtualLoop if virtual else None
    with rare_collections(250_000 if virtual else 20_000), asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(program)
