"""A run in numbers, from its trace: time, utilisation, throughput, lags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from headway.reports import goodput, lengths
from headway.reports.fates import EndedBy, Fate, Life, Stretch, read_fates
from headway.trace import Event
from headway.types import UserError


@dataclass(frozen=True)
class Span:
    """Something that holds a lane, or the trainer, or the sync during [began_s, ended_s).

    version: of a rollout, the weights under which it was handed to the lane; of a train step, the weights it began
    from; of a sync, the weights that were sent. finished: False where the run stopped first. Of rollouts: tokens, all
    that it has sampled; fate, what became of it in the end; ended_by, what freed the lane; resumed: it had held one
    before; interrupted: it was whole then, by force.
    """

    name: str
    began_s: float
    ended_s: float
    version: int
    evaluation: bool = False
    finished: bool = True
    tokens: float = 0.0
    fate: Fate | None = None
    ended_by: EndedBy | None = None
    resumed: bool = False
    interrupted: bool = False


@dataclass(frozen=True)
class Timeline:
    """Who was busy when. Spans still open when the run ended (or was killed) are clipped there.

    lives: what became of each rollout (`fates`).
    """

    lanes: list[list[Span]]
    trainer: list[Span]
    total_s: float
    syncs: list[Span] = field(default_factory=list)
    resumed_s: list[float] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)


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
    """Lanes (rollouts, and evaluation answers named e0, e1 ...), trainer (train steps) and syncs of a trace.

    A rollout that paused has several spans.
    """
    assert events, "an empty trace has no timeline"
    assert events[0].kind == "run", "a trace begins with its run event"
    events = continuous(events)
    total_s = max(event.at_s for event in events)
    fates = read_fates(events)
    spans = _OpenSpans()
    for event in events:
        spans.add(event)
    spans.cut(total_s)
    return Timeline(
        lanes=[[_rollout_span(stretch) for stretch in lane] for lane in fates.lanes],
        trainer=spans.trainer,
        total_s=total_s,
        syncs=spans.syncs,
        resumed_s=[event.at_s for event in events[1:] if event.kind == "run"],
        lives=fates.lives,
    )


class _OpenSpans:
    """Pairs the event that opens a train step or a sync with the one that closes it."""

    def __init__(self) -> None:
        self.trainer: list[Span] = []
        self.syncs: list[Span] = []
        self._step: Event | None = None
        self._sync: Event | None = None

    def add(self, event: Event) -> None:
        if event.kind == "run":
            self.cut(event.at_s)
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


def _rollout_span(stretch: Stretch) -> Span:
    life = stretch.life
    return Span(
        name=f"e{life.group}" if life.evaluation else f"r{stretch.rollout}",
        began_s=stretch.began_s,
        ended_s=stretch.ended_s,
        version=stretch.version,
        evaluation=life.evaluation,
        finished=stretch.ended_by != "cut",
        tokens=life.tokens,
        fate=life.fate,
        ended_by=stretch.ended_by,
        resumed=stretch.resumed,
        interrupted=stretch.ended_by == "generated" and life.finish == "interrupted",
    )


def summarise(lines: Timeline, events: Sequence[Event], skip_steps: int = 0) -> dict[str, Any]:
    """The figures of `headway simulate --json`, of a trace and its timeline.

    total: when the run ended; measured_from: where the window begins that all other figures are of, [the end of train
    step `skip_steps`, the end of the run]; lane_utilization: busy lane time / (lanes x window); trainer_utilization:
    train time / window; throughput: trained rollouts / window; mean_lag and max_lag over trained rollouts, token_lag
    over their tokens; over_run_ahead: the share of them whose lag is above run_ahead; lag_bound: what the schedule
    proves (None: no bound); trained_length and started_length: mean length of the trained rollouts, and of all that
    have ended, whatever became of them (None where there are none); goodput: as `goodput.figures`; batches: start
    indices per step, in the order in which they were taken; lags: per step, in that order.

    In a resumed run, steps that were trained again count once, and the time they took counts as busy time. Raises
    UserError where that leaves no train step.
    """
    steps = kept_steps(continuous(events))
    window = Window(_end_of(steps, skip_steps), lines.total_s)
    taken = [step.taken for step in steps[skip_steps:]]
    lags = [lag for event in taken for lag in event["lags"]]
    header = next(event for event in reversed(events) if event.kind == "run")
    run_ahead = header.fields.get("run_ahead", 0)
    return {
        "total": lines.total_s,
        "measured_from": window.began_s,
        "lane_utilization": _share(window.busy_s(*lines.lanes), len(lines.lanes) * window.length_s),
        "trainer_utilization": _share(window.busy_s(lines.trainer), window.length_s),
        "throughput": _share(len(lags), window.length_s),
        "mean_lag": fmean(lags) if lags else 0.0,
        "max_lag": max(lags, default=0),
        "token_lag": _token_lag(taken, lines.lives),
        "over_run_ahead": _share(sum(lag > run_ahead for lag in lags), len(lags)),
        "lag_bound": header.fields.get("lag_bound"),
        "trained_length": lengths.mean(lengths.trained(lines.lives, after_step=skip_steps)),
        "started_length": lengths.mean(lengths.started(lines.lives, after_s=window.began_s)),
        "goodput": goodput.figures(lines.lives, len(lines.lanes), began_s=window.began_s, ended_s=window.ended_s),
        "batches": [event["rollouts"] for event in taken],
        "lags": [event["lags"] for event in taken],
    }


@dataclass(frozen=True)
class Window:
    """What is measured: [began_s, ended_s]."""

    began_s: float
    ended_s: float

    @property
    def length_s(self) -> float:
        return self.ended_s - self.began_s

    def busy_s(self, *rows: Sequence[Span]) -> float:
        """Time that the spans of all rows held, within the window."""
        spans = (span for row in rows for span in row if span.ended_s > self.began_s)
        return sum(span.ended_s - max(span.began_s, self.began_s) for span in spans)


def _end_of(steps: Sequence[Step], skip_steps: int) -> float:
    if skip_steps == 0:
        return 0.0
    if skip_steps >= len(steps):
        raise UserError(
            f"{skip_steps} skipped train steps leave nothing to measure of a run of {len(steps)}; skip fewer"
        )
    return steps[skip_steps - 1].trained.at_s


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _token_lag(taken: Sequence[Event], lives: Sequence[Life]) -> float:
    """Mean lag over the trained tokens."""
    tokens = dict[int, float]()
    for life in lives:
        if life.fate == "trained" and life.fate_in is not None:
            tokens[life.fate_in] = tokens.get(life.fate_in, 0.0) + life.tokens
    weighed = [(event["token_lag"], tokens.get(event["version"] + 1, 0.0)) for event in taken]
    return _share(sum(lag * num for lag, num in weighed), sum(num for _, num in weighed))
