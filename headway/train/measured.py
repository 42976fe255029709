"""A learner's units of work, on the cores it gets and with the time they take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from headway.models.cores import Cores
from headway.models.rows import Rows
from headway.work import WorkLog


@contextmanager
def unit(cores: Cores, log: WorkLog, kind: str, rows: Rows | None = None) -> Iterator[None]:
    """What is done within the block is a unit of work, noted in `log`, and so is the wait for cores before it; rows:
    those that it passes over, if any.
    """
    amounts = {} if rows is None else {"tokens": len(rows.ids_T), "pairs": rows.num_pairs}
    began = time.perf_counter()
    with cores.unit() as share:
        log.add("wait", share=1.0, seconds=time.perf_counter() - began)
        with log.timed(kind, share, **amounts):
            yield
