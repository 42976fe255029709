"""A run in numbers, from its trace: time, utilisation, throughput, lags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from headway.trace import Event


@dataclass(frozen=True)
class Span:
    """Something that holds a lane, or the trainer, during [began_s, ended_s)."""

    name: str
    began_s: float
    ended_s: float
    version: int


@dataclass(frozen=True)
class Timeline:
    """Who was busy when. Spans still open when the run ended are clipped there."""

    lanes: list[list[Span]]
    trainer: list[Span]
    total_s: float


def timeline(events: Sequence[Event]) -> Timeline:
    """Lanes (rollouts, and examination answers named e0, e1 ...) and trainer (train steps) of a trace."""
    num_lanes = _header(events)["lanes"]
    total_s = events[-1].at_s
    lanes: list[list[Span]] = [[] for _ in range(num_lanes)]
    trainer: list[Span] = []
    open_lanes: dict[int, Event] = {}
    open_step: Event | None = None
    for event in events:
        if event.kind == "started":
            open_lanes[event["lane"]] = event
        elif event.kind == "generated":
            lanes[event["lane"]].append(_rollout_span(open_lanes.pop(event["lane"]), event.at_s))
        elif event.kind == "taken":
            open_step = event
        elif event.kind == "trained" and open_step:
            trainer.append(Span(f"s{open_step['version']}", open_step.at_s, event.at_s, open_step["version"]))
            open_step = None
    for lane, event in open_lanes.items():
        lanes[lane].append(_rollout_span(event, total_s))
    if open_step:
        trainer.append(Span(f"s{open_step['version']}", open_step.at_s, total_s, open_step["version"]))
    return Timeline(lanes, trainer, total_s)


def _rollout_span(started: Event, ended_s: float) -> Span:
    name = f"e{started['group']}" if started["examination"] else f"r{started['rollout']}"
    return Span(name, started.at_s, ended_s, started["version"])


def _header(events: Sequence[Event]) -> Event:
    assert events and events[0].kind == "run", "a trace begins with its run event"
    return events[0]


def summarise(events: Sequence[Event]) -> dict[str, Any]:
    """The figures of `headway simulate --json`.

    total: when the last step's weights were out; lane_utilization: busy lane time / (lanes x total);
    trainer_utilization: train time / total; throughput: trained rollouts / total; mean_lag and max_lag over trained
    rollouts; batches: start indices per step, in the order in which they were taken; lags: per step, in that order.
    """
    lines = timeline(events)
    total = lines.total_s
    taken = [event for event in events if event.kind == "taken"]
    num_trained_steps = sum(event.kind == "trained" for event in events)
    trained = taken[:num_trained_steps]
    lags = [lag for event in trained for lag in event["lags"]]
    busy = sum(span.ended_s - span.began_s for lane in lines.lanes for span in lane)
    training = sum(span.ended_s - span.began_s for span in lines.trainer)
    return {
        "total": total,
        "lane_utilization": busy / (len(lines.lanes) * total) if total else 0.0,
        "trainer_utilization": training / total if total else 0.0,
        "throughput": len(lags) / total if total else 0.0,
        "mean_lag": fmean(lags) if lags else 0.0,
        "max_lag": max(lags, default=0),
        "batches": [event["rollouts"] for event in trained],
        "lags": [event["lags"] for event in trained],
    }
