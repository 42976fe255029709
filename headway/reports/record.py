"""What a run folder holds, read once: the trace is the authority, whatever else is missing or cut is said."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.reports.alarms import Alarm, alarms
from headway.reports.metrics import StepMetrics, is_number
from headway.reports.summary import Timeline, continuous, kept_evaluations, kept_steps, summarise, timeline
from headway.trace import Event, read_trace
from headway.types import UserError, did_you_mean, nearest

Row = dict[str, Any]
"""Numbers by name; of one train step, or of several neighbours joined. A value that isn't finite is None."""

MAX_POINTS = 1000
"""Steps drawn one by one; a longer run has neighbours joined."""

TRACE = "trace.jsonl"
OBJECTIVE = "objective.txt"
WORK = "work.jsonl"


@dataclass(frozen=True)
class RunRecord:
    """One run.

    events: the trace on one time axis; config: the effective configuration as nested tables (empty if it can't be
    read) and config_text, as written; objective_text: what was trained, in words; steps: one row per train step behind
    the newest weights; evaluations: their `evaluated` events; answers: the greedy answers behind them; rollouts: the
    kept rollouts in order of training; work: by train step what was computed and how long it took; result: run.json;
    notes: what was wrong. simulated: the trace of the same run, simulated from this one (empty where it wasn't), and
    not_simulated: why it can't be.
    """

    folder: Path
    events: list[Event]
    config: dict[str, Any]
    config_text: str
    objective_text: str
    steps: list[Row]
    evaluations: list[Event]
    answers: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]
    work: list[dict[str, Any]]
    result: dict[str, Any]
    notes: list[str]
    simulated: Sequence[Event] = ()
    not_simulated: str = ""

    @cached_property
    def header(self) -> Event:
        """The newest `run` event."""
        return next(event for event in reversed(self.events) if event.kind == "run")

    @property
    def ended(self) -> str | None:
        """Why the run was over; None if it was killed or still goes on."""
        return self.events[-1]["reason"] if self.events[-1].kind == "ended" else None

    @property
    def unsound(self) -> list[str]:
        """What objective.unsound overrode in any part of the run: once it was, all that came after stems from it."""
        said = [reason for event in self.events if event.kind == "run" for reason in event.fields.get("unsound", ())]
        return list(dict.fromkeys(said))

    @cached_property
    def drawn_steps(self) -> list[Row]:
        """`steps` as curves show them: at most MAX_POINTS rows."""
        return thinned(self.steps, MAX_POINTS)

    @property
    def group_size(self) -> int:
        return self.header.fields.get("group_size", 1)

    @cached_property
    def alarms(self) -> list[Alarm]:
        """As `alarms.alarms`."""
        return alarms(self.steps, self.group_size)

    @property
    def unit(self) -> str:
        """Of every time: seconds, or a simulation's own unit."""
        return "units" if self.header.fields.get("clock") == "virtual" else "s"

    @cached_property
    def timeline(self) -> Timeline:
        return timeline(self.events)

    @cached_property
    def figures(self) -> dict[str, Any]:
        """As `summary.summarise`."""
        return summarise(self.timeline, self.events)

    @cached_property
    def simulated_timeline(self) -> Timeline:
        """Of `simulated`, where it was."""
        return timeline(self.simulated)

    @cached_property
    def observed_rewards(self) -> tuple[float, float] | None:
        """The lowest and the highest reward that a scorer gave."""
        rewards = [event["reward"] for event in self.events if event.kind == "scored"]
        given = [reward for reward in rewards if reward is not None]
        return (min(given), max(given)) if given else None

    def setting(self, key: str, default: Any = None) -> Any:
        """The effective value of `section.name`, or `default` where it isn't set."""
        section, name = key.split(".")
        return self.config.get(section, {}).get(name, default)


def read_run(folder: Path) -> RunRecord:
    """The record of RUN/. Raises UserError when the folder is missing or holds no trace of a run."""
    events = _read_events(folder)
    notes: list[str] = []
    config_text = _text(folder / "config.toml")
    return RunRecord(
        folder=folder,
        events=events,
        config=_parse_config(config_text, notes),
        config_text=config_text,
        objective_text=_text(folder / OBJECTIVE),
        steps=_step_rows(events, _json_lines(folder / "metrics.jsonl", notes)),
        evaluations=kept_evaluations(events),
        answers=_json_lines(folder / "evaluations.jsonl", notes),
        rollouts=_kept_rollouts(_json_lines(folder / "rollouts.jsonl", notes)),
        work=_json_lines(folder / WORK, notes),
        result=_parse_result(folder / "run.json", notes),
        notes=notes,
    )


def _read_events(folder: Path) -> list[Event]:
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}{_nearest_run(folder)}")
    if not (folder / TRACE).is_file():
        raise UserError(f"{folder} holds no {TRACE}, so it is no run folder{_nearest_run(folder)}")
    try:
        events = continuous(read_trace(folder / TRACE))
    except (UnicodeDecodeError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / TRACE} is no trace of a run ({error})") from None
    if not events or events[0].kind != "run":
        raise UserError(f"{folder / TRACE} doesn't begin with a run: the run died before its loop began")
    return events


def _nearest_run(folder: Path) -> str:
    """A hint: a run inside the folder, or the one beside it whose name is nearest (else the newest)."""
    runs = _runs_in(folder) or _runs_in(folder.parent)
    if not runs:
        return f"; no run lies in {folder.parent} either"
    near = nearest(folder.name, [run.name for run in runs])
    newest = max(runs, key=lambda run: (run / TRACE).stat().st_mtime)
    return did_you_mean(newest.parent / near[0] if near else newest)


def _runs_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"*/{TRACE}")) if folder.is_dir() else []


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _parse_config(text: str, notes: list[str]) -> dict[str, Any]:
    if not text:
        notes.append("config.toml is missing: what the run was set to is not known.")
        return {}
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        notes.append(f"config.toml can't be read ({error}).")
        return {}
    return {name: table for name, table in tables.items() if isinstance(table, dict)}


def _parse_result(path: Path, notes: list[str]) -> dict[str, Any]:
    text = _text(path)
    try:
        result = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        notes.append(f"run.json can't be read ({error}).")
        return {}
    return result if isinstance(result, dict) else {}


def _json_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; lines that a kill cut short are left out and counted in `notes`."""
    objects: list[dict[str, Any]] = []
    num_bad = 0
    for line in _text(path).split("\n"):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            num_bad += 1
            continue
        if isinstance(value, dict) and isinstance(value.get("version"), int):
            objects.append(value)
        else:
            num_bad += 1
    if num_bad:
        notes.append(f"{num_bad} line{'s' * (num_bad > 1)} of {path.name} can't be read and {_were(num_bad)} left out.")
    return objects


def _were(num: int) -> str:
    return "was" if num == 1 else "were"


def _step_rows(events: Sequence[Event], metrics: Iterable[Row]) -> list[Row]:
    """One row per kept step: what the trace says, and beside it whatever only metrics.jsonl knows."""
    of_trace: dict[int, Row] = {}

    def keep(row: Row) -> None:
        if "step_s" in row:
            of_trace[row["version"]] = row

    listener = StepMetrics(keep)
    for event in events:
        listener(event)
    of_file = {row["version"]: row for row in metrics if "evaluated" not in row}
    kept = [step.trained["version"] for step in kept_steps(events)]
    return [_numbers({**of_file.get(version, {}), **of_trace[version]}) for version in kept]


def _numbers(row: Row) -> Row:
    return {name: value if is_number(value) else None for name, value in row.items()}


def _kept_rollouts(rollouts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """In order of training. Where a resume set the version back, what was trained after its checkpoint goes."""
    kept: list[dict[str, Any]] = []
    for rollout in rollouts:
        while kept and kept[-1]["version"] > rollout["version"]:
            kept.pop()
        kept.append(rollout)
    return kept


def thinned(rows: Sequence[Row], limit: int) -> list[Row]:
    """At most `limit` rows: neighbours are joined into their mean (highs keep the highest, lows the lowest)."""
    width = math.ceil(len(rows) / limit)
    if width <= 1:
        return list(rows)
    return [_joined(rows[first : first + width]) for first in range(0, len(rows), width)]


def _joined(rows: Sequence[Row]) -> Row:
    joined: Row = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        joined[name] = _pick(name)(values) if values else None
    joined["version"] = rows[-1]["version"]
    return joined


def _pick(name: str) -> Any:
    if name.endswith(("_max", "_q99", "_q95", "_steps", "max_abs_log_ratio")):
        return max
    if name.endswith(("_min", "_q01", "_q05")):
        return min
    return _mean


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
