"""A run in numbers, from its trace: time, utilisation, throughput, lags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from headway.trace import Event


@dataclass(frozen=True)
class Span:
    """Something that holds a lane, or the trainer, or the sync during [began_s, ended_s).

    version: of a rollout, the weights it began with; of a train step, the weights it began from; of a sync, the
    weights that were sent. finished: False where the run stopped first. tokens: sampled (rollouts only).
    """

    name: str
    began_s: float
    ended_s: float
    version: int
    evaluation: bool = False
    finished: bool = True
    tokens: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """Who was busy when. Spans still open when the run ended (or was killed) are clipped there."""

    lanes: list[list[Span]]
    trainer: list[Span]
    total_s: float
    syncs: list[Span] = field(default_factory=list)
    resumed_s: list[float] = field(default_factory=list)


def continuous(events: Sequence[Event]) -> list[Event]:
    """The events on one time axis: what a resumed run wrote, from 0 again, follows what was written before.

    The pause between a kill and its resume isn't in the trace and has no length here. Events that are on one axis
    already stay as they are.
    """
    shifted: list[Event] = []
    offset_s = ended_s = 0.0
    for event in events:
        if event.kind == "run" and shifted:
            offset_s = ended_s - event.at_s
        shifted.append(replace(event, at_s=event.at_s + offset_s) if offset_s else event)
        ended_s = max(ended_s, shifted[-1].at_s)
    return shifted


@dataclass(frozen=True)
class Step:
    """One train step that the newest weights stem from: its batch as taken, and its end."""

    taken: Event
    trained: Event


def kept_steps(events: Sequence[Event]) -> list[Step]:
    """The train steps behind the newest weights, in order: a resume forgets those after its checkpoint."""
    steps: dict[int, Step] = {}
    taken: Event | None = None
    for event in events:
        if event.kind == "run":
            resumed, taken = event.fields.get("version", 0), None
            steps = {version: step for version, step in steps.items() if version <= resumed}
        elif event.kind == "taken":
            taken = event
        elif event.kind == "trained":
            assert taken is not None, "a step was trained that had taken no batch"
            steps[event["version"]] = Step(taken, event)
    return [steps[version] for version in sorted(steps)]


def kept_evaluations(events: Sequence[Event]) -> list[Event]:
    """The `evaluated` events of the versions behind the newest weights, one per version, in order."""
    evaluations: dict[int, Event] = {}
    for event in events:
        if event.kind == "run":
            resumed = event.fields.get("version", 0)
            evaluations = {version: old for version, old in evaluations.items() if version <= resumed}
        elif event.kind == "evaluated":
            evaluations[event["version"]] = event
    return [evaluations[version] for version in sorted(evaluations)]


def timeline(events: Sequence[Event]) -> Timeline:
    """Lanes (rollouts, and evaluation answers named e0, e1 ...), trainer (train steps) and syncs of a trace."""
    assert events, "an empty trace has no timeline"
    assert events[0].kind == "run", "a trace begins with its run event"
    events = continuous(events)
    spans = _OpenSpans(max(event["lanes"] for event in events if event.kind == "run"))
    for event in events:
        spans.add(event)
    total_s = max(event.at_s for event in events)
    spans.cut(total_s)
    resumed_s = [event.at_s for event in events[1:] if event.kind == "run"]
    return Timeline(spans.lanes, spans.trainer, total_s, spans.syncs, resumed_s)


class _OpenSpans:
    """Pairs the event that opens a span with the one that closes it."""

    def __init__(self, num_lanes: int) -> None:
        self.lanes: list[list[Span]] = [[] for _ in range(num_lanes)]
        self.trainer: list[Span] = []
        self.syncs: list[Span] = []
        self._rollouts: dict[int, Event] = {}
        self._step: Event | None = None
        self._sync: Event | None = None

    def add(self, event: Event) -> None:
        if event.kind == "run":
            self.cut(event.at_s)
        elif event.kind == "started":
            self._rollouts[event["lane"]] = event
        elif event.kind == "generated":
            lane = event["lane"]
            self.lanes[lane].append(_rollout_span(self._rollouts.pop(lane), event.at_s, tokens=event["tokens"]))
        elif event.kind == "taken":
            self._step = event
        elif event.kind == "trained":
            self._close_step(event.at_s)
        elif event.kind == "publishing":
            self._sync = event
        elif event.kind == "published":
            self._close_sync(event.at_s)

    def cut(self, at_s: float) -> None:
        """The process is gone: whatever was open ended here, unfinished."""
        for lane, started in self._rollouts.items():
            self.lanes[lane].append(_rollout_span(started, at_s, finished=False))
        self._rollouts.clear()
        self._close_step(at_s, finished=False)
        self._close_sync(at_s, finished=False)

    def _close_step(self, at_s: float, finished: bool = True) -> None:
        if self._step:
            version = self._step["version"]
            self.trainer.append(Span(f"s{version}", self._step.at_s, at_s, version, finished=finished))
            self._step = None

    def _close_sync(self, at_s: float, finished: bool = True) -> None:
        if self._sync:
            version = self._sync["version"]
            self.syncs.append(Span(f"v{version}", self._sync.at_s, at_s, version, finished=finished))
            self._sync = None


def _rollout_span(started: Event, ended_s: float, *, finished: bool = True, tokens: float = 0.0) -> Span:
    evaluation = bool(started["evaluation"])
    name = f"e{started['group']}" if evaluation else f"r{started['rollout']}"
    return Span(name, started.at_s, ended_s, started["version"], evaluation, finished, tokens)


def summarise(events: Sequence[Event]) -> dict[str, Any]:
    """The figures of `headway simulate --json`.

    total: when the run ended; lane_utilization: busy lane time / (lanes x total); trainer_utilization: train time /
    total; throughput: trained rollouts / total; mean_lag and max_lag over trained rollouts; batches: start indices
    per step, in the order in which they were taken; lags: per step, in that order. In a resumed run, steps that were
    trained again count once, and the time they took counts as busy time.
    """
    lines = timeline(events)
    total = lines.total_s
    taken = [step.taken for step in kept_steps(events)]
    lags = [lag for event in taken for lag in event["lags"]]
    busy = sum(span.ended_s - span.began_s for lane in lines.lanes for span in lane)
    training = sum(span.ended_s - span.began_s for span in lines.trainer)
    return {
        "total": total,
        "lane_utilization": busy / (len(lines.lanes) * total) if total else 0.0,
        "trainer_utilization": training / total if total else 0.0,
        "throughput": len(lags) / total if total else 0.0,
        "mean_lag": fmean(lags) if lags else 0.0,
        "max_lag": max(lags, default=0),
        "batches": [event["rollouts"] for event in taken],
        "lags": [event["lags"] for event in taken],
    }
