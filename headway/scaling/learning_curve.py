"""Learning curves out of files: the metrics of a run, or columns of a table."""

from __future__ import annotations

import csv
import io
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from headway.types import UserError, did_you_mean, nearest

Row = dict[str, Any]

METRICS = "metrics.jsonl"

RUN_X = ("trained_tokens", "seconds", "steps")
"""What compute may be of a run; each is counted from its beginning. The first is the default."""

HELD_OUT, SAMPLED = "greedy_accuracy", "reward_mean"
"""What the reward is of a run: of its evaluations, or, where they are too few, of its train steps."""

TABLE_X, TABLE_Y = "compute", "reward"
"""The columns of a table."""

NEIGHBOURS, PRIOR = 3, 4
"""Points on either side, and answers of the usual variance beside theirs, from which the noise of a point is told."""

MIN_COMPUTES = 6
"""Different computes that a fit needs: four parameters, and two more for an idea of the noise."""


@dataclass(frozen=True)
class Measured:
    """One point. spread: standard deviation of its noise, up to a factor that all points of a curve share."""

    compute: float
    reward: float
    spread: float = 1.0


@dataclass(frozen=True)
class LearningCurve:
    """points: in order of compute, at least one; ceiling: no reward can be above it, None: not known."""

    name: str
    x: str
    y: str
    points: Sequence[Measured]
    ceiling: float | None = None


@dataclass(frozen=True)
class _Table:
    """The rows of one file, and the names of its columns. is_run: Headway wrote it."""

    path: Path
    names: Sequence[str]
    rows: Sequence[Row]
    is_run: bool


def read(paths: Sequence[Path], x: str | None = None, y: str | None = None) -> list[LearningCurve]:
    """The learning curves of run folders, their metrics.jsonl, or tables (CSV with a header, or JSON lines).

    x: what counts as compute, one of RUN_X or a column; y: which metric or column the reward is. All curves have the
    same two. Raises UserError.
    """
    if len(set(paths)) < len(paths):
        raise UserError("a learning curve is given twice; nothing is to be learnt from comparing it with itself")
    tables = [_read_table(path) for path in paths]
    of_runs = _metric_of_runs([table for table in tables if table.is_run])
    curves = [_run_curve(t, x, y or of_runs) if t.is_run else _table_curve(t, x, y) for t in tables]
    for curve in curves[1:]:
        for axis, one, other in (("x", curves[0].x, curve.x), ("y", curves[0].y, curve.y)):
            if one != other:
                raise UserError(
                    f"{curves[0].name} has {one} and {curve.name} has {other} on its {axis} axis, which can't be "
                    f"compared; name a column that both have by --{axis}"
                )
    return curves


# ---- files


def _read_table(path: Path) -> _Table:
    file = path / METRICS if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise UserError(f"{path} holds no {METRICS}, so it is no run folder{_near(path, path.glob(f'*/{METRICS}'))}")
    if not file.is_file():
        raise UserError(f"there is no learning curve {path}{_near(path, _beside(path))}")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no text in UTF-8 ({error.reason} at byte {error.start})") from None
    if file.name == METRICS and not text.strip():
        raise UserError(f"{file} is empty: the run has trained nothing yet")
    names, rows = _json_rows(file, text) if text.lstrip().startswith("{") else _csv_rows(file, text)
    return _Table(path, names, rows, any(isinstance(row.get("version"), int) and "at_s" in row for row in rows))


def _beside(path: Path) -> Iterable[Path]:
    folder = path.parent
    return (*folder.glob("*.csv"), *folder.glob("*.jsonl"), *folder.glob(f"*/{METRICS}")) if folder.is_dir() else ()


def _near(path: Path, files: Iterable[Path]) -> str:
    """A hint: the run or table whose name is nearest."""
    known = {str(file.parent if file.name == METRICS else file): file for file in sorted(files)}
    return did_you_mean(*nearest(str(path), known))


def _json_rows(file: Path, text: str) -> tuple[list[str], list[Row]]:
    """The last line may be cut short: the run was killed, or is still writing it."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows: list[Row] = []
    for number, line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == lines[-1][0] and rows:
                break
            raise UserError(f"{file}, line {number} is no JSON object ({error.msg})") from None
        if not isinstance(row, dict):
            raise UserError(f"{file}, line {number} is no JSON object")
        rows.append(row)
    return list(dict.fromkeys(name for row in rows for name in row)), rows


def _csv_rows(file: Path, text: str) -> tuple[list[str], list[Row]]:
    try:
        lines = [line for line in csv.reader(io.StringIO(text), strict=True) if any(word.strip() for word in line)]
    except csv.Error as error:
        raise UserError(f"{file} is no CSV table ({error})") from None
    if not lines:
        raise UserError(f"{file} is empty; a table has a header, for instance {TABLE_X},{TABLE_Y}")
    names = [name.strip() for name in lines[0]]
    for number, line in enumerate(lines[1:], 1):
        if len(line) != len(names):
            raise UserError(f"{file}, row {number} has {_num(len(line), 'value')} for {_num(len(names), 'column')}")
    return names, [dict(zip(names, line, strict=True)) for line in lines[1:]]


def _num(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


# ---- a table's columns


def _table_curve(table: _Table, x: str | None, y: str | None) -> LearningCurve:
    x, y = x or TABLE_X, y or TABLE_Y
    for option, name in (("--x", x), ("--y", y)):
        if name not in table.names:
            near = did_you_mean(*nearest(name, table.names, cutoff=0.7))
            known = near or f"; it has {', '.join(table.names[:12])}"
            raise UserError(f"{table.path} has no column {name}{known}; name one by {option}")
    points = [
        Measured(_number(table.path, number, x, row[x]), _number(table.path, number, y, row[y]))
        for number, row in enumerate(table.rows, 1)
        if not _is_missing(row.get(x)) and not _is_missing(row.get(y))
    ]
    return _curve(table.path, x, y, points)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _number(path: Path, number: int, name: str, value: Any) -> float:
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"{path}, row {number}: {name} = {value!r} is no finite number; leave the row out")
    return found


def _curve(path: Path, x: str, y: str, points: Sequence[Measured], ceiling: float | None = None) -> LearningCurve:
    if not points:
        raise UserError(f"{path} has no row with both {x} and {y}")
    ordered = sorted(points, key=lambda point: point.compute)
    if ordered[0].compute < 0:
        raise UserError(f"{path}: {x} = {ordered[0].compute:g} is below 0, which no compute is")
    return LearningCurve(str(path), x, y, ordered, ceiling)


# ---- a run's rows


def _metric_of_runs(runs: Sequence[_Table]) -> str:
    """The held-out measure, if every run was evaluated often enough for a fit."""
    evaluated = [{row["version"] for row in _kept(run.rows) if _is_number(row.get(HELD_OUT))} for run in runs]
    return HELD_OUT if all(len(versions) >= MIN_COMPUTES for versions in evaluated) else SAMPLED


def _kept(rows: Iterable[Row]) -> list[Row]:
    """One row per train step and one per evaluation. Where a resume set the version back, what came after is lost."""
    kept: dict[tuple[bool, int], Row] = {}
    newest = 0
    for row in rows:
        if not isinstance(row.get("version"), int):
            continue
        version, is_step = row["version"], "evaluated" not in row
        if is_step and version <= newest:
            kept = {key: old for key, old in kept.items() if key[1] < version}
        newest = version if is_step else newest
        kept[is_step, version] = row
    return list(kept.values())


def _run_curve(run: _Table, x: str | None, y: str) -> LearningCurve:
    x = x or RUN_X[0]
    if x not in RUN_X:
        raise UserError(
            f"--x {x}: the compute of a run is counted in {', '.join(RUN_X)}{did_you_mean(*nearest(x, RUN_X))}"
        )
    rows = _kept(run.rows)
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if _is_number(value)))
    if y not in names:
        raise UserError(f"{run.path} has no metric {y}{did_you_mean(*nearest(y, names))}")
    spent = _Spent(run.path, [row for row in rows if "step_s" in row], x)
    rows = [row for row in rows if _is_number(row.get(y))]
    spreads = _spreads(rows, y)
    points = [Measured(spent.at(_version_behind(r)), float(r[y]), s) for r, s in zip(rows, spreads, strict=True)]
    return _curve(run.path, x, y, points, ceiling=1.0 if y == HELD_OUT else None)


def _spreads(rows: Sequence[Row], y: str) -> list[float]:
    """Of a mean over answers: their standard deviation over the root of their number. Of other metrics none is known.

    The variance of a point's answers is told from those of its neighbours and not from its own: where few are wrong, a
    point that has fewer by luck would count for more, and draw the curve up.
    """
    if y == HELD_OUT:
        known = [(row["evaluated"], row[y] * (1 - row[y])) for row in rows]
    elif y == SAMPLED and all(_is_number(row.get("reward_std")) and row.get("num_rollouts") for row in rows):
        known = [(row["num_rollouts"], row["reward_std"] ** 2) for row in rows]
    else:
        return [1.0] * len(rows)
    usual = math.fsum(variance for _, variance in known) / len(known)
    if usual == 0:
        return [1.0] * len(rows)
    return [math.sqrt(_variance_beside(known, index, usual) / num) for index, (num, _) in enumerate(known)]


def _variance_beside(known: Sequence[tuple[int, float]], index: int, usual: float) -> float:
    """Of the answers of up to NEIGHBOURS points on either side, and PRIOR more that have the usual variance."""
    beside = [*known[max(index - NEIGHBOURS, 0) : index], *known[index + 1 : index + 1 + NEIGHBOURS]]
    total = math.fsum(num * variance for num, variance in beside) + PRIOR * usual
    return total / (sum(num for num, _ in beside) + PRIOR)


def _version_behind(row: Row) -> float:
    """The weights that a row's figures are of: an evaluation's own, or those that sampled the tokens of a batch.

    The batch of the step that makes version v is taken when v - 1 is the newest; its tokens lag behind that.
    """
    return row["version"] if "evaluated" in row else row["version"] - 1 - row.get("token_lag", 0.0)


class _Spent:
    """How much compute the weights of a version have taken."""

    def __init__(self, path: Path, steps: Sequence[Row], x: str) -> None:
        name = {"trained_tokens": "trained_tokens", "seconds": "step_s"}.get(x)
        self._versions, self._totals = [0.0], [0.0]
        for row in steps:
            amount: Any = 1.0 if name is None else row.get(name)
            if not _is_number(amount):
                raise UserError(f"{path}: the step of version {row['version']} has no {name}; give another --x")
            self._versions.append(row["version"])
            self._totals.append(self._totals[-1] + amount)

    def at(self, version: float) -> float:
        """Between two versions, in proportion; before the first step, 0."""
        after = bisect_left(self._versions, version)
        if after == 0 or after == len(self._versions):
            return self._totals[0 if after == 0 else -1]
        before = after - 1
        low, high = self._versions[before], self._versions[after]
        share = (version - low) / (high - low)
        return self._totals[before] + share * (self._totals[after] - self._totals[before])


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
