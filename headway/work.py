"""What an engine or a trainer computed, how long that took, and the most memory it held: what a plan is compared with.

Work of one kind is gathered by its size, so that a log stays short, and its sums stay exact.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of what `getrusage` counts resident memory in."""


def peak_resident_bytes() -> int:
    """The most memory that this process has held at once, its libraries included: since `forget_peak` where the system
    can forget (Linux), else since it began.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


def forget_peak() -> None:
    """What the process held before counts no longer."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@dataclass
class _Sums:
    num: int = 0
    seconds: float = 0.0
    amounts: dict[str, int] = field(default_factory=dict)


class WorkLog:
    """Of one worker, written and read on its own thread.

    kind: what was done ("wait": nothing was); share: of the machine's cores that it had then, below 1 while another
    worked beside it; amounts: what its time depends on.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[object, ...], _Sums] = {}

    def add(self, kind: str, *, share: float, seconds: float, **amounts: int) -> None:
        sizes = tuple(amount.bit_length() for amount in amounts.values())
        sums = self._sums.setdefault((kind, share, *sizes), _Sums())
        sums.num += 1
        sums.seconds += seconds
        for name, amount in amounts.items():
            sums.amounts[name] = sums.amounts.get(name, 0) + amount

    @contextmanager
    def timed(self, kind: str, share: float, **amounts: int) -> Iterator[None]:
        """What is done within the block."""
        began = time.perf_counter()
        yield
        self.add(kind, share=share, seconds=time.perf_counter() - began, **amounts)

    def take(self) -> list[dict[str, Any]]:
        """What has been added since it was last taken: sums over work of one kind, share and size."""
        found = [
            {"kind": kind, "share": share, "num": sums.num, "seconds": sums.seconds, **sums.amounts}
            for (kind, share, *_), sums in self._sums.items()
        ]
        self._sums = {}
        return found
