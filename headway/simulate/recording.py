"""What a run's trace says of how long things took, so that the run can be had again under another schedule.

What the trace does not know is drawn from what it knows, keyed by identity. A rollout that was cut short (by max_lag,
by a kill, by the end of the run) was at least that long: one that ran longer to its end stands in for it. A group that
never started is as one that did, member by member, so that answers to one prompt stay alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from headway.simulate.randomness import Uniforms, uniforms
from headway.trace import Event, read_trace
from headway.types import Outcome, UserError

Key = tuple[int, int]
"""Group and member of a rollout; version and number of an evaluation answer."""


@dataclass(frozen=True)
class Stay:
    """A rollout that ran to its end: tokens, and the time it held lanes for them, all stretches together."""

    tokens: float
    lane_s: float


@dataclass(frozen=True)
class Graded:
    """What a scorer said of a rollout, and how long it took to say it."""

    score_s: float
    outcome: Outcome
    reward: float | None


@dataclass
class Stays:
    """Rollouts, or evaluation answers, by key.

    whole: those that ran to their end; at_least: time in lanes of those that were seen, whole or not; graded: scores;
    draw: what stands in for the others is drawn with it.
    """

    draw: Uniforms
    whole: dict[Key, Stay] = field(default_factory=dict)
    at_least: dict[Key, float] = field(default_factory=dict)
    graded: dict[Key, Graded] = field(default_factory=dict)

    def stay(self, key: Key) -> Stay:
        return self.whole[self.stand_in(key)]

    def grade(self, key: Key) -> Graded | None:
        """Its own, that of its stand-in, or anyone's; None where no rollout was ever scored."""
        graded = self.graded.get(key) or self.graded.get(self.stand_in(key))
        if graded or not self.graded:
            return graded
        return self.graded[self._graded[int(self.draw(_number(key)) * len(self._graded))]]

    def stand_in(self, key: Key) -> Key:
        """The rollout that ran to its end which is taken for `key`: itself where it did. There has to be one."""
        if key in self.whole:
            return key
        outer, inner = key
        uniform = self.draw(_number(key))
        if key in self.at_least:
            return self._longer(self.at_least[key], uniform)
        if outer in self._outers_set:
            return self._longer(0.0, uniform)
        return self.stand_in((self._outers[int(self.draw(outer) * len(self._outers))], inner))

    def _longer(self, lane_s: float, uniform: float) -> Key:
        """One that held lanes for longer, any of them alike; the longest where none did."""
        first = min(bisect_right(self._lane_s, lane_s), len(self._lane_s) - 1)
        return self._by_lane_s[first + int(uniform * (len(self._lane_s) - first))]

    @cached_property
    def _by_lane_s(self) -> list[Key]:
        return sorted(self.whole, key=lambda key: (self.whole[key].lane_s, key))

    @cached_property
    def _lane_s(self) -> list[float]:
        return [self.whole[key].lane_s for key in self._by_lane_s]

    @cached_property
    def _graded(self) -> list[Key]:
        return sorted(self.graded)

    @cached_property
    def _outers_set(self) -> set[int]:
        return {outer for outer, _ in self.at_least}

    @cached_property
    def _outers(self) -> list[int]:
        return sorted(self._outers_set)


def _number(key: Key) -> int:
    """Its draw's. Groups have fewer members than this."""
    return key[0] * 1_000_003 + key[1]


@dataclass
class Durations:
    """Of something that happens once per version; those that were not seen are drawn from those that were."""

    draw: Uniforms
    seen_s: dict[int, float] = field(default_factory=dict)

    def __call__(self, version: int) -> float:
        """0 where it never happened."""
        if version in self.seen_s or not self.seen_s:
            return self.seen_s.get(version, 0.0)
        seen = [self.seen_s[other] for other in sorted(self.seen_s)]
        return seen[int(self.draw(version) * len(seen))]


@dataclass
class Recording:
    """A run's durations.

    rollouts, answers: to prompts and to held-out prompts; train, by the version a step began from; sync and save, by
    the version that was sent or saved; num_groups: how many groups the data hold, where the trace says so (None: no
    end, or not known); num_steps: train steps behind the newest weights.
    """

    rollouts: Stays
    answers: Stays
    train: Durations
    sync: Durations
    save: Durations
    num_groups: int | None = None

    @property
    def num_steps(self) -> int:
        return len(self.train.seen_s)


def read_recording(run_folder: Path, seed: int) -> Recording:
    """That of RUN/trace.jsonl. Raises UserError where there is none, or nothing to draw from."""
    path = run_folder / "trace.jsonl"
    if not path.is_file():
        raise UserError(f"{run_folder} is no run: it holds no trace.jsonl")
    try:
        return record(read_trace(path), seed)
    except UserError as error:
        raise UserError(f"{run_folder}: {error}") from None


def record(events: Iterable[Event], seed: int = 0) -> Recording:
    """The recording of a trace, whether the run was resumed or not. seed: of what is drawn.

    Raises UserError where no rollout ran to its end.
    """
    recorder = _Recorder(seed)
    for event in events:
        recorder.add(event)
    recorder.cut()
    if not recorder.recording.rollouts.whole:
        raise UserError("no rollout of the trace ran to its end, so none can be drawn from it")
    return recorder.recording


@dataclass(frozen=True)
class _Opened:
    stays: Stays
    key: Key
    at_s: float


class _Recorder:
    """Pairs the event that begins something with the one that ends it."""

    def __init__(self, seed: int) -> None:
        def draw(what: str) -> Uniforms:
            return uniforms(f"recording {what}", seed)

        self.recording = Recording(
            Stays(draw("rollouts")),
            Stays(draw("answers")),
            Durations(draw("train")),
            Durations(draw("sync")),
            Durations(draw("save")),
        )
        self._now_s = 0.0
        self._in_lanes: dict[int, _Opened] = {}
        self._scoring: dict[int, _Opened] = {}
        self._held_s: dict[Key, float] = {}
        self._held_when_saved_s: dict[int, dict[Key, float]] = {}
        self._began_s: dict[str, float] = {}

    def add(self, event: Event) -> None:
        if event.kind == "run":
            self.cut()
        self._now_s = event.at_s
        act = getattr(self, f"_on_{event.kind}", None)
        if act:
            act(event)

    def cut(self) -> None:
        """The process is gone: whatever was in a lane was at least this long."""
        for rollout in list(self._in_lanes):
            self._left_lane(rollout)
        self._scoring.clear()
        self._began_s.clear()

    def _on_run(self, event: Event) -> None:
        """A resume goes on from a checkpoint: rollouts of then have held lanes as long as they had then."""
        version = event.fields.get("version", 0)
        self._held_s = self._held_when_saved_s.get(version, {}).copy()
        recording = self.recording
        recording.train.seen_s = {v: s for v, s in recording.train.seen_s.items() if v < version}
        if event.fields.get("num_groups") is not None:
            recording.num_groups = event["num_groups"]

    # ---- lanes

    def _on_started(self, event: Event) -> None:
        opened = self._opened(event)
        if opened.stays is self.recording.rollouts:
            self._held_s.pop(opened.key, None)

    def _opened(self, event: Event) -> _Opened:
        recording, evaluation = self.recording, event["evaluation"]
        stays = recording.answers if evaluation else recording.rollouts
        key = (event["version"], event["group"]) if evaluation else (event["group"], event["member"])
        opened = self._in_lanes[event["rollout"]] = _Opened(stays, key, event.at_s)
        return opened

    _on_resumed = _opened

    def _left_lane(self, rollout: int) -> _Opened:
        """-> what it was. It was at least as long as it has held lanes by now."""
        opened = self._in_lanes.pop(rollout)
        at_least = opened.stays.at_least
        at_least[opened.key] = max(self._lane_s(opened), at_least.get(opened.key, 0.0))
        return opened

    def _lane_s(self, opened: _Opened) -> float:
        """How long it has held lanes by now, all stretches together."""
        before_s = self._held_s.get(opened.key, 0.0) if opened.stays is self.recording.rollouts else 0.0
        return before_s + self._now_s - opened.at_s

    def _on_paused(self, event: Event) -> None:
        opened = self._left_lane(event["rollout"])
        self._held_s[opened.key] = self._lane_s(opened)

    def _on_generated(self, event: Event) -> None:
        opened = self._left_lane(event["rollout"])
        self._scoring[event["rollout"]] = _Opened(opened.stays, opened.key, event.at_s)
        stay = Stay(event["tokens"], self._lane_s(opened))
        if event["finish"] != "interrupted" and min(stay.tokens, stay.lane_s) > 0:
            opened.stays.whole[opened.key] = stay

    def _on_aborted(self, event: Event) -> None:
        if event["lane"] is not None:
            self._left_lane(event["rollout"])

    def _on_lost(self, event: Event) -> None:
        """How long its engine took to lose it says nothing of its length."""
        opened = self._in_lanes.pop(event["rollout"])
        opened.stays.at_least.setdefault(opened.key, 0.0)

    def _on_scored(self, event: Event) -> None:
        if opened := self._scoring.pop(event["rollout"], None):
            graded = Graded(event.at_s - opened.at_s, event["outcome"], event["reward"])
            opened.stays.graded[opened.key] = graded

    # ---- the trainer

    def _on_taken(self, event: Event) -> None:
        self._began_s["train"] = event.at_s

    def _on_trained(self, event: Event) -> None:
        self.recording.train.seen_s[event["version"] - 1] = event.at_s - self._began_s.pop("train")

    def _on_publishing(self, event: Event) -> None:
        self._began_s["sync"] = event.at_s

    def _on_published(self, event: Event) -> None:
        self.recording.sync.seen_s[event["version"]] = event.at_s - self._began_s.pop("sync")

    def _on_saving(self, event: Event) -> None:
        self._began_s["save"] = event.at_s
        in_lanes = {
            opened.key: self._lane_s(opened)
            for opened in self._in_lanes.values()
            if opened.stays is self.recording.rollouts
        }
        self._held_when_saved_s[event["version"]] = {**self._held_s, **in_lanes}

    def _on_saved(self, event: Event) -> None:
        self.recording.save.seen_s[event["version"]] = event.at_s - self._began_s.pop("save")
