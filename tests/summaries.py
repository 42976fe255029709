"""The summary of a trace, for tests that have no use for its timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.reports.summary import summarise, timeline
from headway.trace import Event


def summary_of(events: Sequence[Event], skip_steps: int = 0) -> dict[str, Any]:
    """As `summarise`, of the trace's own timeline."""
    return summarise(timeline(events), events, skip_steps)
