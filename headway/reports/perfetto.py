"""A run as a Chrome trace, which ui.perfetto.dev and chrome://tracing load.

Four processes: generate (a thread per lane), train (steps, checkpoints), sync, score (a thread per answer that is
scored at the same time, evaluations, what befell groups). Times are whole microseconds since the run began; a
simulation's unit counts as a second. Flow arrows lead from a rollout to the train step that took it.

The format is the "Trace Event Format" of Chromium: an object whose `traceEvents` each have name, ph (X: something that
takes time, C: counters, M: names, s and f: ends of a flow, i: a moment), pid, tid and ts.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.reports.fates import Life, Stretch
from headway.reports.record import RunRecord, read_run
from headway.reports.summary import Span
from headway.trace import Event

GENERATE, TRAIN, SYNC, SCORE = 1, 2, 3, 4
PROCESSES = {GENERATE: "generate", TRAIN: "train", SYNC: "sync", SCORE: "score"}
STEPS, SAVES = 1, 2
EVALUATIONS, BEFELL = 1, 2
FIRST_SCORER = 3

MOMENTS = ("failed", "dropped", "filtered", "restarted", "lost", "retired")
"""Events shown as moments of the score process."""

TraceEvent = dict[str, Any]


def write_perfetto(run_folder: Path, path: Path) -> Path:
    """Write the Chrome trace of RUN/ to `path` -> it. Raises UserError when RUN/ is no run folder."""
    run = read_run(run_folder)
    header = {name: value for name, value in run.header.fields.items() if value is not None}
    document = {"traceEvents": trace_events(run), "displayTimeUnit": "ms", "otherData": header}
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    return path


def trace_events(run: RunRecord) -> list[TraceEvent]:
    """Names first, then everything in order of time."""
    lines = run.timeline
    timed = [
        *(_stretch(stretch) for life in lines.lives for stretch in life.stretches),
        *(_step(span) for span in lines.trainer),
        *(_span(SYNC, 1, f"sync of version {span.version}", span) for span in lines.syncs),
        *_saves(run.events),
        *_evaluations(run.events),
        *_scores(run.events),
        *_moments(run.events),
        *_counters(run.events),
        *_flows(lines.lives, lines.trainer),
    ]
    timed.sort(key=lambda event: event["ts"])
    return [*_names(len(lines.lanes), timed), *timed]


def _us(at_s: float) -> int:
    return round(1e6 * at_s)


def _complete(pid: int, tid: int, name: str, began_s: float, ended_s: float, **args: Any) -> TraceEvent:
    began, ended = _us(began_s), _us(ended_s)
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": began, "dur": ended - began, "args": args}


def _span(pid: int, tid: int, name: str, span: Span) -> TraceEvent:
    return _complete(pid, tid, name, span.began_s, span.ended_s, version=span.version, finished=span.finished)


def _lane(lane: int) -> int:
    return lane + 1


# ---- what takes time


def _stretch(stretch: Stretch) -> TraceEvent:
    life = stretch.life
    answer = f"evaluation answer {life.group}" if life.evaluation else f"rollout {stretch.rollout}"
    return _complete(
        GENERATE,
        _lane(stretch.lane),
        answer,
        stretch.began_s,
        stretch.ended_s,
        group=life.group,
        member=life.member,
        version=stretch.version,
        tokens=life.tokens,
        finish=life.finish,
        resumed=stretch.resumed,
        ended_by=stretch.ended_by,
        fate=life.fate,
    )


def _step(span: Span) -> TraceEvent:
    return _span(TRAIN, STEPS, f"train step {span.version + 1}", span)


def _saves(events: Sequence[Event]) -> Iterator[TraceEvent]:
    began: Event | None = None
    for event in events:
        if event.kind == "saving":
            began = event
        elif began and event.kind in ("saved", "run", "ended"):
            name = f"checkpoint {began['version']}"
            yield _complete(TRAIN, SAVES, name, began.at_s, event.at_s, whole=event.kind == "saved")
            began = None


def _evaluations(events: Sequence[Event]) -> Iterator[TraceEvent]:
    """From the first answer that is started to the last that is scored."""
    began_s: float | None = None
    for event in events:
        if event.kind == "started" and event["evaluation"]:
            began_s = event.at_s if began_s is None else began_s
        elif event.kind == "run":
            began_s = None
        elif event.kind == "evaluated":
            fields = {name: event[name] for name in ("num", "num_correct", "num_unscored", "mean_reward")}
            name = f"evaluation of version {event['version']}"
            yield _complete(SCORE, EVALUATIONS, name, event.at_s if began_s is None else began_s, event.at_s, **fields)
            began_s = None


def _scores(events: Sequence[Event]) -> Iterator[TraceEvent]:
    """From the end of an answer to its score, each in the first free row."""
    open_scores: dict[int, tuple[int, float]] = {}
    free: list[int] = []
    num_rows = 0
    for event in events:
        if event.kind == "run":
            open_scores, free, num_rows = {}, [], 0
        elif event.kind == "generated":
            num_rows += not free
            row = heapq.heappop(free) if free else num_rows - 1
            open_scores[event["rollout"]] = (row, event.at_s)
        elif event.kind in ("scored", "aborted") and event["rollout"] in open_scores:
            row, began_s = open_scores.pop(event["rollout"])
            heapq.heappush(free, row)
            if event.kind == "scored":
                args = {"group": event["group"], "outcome": event["outcome"], "reward": event["reward"]}
                name = f"score of rollout {event['rollout']}"
                yield _complete(SCORE, FIRST_SCORER + row, name, began_s, event.at_s, **args)


# ---- moments, counters, arrows, names


def _moments(events: Sequence[Event]) -> Iterator[TraceEvent]:
    for event in events:
        if event.kind in MOMENTS:
            who = f"rollout {event['rollout']}" if event.kind == "lost" else f"group {event['group']}"
            moment = {"ph": "i", "s": "t", "pid": SCORE, "tid": BEFELL, "ts": _us(event.at_s)}
            yield {**moment, "name": f"{event.kind}: {who}", "args": {"reason": event.fields.get("reason", "")}}


def _counters(events: Sequence[Event]) -> Iterator[TraceEvent]:
    counts = _Counts()
    for event in events:
        for name, values in counts.changed(event):
            yield {"name": name, "ph": "C", "pid": TRAIN, "tid": 0, "ts": _us(event.at_s), "args": values}


class _Counts:
    """What stands in the schedule, after each event that changes it."""

    def __init__(self) -> None:
        self._group_size, self._num_members = 1, 1
        self._last_s = 0.0
        self._forget()

    def _forget(self) -> None:
        self._running: set[int] = set()
        self._paused: set[int] = set()
        self._scored: Counter[int] = Counter()
        self._finished: Counter[int] = Counter()
        self._ready: set[int] = set()
        self._tokens = 0.0

    def changed(self, event: Event) -> Iterator[tuple[str, dict[str, float]]]:
        before = len(self._running), len(self._paused), len(self._ready)
        self._follow(event)
        if (len(self._running), len(self._paused)) != before[:2]:
            yield "rollouts in flight", {"running": len(self._running), "paused": len(self._paused)}
        if len(self._ready) != before[2]:
            yield "ready groups", {"groups": len(self._ready)}
        if event.kind == "taken" and event["lags"]:
            yield "lag", {"mean": sum(event["lags"]) / len(event["lags"]), "max": max(event["lags"])}
        if event.kind == "trained":
            passed_s = event.at_s - self._last_s
            yield "throughput", {"tokens per unit of time": self._tokens / passed_s if passed_s else 0.0}
            self._last_s, self._tokens = event.at_s, 0.0

    def _follow(self, event: Event) -> None:
        kind, rollout, group = event.kind, event.fields.get("rollout"), event.fields.get("group")
        if kind == "run":
            self._group_size = event.fields.get("group_size", 1)
            self._num_members = self._group_size + event.fields.get("redundant", 0)
            self._forget()
            self._last_s = event.at_s
        elif kind in ("started", "resumed") and rollout is not None:
            self._paused.discard(rollout)
            self._running.add(rollout)
        elif kind in ("generated", "paused", "aborted", "lost") and rollout is not None:
            self._running.discard(rollout)
            self._paused.discard(rollout)
            if kind == "paused":
                self._paused.add(rollout)
            if kind == "generated":
                self._tokens += event["tokens"]
        elif kind in ("scored", "restored") and group is not None and (rollout is None or rollout >= 0):
            self._finish(group, event.fields.get("outcome"), rollout)
        elif kind in ("failed", "dropped", "filtered", "restarted") and group is not None:
            self._drop(group)
        elif kind == "taken":
            for taken in event["groups"]:
                self._drop(taken)

    def _finish(self, group: int, outcome: str | None, rollout: int | None) -> None:
        if outcome is None:
            if rollout is not None:
                self._paused.add(rollout)
            return
        self._finished[group] += 1
        self._scored[group] += outcome == "scored"
        whole = self._finished[group] >= self._num_members and self._scored[group] >= min(2, self._group_size)
        if self._scored[group] >= self._group_size or whole:
            self._ready.add(group)

    def _drop(self, group: int) -> None:
        self._ready.discard(group)
        self._scored.pop(group, None)
        self._finished.pop(group, None)


def _flows(lives: Sequence[Life], steps: Sequence[Span]) -> Iterator[TraceEvent]:
    """From the last stretch of a trained rollout to its train step; the ends lie just inside of both."""
    of_version = {span.version + 1: span for span in steps if span.finished}
    for number, life in enumerate(lives):
        step = of_version.get(life.fate_in or 0)
        if life.fate != "trained" or not life.stretches or step is None:
            continue
        last = life.stretches[-1]
        flow = {"name": "trained", "cat": "trained", "id": number}
        left = max(_us(last.began_s), _us(last.ended_s) - 1)
        yield {**flow, "ph": "s", "pid": GENERATE, "tid": _lane(last.lane), "ts": left}
        yield {**flow, "ph": "f", "bp": "e", "pid": TRAIN, "tid": STEPS, "ts": max(left, _us(step.began_s))}


def _names(num_lanes: int, timed: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    for pid, name in PROCESSES.items():
        yield _name("process_name", pid, 0, name=name)
        yield _name("process_sort_index", pid, 0, sort_index=pid)
    threads = {(GENERATE, _lane(lane)): f"lane {lane}" for lane in range(num_lanes)}
    threads |= {(TRAIN, STEPS): "train steps", (TRAIN, SAVES): "checkpoints", (SYNC, 1): "sync"}
    threads |= {(SCORE, EVALUATIONS): "evaluations", (SCORE, BEFELL): "what befell groups"}
    last = max((event["tid"] for event in timed if event["pid"] == SCORE), default=0)
    threads |= {(SCORE, tid): f"scorer {tid - FIRST_SCORER}" for tid in range(FIRST_SCORER, last + 1)}
    for (pid, tid), name in threads.items():
        yield _name("thread_name", pid, tid, name=name)
        yield _name("thread_sort_index", pid, tid, sort_index=tid)


def _name(kind: str, pid: int, tid: int, **args: Any) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}
