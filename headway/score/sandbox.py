"""Graders in processes that can be ended.

A grader may hang, crash, or hold the interpreter so that no thread and no signal handler gets a turn; only the end of
its process bounds it. So each runs in a worker process of its own session, one request at a time, for many requests;
a late one is killed with all it started, and replaced when it is next needed.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headway.types import Score, UserError

START_LIMIT_S = 120.0
"""For a worker to import its grader; it is not counted against the grader's own time."""

ORPHAN_GRACE_S = 5.0
"""A worker whose owner is gone ends itself this long after the limit of its request."""

_WORKER = Path(__file__).with_name("worker.py")


class _Gone(Exception):
    """The worker's process has ended."""


class _Refused(Exception):
    """The worker can't load its grader, for the reason given."""


class _Call:
    """A request on its way. `is_abandoned`: nobody waits for the answer any more."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.is_abandoned = False


class _Worker:
    """One process and this side of its socket. Used by one thread at a time; `abandon` and `stop` come from others."""

    def __init__(self, grader: Mapping[str, Any], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._order = {
            **grader,
            "start_limit_s": START_LIMIT_S + ORPHAN_GRACE_S,
            "limit_s": timeout_s + ORPHAN_GRACE_S,
            "sys_path": [os.getcwd(), *(entry for entry in sys.path if entry)],
        }
        self._lock = threading.Lock()
        self._current: _Call | None = None
        self._is_stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def launch(self) -> None:
        """Start the process; `await_ready` follows. What a grader prints goes to standard error."""
        ours, theirs = multiprocessing.Pipe(duplex=True)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        with self._lock:
            self._process, self._connection = process, ours
            if self._is_stopped or (self._current and self._current.is_abandoned):
                self._kill()
        self._send(pickle.dumps(self._order))

    def await_ready(self) -> None:
        """Raises _Refused when the grader can't be loaded, _Gone when the process ended while loading it."""
        reply = self._reply(START_LIMIT_S)
        if reply is None:
            self.end()
            raise _Refused(f"importing it took more than {START_LIMIT_S:g} s")
        if "refusal" in reply:
            self.end()
            raise _Refused(reply["refusal"])

    def grade(self, call: _Call) -> Score:
        """Blocks until there is a score, at the latest when time is up."""
        with self._lock:
            if call.is_abandoned:
                return Score(None, "grader_error", "abandoned")
            self._current = call
        try:
            return self._grade(call)
        except (_Gone, _Refused) as error:
            return Score(None, "grader_error", str(error))
        finally:
            with self._lock:
                self._current = None
            if call.is_abandoned:  # it may have been ended after it answered; the next request must not meet that
                self.end()

    def _grade(self, call: _Call) -> Score:
        if self._connection is not None and self._connection.poll(0):  # it ended, or spoke unasked, since last time
            self.end()
        if self._connection is None:
            self.launch()
            self.await_ready()
        self._send(call.request)
        reply = self._reply(self._timeout_s)
        if reply is None:
            self.end()
            return Score(None, "grader_timeout", f"no verdict within {self._timeout_s:g} s")
        if "error" in reply:
            return Score(None, "grader_error", reply["error"])
        return Score(reply["reward"])

    def _send(self, message: bytes) -> None:
        assert self._connection is not None
        try:
            self._connection.send_bytes(message)
        except ConnectionError:
            raise self._gone() from None

    def _reply(self, limit_s: float) -> dict[str, Any] | None:
        """The next answer, or None when the limit has passed."""
        assert self._connection is not None
        try:
            if not self._connection.poll(limit_s):
                return None
            return json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._gone() from None

    def _gone(self) -> _Gone:
        code = self.end()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return _Gone(f"its process ended {how}")

    def abandon(self, call: _Call) -> None:
        """If this worker has the call in hand, it ends: how long the grader would go on is not known."""
        with self._lock:
            if self._current is call:
                self._kill()

    def stop(self) -> None:
        """End the process, and start none any more."""
        with self._lock:
            self._is_stopped = True
            self._kill()

    def end(self) -> int:
        """End the process with all it started, and free what it held. Returns its exit code (minus its signal)."""
        with self._lock:
            self._kill()
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
        if process is None or connection is None:
            return 0
        connection.close()
        return process.wait()

    def _kill(self) -> None:
        """Under the lock, and only while the process is not waited for: afterwards its id may be another's."""
        if self._process is not None:
            # the group outlives its leader while a grader's own children run; macOS refuses for a group of zombies
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


class GraderPool:
    """Worker processes that grade, behind one coroutine. Bound to no event loop.

    grader: what a worker loads: `{"function": "module:function"}` or `{"reasoning_gym": True}`.

    Raises UserError (naming `setting`) when the grader can't be loaded.
    """

    def __init__(self, grader: Mapping[str, Any], *, workers: int, timeout_s: float, setting: str) -> None:
        self._workers = [_Worker(grader, timeout_s) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grader")
        try:
            for worker in self._workers:
                worker.launch()
            for worker in self._workers:
                worker.await_ready()
                self._idle.put(worker)
        except (_Refused, _Gone) as error:
            self._shut_down()
            raise UserError(f"score.scorer = {setting!r}: {error}") from None

    async def grade(self, **request: Any) -> Score:
        """The score of one request, whose values are what the grader is called with, by name.

        At most `workers` are graded at once and the others wait; a request's time begins when a worker takes it.
        A cancelled request's worker is ended and replaced, so the pool stays usable.
        """
        call = _Call(pickle.dumps(request))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._grade, call)
        except asyncio.CancelledError:
            self._abandon(call)
            raise

    def _grade(self, call: _Call) -> Score:
        worker = self._idle.get()
        try:
            return worker.grade(call)
        finally:
            self._idle.put(worker)

    def _abandon(self, call: _Call) -> None:
        call.is_abandoned = True
        for worker in self._workers:
            worker.abandon(call)

    async def close(self) -> None:
        """End every worker; requests in hand or waiting are cancelled or told as errors. May be called again."""
        await asyncio.get_running_loop().run_in_executor(None, self._shut_down)

    def _shut_down(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.end()
