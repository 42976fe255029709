"""The one event record that real and simulated runs both write.

Every transition of the ledger is one `Event`; everything a run later shows (the progress line, `metrics.jsonl`, the
timeline, utilisation, lags) is read from these. On disk a trace is a JSON-lines file, one event a line.

| kind | when | fields |
|---|---|---|
| `run` | first, and again when a run is resumed | lanes, batch_size, group_size, redundant, iteration_tokens, steps, num_groups (None: no end of the data), the fields of `schedule.policy.Rules`, lag_bound, seed, version, clock, unsound (reasons) |
| `started` | a rollout is handed to a lane | rollout, group, member, lane, version, evaluation (held-out and greedy) |
| `generated` | its lane is free again, and it is whole | rollout, lane, prompt, tokens, prompt_tokens, versions ([version, tokens] runs), finish, why (of an interrupted one: max_lag or deadline) |
| `paused` | its lane is free again, and it will go on | rollout, lane, tokens (so far), reason (iteration_tokens or training) |
| `resumed` | it goes on in a lane | as `started` |
| `restored` | after the `run` of a resume: it is there again, out of the checkpoint, under a new number | rollout, group, member, tokens (so far), finish and outcome (None: it has paused) |
| `aborted` | it is thrown away | rollout, group, lane (None: it held none any more), tokens (what it had come to), reason |
| `lost` | the engine has none of it any more | rollout, group, lane, num (how often this answer was lost; 0: it was wanted no more), reason |
| `scored` | its scorer has answered | rollout, group, outcome, reward |
| `restarted` | all members of a group begin again | group, num (of its restarts), reason |
| `failed` | a group can't be trained; its slots are released | group, prompt, rollouts, tokens, reason |
| `dropped` | a finished group is too old; its slots are released | group, prompt, rollouts, tokens, reason, lag |
| `filtered` | all its rewards are the same; its slots are released | group, prompt, rollouts, tokens, reason, reward |
| `taken` | the idle trainer takes a batch | version, groups, rollouts, lags, token_lag |
| `retired` | a prompt was answered right so often that it is not asked again | group, prompt |
| `trained` | a train step ended | version (the new one), metrics |
| `publishing` | the new weights leave the trainer | version |
| `published` | every engine has acknowledged them | version |
| `saving`, `saved` | a checkpoint is begun, and is whole on disk | version |
| `evaluated` | an evaluation is complete | version, num, num_unscored, num_correct, mean_reward |
| `ended` | the run is over | reason |

A rollout that begins again is a new one, with a number of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from headway.types import UserError


@dataclass(frozen=True, slots=True)
class Event:
    """What happened (`kind`), when (`at_s`, seconds or units since the run began), and its fields."""

    kind: str
    at_s: float
    fields: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def to_json(self) -> str:
        return _ENCODER.encode({"kind": self.kind, "at_s": self.at_s, **self.fields})

    @staticmethod
    def from_json(line: str) -> Event:
        """The event of a line of a trace file. Raises ValueError for any other line."""
        record = json.loads(line)
        if not isinstance(record, dict) or not {"kind", "at_s"} <= record.keys():
            raise ValueError("no object with a kind and at_s")
        return Event(record.pop("kind"), record.pop("at_s"), record)


_ENCODER = json.JSONEncoder(separators=(",", ":"))
"""Made once: `json.dumps` makes one for every event that has no spaces in it."""


class Trace:
    """Hands each event to everyone who listens, in the order they subscribed."""

    def __init__(self, *listeners: Callable[[Event], object]) -> None:
        self._listeners = list(listeners)

    def subscribe(self, listener: Callable[[Event], object]) -> None:
        self._listeners.append(listener)

    def emit(self, kind: str, at_s: float, **fields: Any) -> None:
        event = Event(kind, at_s, fields)
        for listener in self._listeners:
            listener(event)


class TraceFile:
    """A listener that appends each event to a JSON-lines file and flushes, so a killed run keeps what it wrote."""

    def __init__(self, path: Path) -> None:
        self._file = open_lines(path)

    def __call__(self, event: Event) -> None:
        self._file.write(event.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def open_lines(path: Path) -> TextIO:
    """A file of lines, made if need be and open for appending. A last line that a kill cut short goes first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        written = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(written.rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def read_trace(path: Path) -> list[Event]:
    """All whole events of a trace file. A last line cut short by a kill is left out; another bad line is an error."""
    return list(_events(path))


def _events(path: Path) -> Iterator[Event]:
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield Event.from_json(line)
        except ValueError as error:
            if number == len(lines):
                return
            raise UserError(f"{path}:{number} is not a trace event ({error}); is it a Headway trace?") from None
