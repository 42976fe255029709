"""A run beside itself: its measured timeline, and the one that its schedule gives with the times of its trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.reports.record import RunRecord
from headway.reports.summary import summarise
from headway.reports.wording import percent
from headway.trace import Event

if TYPE_CHECKING:
    import plotly.graph_objects as go


def figure(run: RunRecord) -> go.Figure | None:
    """The simulated lanes and trainer, where the measured picture shows them, on the same stretches of time."""
    from headway.reports import gantt

    if not run.simulated:
        return None
    measured, again = gantt.drawing(run.timeline), run.simulated_timeline
    ended_s = max(run.timeline.total_s, again.total_s)
    windows = [*measured.windows[:-1], gantt.Window(measured.windows[-1].began_s, ended_s)]
    shown = gantt.drawing_of(again, windows)
    drawn = gantt.picture(shown, run.unit)
    gantt.add_view_buttons(drawn, gantt.views(run.timeline, windows))
    return drawn


def comparison(run: RunRecord) -> str:
    """Measured against simulated, in a sentence; empty without a simulation."""
    if not run.simulated:
        return ""
    again = summarise(run.simulated_timeline, run.simulated)
    measured_s, again_s = _last_published_s(run.events), _last_published_s(run.simulated)
    shares = [
        f"lanes {percent(of_run['lane_utilization'])} and trainer {percent(of_run['trainer_utilization'])} busy"
        for of_run in (run.figures, again)
    ]
    return (
        f"{len(again['batches'])} train steps took {measured_s:.4g} {run.unit} ({shares[0]}); simulated they take "
        f"{again_s:.4g} {run.unit}, {percent(again_s / measured_s)} of that ({shares[1]})."
        + (" What was trained again after a resume is in the measured time alone." if run.timeline.resumed_s else "")
    )


def _last_published_s(events: Sequence[Event]) -> float:
    """When the weights of the last train step were out."""
    return max(event.at_s for event in events if event.kind == "published")
