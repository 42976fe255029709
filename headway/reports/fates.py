"""What became of every rollout of a run: the lanes it held, how long it came to be, and its fate.

| fate | what |
|---|---|
| `trained` | a train step behind the newest weights took it |
| `dropped`, `filtered` | its group gave its slots back: it was too old, or all its rewards were the same |
| `failed` | it had no score, or too few of its group had one |
| `aborted` | thrown away: it was redundant, began again, or nobody wanted it any more |
| `lost` | its engine had none of it any more |
| `killed` | the run was killed, and resumed without it |
| `waiting` | it was whole when the run ended (or as far as the trace goes), and no train step had taken it |
| `in_flight` | it held a lane or had paused then |
| `evaluation` | an answer to a held-out prompt |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headway.trace import Event

Fate = Literal[
    "trained",
    "dropped",
    "filtered",
    "failed",
    "aborted",
    "lost",
    "killed",
    "waiting",
    "in_flight",
    "evaluation",
]

FATES_IN_WORDS: dict[Fate, str] = {
    "trained": "trained",
    "dropped": "dropped: too old",
    "filtered": "filtered out: equal rewards",
    "failed": "could not be scored",
    "aborted": "thrown away",
    "lost": "lost by the engine",
    "killed": "lost in a kill",
    "waiting": "whole, not yet trained",
    "in_flight": "in flight at the end",
    "evaluation": "evaluation",
}

BEGINS_AGAIN = ("max_lag", "new weights")
"""Reasons for which a rollout is aborted that is to begin again."""

EndedBy = Literal["generated", "paused", "aborted", "lost", "cut"]
"""What freed a lane: the kind of the event, or `cut`: the run was over, or was killed."""

Key = tuple[int, int]
"""Group and member: the rollout, however often it begins again."""


@dataclass(slots=True, eq=False)
class Stretch:
    """A rollout's stay in a lane, [began_s, ended_s). rollout: its number then; version: as it was handed over."""

    life: Life
    rollout: int
    lane: int
    began_s: float
    version: int
    resumed: bool
    ended_s: float = 0.0
    ended_by: EndedBy = "cut"

    @property
    def lane_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(slots=True, eq=False)
class Life:
    """One rollout, from its start on.

    tokens: sampled, as far as the trace says; finish: None while it is not whole; why: of an interrupted one;
    began_again: a later rollout answers in its place, or was to; started_in, ended_in, fate_in: the train step that was
    the next to end when it started, when its length was final and when its fate was sealed (None: that never was). A
    trained one's fate_in is the step that took it.
    """

    rollout: int
    group: int
    member: int
    evaluation: bool
    started_s: float
    started_in: int
    stretches: list[Stretch] = field(default_factory=list)
    tokens: float = 0.0
    finish: str | None = None
    why: str = ""
    fate: Fate = "in_flight"
    began_again: bool = False
    ended_s: float | None = None
    ended_in: int | None = None
    fate_in: int | None = None

    @property
    def lane_s(self) -> float:
        """Time it held lanes."""
        return sum(stretch.lane_s for stretch in self.stretches)

    @property
    def has_length(self) -> bool:
        """It has ended with a length of its own: to the end, interrupted, or thrown away with nobody in its place."""
        ended = self.finish is not None or self.fate == "aborted"
        return ended and not (self.evaluation or self.began_again or self.fate in ("killed", "lost"))


@dataclass(frozen=True)
class Fates:
    """lives: every rollout and evaluation answer, in order of start; lanes: who held each lane, in order of time."""

    lives: list[Life]
    lanes: list[list[Stretch]]


def read_fates(events: Sequence[Event]) -> Fates:
    """The rollouts of a trace whose events are on one time axis."""
    reader = _Reader(max(event["lanes"] for event in events if event.kind == "run"))
    for event in events:
        reader.add(event)
    reader.end(max(event.at_s for event in events))
    return Fates(reader.lives, reader.lanes)


class _Reader:
    """Follows the events of rollouts. What a resume forgets of a killed run is killed, unless its checkpoint had it."""

    def __init__(self, num_lanes: int) -> None:
        self.lives: list[Life] = []
        self.lanes: list[list[Stretch]] = [[] for _ in range(num_lanes)]
        self._held: dict[int, Stretch] = {}
        self._by_number: dict[int, Life] = {}
        self._newest: dict[Key, Life] = {}
        self._unsealed: dict[Key, Life] = {}
        self._of_group: dict[int, list[Life]] = {}
        self._saved: dict[int, dict[Key, Life]] = {}
        self._checkpoint: dict[Key, Life] = {}
        self._step = 1

    def add(self, event: Event) -> None:
        act = getattr(self, f"_on_{event.kind}", None)
        if act:
            act(event)

    def cut(self, at_s: float) -> None:
        """The process is gone: whoever held a lane held it until here."""
        for lane in list(self._held):
            self._free(lane, at_s, "cut")

    def end(self, at_s: float) -> None:
        """The trace is over: a batch whose train step had not ended is not trained."""
        self.cut(at_s)
        for life in self.lives:
            if life.fate == "trained" and life.fate_in == self._step:
                life.fate, life.fate_in = "waiting", None

    # ---- lanes

    def _hold(self, life: Life, event: Event, *, resumed: bool) -> None:
        stretch = Stretch(life, life.rollout, event["lane"], event.at_s, event["version"], resumed)
        life.stretches.append(stretch)
        self._held[stretch.lane] = stretch

    def _free(self, lane: int, at_s: float, ended_by: EndedBy) -> Life | None:
        stretch = self._held.pop(lane, None)
        if stretch is None:
            return None
        stretch.ended_s, stretch.ended_by = at_s, ended_by
        self.lanes[lane].append(stretch)
        return stretch.life

    # ---- rollouts

    def _on_started(self, event: Event) -> None:
        life = self._born(event, event["rollout"])
        if life.evaluation:
            life.fate = "evaluation"
        else:
            self._succeed(life)
        self._hold(life, event, resumed=False)

    def _born(self, event: Event, rollout: int) -> Life:
        evaluation = event.fields.get("evaluation", False)
        life = Life(rollout, event["group"], event["member"], evaluation, event.at_s, self._step)
        self.lives.append(life)
        self._by_number[rollout] = life
        return life

    def _succeed(self, life: Life) -> None:
        """It answers for its group and member from now on."""
        key = life.group, life.member
        before = self._newest.get(key)
        if before:
            before.began_again = True
        self._newest[key] = self._unsealed[key] = life
        self._of_group.setdefault(life.group, []).append(life)

    def _on_resumed(self, event: Event) -> None:
        life = self._by_number.get(event["rollout"])
        if life is None:  # a trace that does not say what was restored
            return self._on_started(event)
        return self._hold(life, event, resumed=True)

    def _on_restored(self, event: Event) -> None:
        """It goes on under a new number; what it had sampled after its checkpoint is lost."""
        life = self._born(event, event["rollout"])
        life.tokens, life.finish = event["tokens"], event["finish"]
        before = self._checkpoint.get((life.group, life.member))
        if before:
            life.started_s, life.started_in = before.started_s, before.started_in
            life.ended_s, life.ended_in = before.ended_s, before.ended_in
            life.stretches, before.stretches = before.stretches, []
            for stretch in life.stretches:
                stretch.life = life
            before.tokens = max(0.0, before.tokens - life.tokens)
            self._seal(before, "killed")
        if life.finish is not None:
            life.fate = "waiting"
        self._succeed(life)

    def _on_generated(self, event: Event) -> None:
        life = self._free(event["lane"], event.at_s, "generated")
        if life is None:
            return
        life.tokens, life.finish = event["tokens"], event.fields.get("finish", "stop")
        life.why = event.fields.get("why", "")
        self._end(life, event.at_s)
        if not life.evaluation:
            life.fate = "waiting"

    def _on_paused(self, event: Event) -> None:
        life = self._free(event["lane"], event.at_s, "paused")
        if life:
            life.tokens = event["tokens"]

    def _on_aborted(self, event: Event) -> None:
        lane = event["lane"]
        life = self._by_number.get(event["rollout"]) if lane is None else self._free(lane, event.at_s, "aborted")
        if life is None:
            return
        life.tokens, life.began_again = event["tokens"], life.began_again or event["reason"] in BEGINS_AGAIN
        if life.ended_s is None:
            self._end(life, event.at_s)
        self._seal(life, "aborted")

    def _on_lost(self, event: Event) -> None:
        life = self._free(event["lane"], event.at_s, "lost")
        if life:
            self._end(life, event.at_s)
            self._seal(life, "lost")

    def _end(self, life: Life, at_s: float) -> None:
        life.ended_s, life.ended_in = at_s, self._step

    # ---- groups

    def _on_released(self, event: Event) -> None:
        fate: Fate = event.kind  # type: ignore[assignment]
        self._seal_all(self._of_group.pop(event["group"], ()), fate)

    _on_failed = _on_dropped = _on_filtered = _on_released

    def _on_taken(self, event: Event) -> None:
        for number in event["rollouts"]:
            life = self._by_number.get(number)
            if life and life.fate == "waiting":
                self._seal(life, "trained", event["version"] + 1)
        for group in event["groups"]:
            self._seal_all(self._of_group.pop(group, ()), "failed")

    def _seal_all(self, lives: Iterable[Life], fate: Fate) -> None:
        """Of those that are whole. One in flight is aborted as soon as its lane is free."""
        for life in lives:
            if life.fate == "waiting":
                self._seal(life, fate)

    def _seal(self, life: Life, fate: Fate, step: int | None = None) -> None:
        if life.evaluation:
            return
        life.fate, life.fate_in = fate, step or self._step
        key = life.group, life.member
        if self._unsealed.get(key) is life:
            del self._unsealed[key]

    # ---- the run

    def _on_trained(self, event: Event) -> None:
        self._step = event["version"] + 1

    def _on_saving(self, event: Event) -> None:
        self._saved[event["version"]] = dict(self._unsealed)

    def _on_run(self, event: Event) -> None:
        """A resume: what its checkpoint did not hold is gone, steps that were trained after it too."""
        if not self.lives:
            return
        self.cut(event.at_s)
        version = event.fields.get("version", 0)
        self._step = version + 1
        for life in self.lives:
            undone = life.fate == "trained" and life.fate_in is not None and life.fate_in > version
            if undone or life.fate in ("waiting", "in_flight"):
                self._seal(life, "killed")
        self._checkpoint = self._saved.get(version, {})
        self._by_number.clear()
        self._of_group.clear()
        self._newest.clear()
        self._unsealed.clear()
