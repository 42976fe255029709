"""Several runs, one after the other, each in a process of its own, and what they measured.

A run that is already there whole is not run again, so an experiment that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from headway.types import UserError

RECIPE = Path("recipes/quickstart.toml")
PROCESS = "process.json"
"""What is kept of a run's process; it is there only when the run is whole."""


@dataclass(frozen=True)
class Arm:
    """One of the runs that are compared.

    name: of its folder; words: settings as on the command line; command: the module and words that train it.
    """

    name: str
    words: tuple[str, ...] = ()
    command: tuple[str, ...] = ("headway", "train")


@dataclass(frozen=True)
class Outcome:
    """What a run left: a row of metrics per version, its outcome in figures, or what it died of."""

    arm: Arm
    rows: list[dict[str, Any]]
    figures: Mapping[str, Any]
    failure: str = ""

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Versions and values of a metric, where it was measured."""
        points = [(row["version"], row[name]) for row in self.rows if row.get(name) is not None]
        return [version for version, _ in points], [value for _, value in points]

    def last(self, name: str, num: int = 10) -> float | None:
        """The mean of a metric over the last `num` steps that have it."""
        values = self.column(name)[1][-num:]
        return sum(values) / len(values) if values else None

    @property
    def greedy(self) -> float | None:
        """Greedy accuracy on held-out prompts, at the end."""
        evaluations = self.figures.get("greedy") or [{}]
        return evaluations[-1].get("accuracy")


def recipe_without(section: str, recipe: Path, out: Path) -> Path:
    """A copy of a recipe without one of its sections, so that an arm's own defaults hold."""
    document = tomlkit.parse(recipe.read_text(encoding="utf-8"))
    document.pop(section, None)
    out.mkdir(parents=True, exist_ok=True)
    path = out / recipe.name
    path.write_text(tomlkit.dumps(document), encoding="utf-8")
    return path


def run_all(arms: Sequence[Arm], recipe: Path, out: Path, shared: Sequence[str] = ()) -> list[Outcome]:
    """Run every arm into a folder of its own under `out`. An arm that fails is kept with its reason."""
    outcomes = []
    for place, arm in enumerate(arms, start=1):
        folder, began_s = out / arm.name, time.monotonic()
        print(f"[{place}/{len(arms)}] {arm.name} ...", end=" ", flush=True)
        failure = "" if (folder / PROCESS).is_file() else _run(arm, recipe, folder, shared)
        outcomes.append(_read(arm, folder, failure))
        reward = outcomes[-1].last("reward_mean")
        said = failure or f"last rewards {'none' if reward is None else format(reward, '.3f')}"
        print(f"{said} ({time.monotonic() - began_s:.0f} s)", flush=True)
    return outcomes


def _run(arm: Arm, recipe: Path, folder: Path, shared: Sequence[str]) -> str:
    """-> "" or the last line of what it said when it failed."""
    shutil.rmtree(folder, ignore_errors=True)
    module, *verb = arm.command
    words = [sys.executable, "-m", module, *verb, str(recipe), "--run.out", str(folder), *shared, *arm.words]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)  # not process.wait(): the peak of this one child is wanted
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        lines = [line for line in said.read().splitlines() if line.strip()]
    if process.returncode == 0:
        peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        (folder / PROCESS).write_text(json.dumps({"peak_memory_bytes": peak_bytes}))
        return ""
    return lines[-1] if lines else f"exit status {process.returncode}"


def _read(arm: Arm, folder: Path, failure: str) -> Outcome:
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    figures: dict[str, Any] = {}
    for path in (folder / "run.json", folder / PROCESS):
        figures |= json.loads(path.read_text()) if path.is_file() else {}
    return Outcome(arm, rows, figures, failure)


def main_words(argv: Sequence[str], usage: str) -> Path:
    """The folder that an experiment was told to use (its only word), made if it is not there."""
    if len(argv) > 1 or any(word.startswith("-") for word in argv):
        raise UserError(usage)
    out = Path(argv[0] if argv else usage.split()[-1].strip("[]"))
    out.mkdir(parents=True, exist_ok=True)
    return out
