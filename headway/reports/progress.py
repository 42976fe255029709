"""The progress of a run in the terminal: one live line, or plain lines where nobody can look at one."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headway.reports import wording
from headway.reports.status import Status
from headway.trace import Event

REFRESHES_PER_S = 4
MIN_COLUMNS = 20
"""A narrower terminal gets plain lines."""

SPARSE = {
    "failed": ("group", "can't be trained"),
    "dropped": ("group", "was dropped"),
    "filtered": ("group", "was replaced"),
    "restarted": ("group", "begins again"),
    "lost": ("rollout", "was lost"),
}
"""Events of which the first few are said, and then fewer and fewer: kind -> who, and what became of it."""


class ProgressLine:
    """A trace listener and context manager that shows a run.

    On a terminal: one line that a timer keeps fresh, with what the run waits for, and above it one line for every
    evaluation and every warning of a train step. Elsewhere: one line per phase, train step and evaluation, flushed
    at once. However the block is left, the cursor is back and the last line stands.

    >>> import io
    >>> with ProgressLine(stream=io.StringIO()) as progress:
    ...     progress.phase("loading the model ...")
    """

    def __init__(
        self,
        *,
        evaluation_size: int | None = None,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stdout
        self._status = Status(evaluation_size, now)
        self._phase = ""
        self._num_said: Counter[str] = Counter()
        self._said_alarms: set[str] = set()
        self._lock = threading.Lock()  # the timer's thread reads what events change
        self._speaks_unicode = (getattr(self._stream, "encoding", None) or "utf-8").lower().startswith("utf")
        self._live = self._make_live()

    def _make_live(self) -> Live | None:
        console = Console(file=self._stream, highlight=False)
        if not self._stream.isatty() or console.is_dumb_terminal or console.width < MIN_COLUMNS:
            return None
        return Live(get_renderable=self._renderable, console=console, refresh_per_second=REFRESHES_PER_S)

    def __enter__(self) -> ProgressLine:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Show what happens while the loop does not run: before its first event, or after its last."""
        self._phase = text
        if not self._live:
            self._print(text)

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._status(event)
            self._phase = ""
        if event.kind == "run":
            self._say_unsound()
        if event.kind == "trained":
            self._say_warnings(event)
        if event.kind in SPARSE:
            self._say_sparsely(event)
        if event.kind == "evaluated":
            self._say(wording.evaluation(event))
        elif not self._live and event.kind == "trained":
            shown = (self._status.figures(), self._status.details(), self._elapsed())
            self._print("  ".join(filter(None, shown)))
        elif not self._live and event.kind == "ended":
            self._print(f"ended: {event['reason']}  {self._elapsed()}")

    def _say_unsound(self) -> None:
        for reason in self._status.unsound:
            self._say(f"warning: unsound, and trained all the same: {reason}")

    def _say_warnings(self, trained: Event) -> None:
        """What the step itself says, and alarms; each alarm once, as a figure may swing around its limit."""
        said = [str(trained["metrics"]["warning"])] if trained["metrics"].get("warning") else []
        for alarm in self._status.alarms:
            if alarm.key not in self._said_alarms:
                self._said_alarms.add(alarm.key)
                said.append(alarm.says + (f" ({alarm.num_steps} steps in a row)" if alarm.num_steps > 1 else ""))
        for text in said:
            self._say(f"warning: train step {trained['version']}: {text}")

    def _say_sparsely(self, event: Event) -> None:
        """The first few one by one, then at every doubling: a broken grader must be seen, and not fill the screen."""
        self._num_said[event.kind] += 1
        num = self._num_said[event.kind]
        if num <= 3 or num & (num - 1) == 0:
            who, what = SPARSE[event.kind]
            self._say(f"{who} {event[who]} {what} ({num} so far): {event['reason']}")

    def line(self) -> str:
        """The live line as it stands."""
        with self._lock:
            if self._phase:
                return f"{self._phase} | {self._elapsed()}"
            return f"{self._status.figures()}  | {self._status.waiting()} | {self._elapsed()}"

    def _elapsed(self) -> str:
        return wording.duration(self._status.elapsed_s)

    def _renderable(self) -> Text:
        overflow = "ellipsis" if self._speaks_unicode else "crop"
        return Text(self._writable(self.line()), no_wrap=True, overflow=overflow)

    def _say(self, text: str) -> None:
        """A line that stays."""
        if self._live:
            self._live.console.print(Text(self._writable(text)))
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        print(self._writable(text), file=self._stream, flush=True)

    def _writable(self, text: str) -> str:
        """What the stream can encode: a dash it does not know must not end a run."""
        return text if self._speaks_unicode else text.replace("–", "-").encode("ascii", "replace").decode()
