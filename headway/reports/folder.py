"""The folder a run is kept in, from the writing side (`record` is the reading side).

| file | what |
|---|---|
| `config.toml` | the effective configuration, each value with its origin |
| `objective.txt` | what is trained, in words: formula, parts, needs |
| `trace.jsonl` | every event (`headway.trace`) |
| `metrics.jsonl` | a row of figures per train step and per evaluation |
| `rollouts.jsonl` | some trained rollouts of every step, token by token |
| `evaluations.jsonl` | every greedy answer to a held-out prompt |
| `work.jsonl` | by train step: what engine and trainer computed, by size, and how long it took |
| `checkpoints/` | what the run can be resumed from |
| `model/` | the trained policy, a Hugging Face folder |
| `run.json` | the outcome |
| `index.html` | the page |
| `trace.perfetto.json` | the trace as Perfetto reads it, once `headway export` was asked for it |
| `tensorboard/`, `wandb/` | what those of report.sinks wrote |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from headway.config import Resolved, Run
from headway.reports.metrics import JsonLines, StepMetrics
from headway.reports.record import OBJECTIVE, WORK
from headway.reports.sinks import Sink
from headway.trace import Trace, TraceFile
from headway.types import UserError

CHECKPOINTS = "checkpoints"


class RunFolder:
    """A run's folder, open for writing; files are appended to, so a resumed run goes on in its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollouts = JsonLines(path / "rollouts.jsonl")
        self.evaluations = JsonLines(path / "evaluations.jsonl")
        self.work = JsonLines(path / WORK)
        self._metrics = JsonLines(path / "metrics.jsonl")
        self._trace = TraceFile(path / "trace.jsonl")

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def model(self) -> Path:
        return self.path / "model"

    def listen_to(self, trace: Trace, sinks: Sequence[Sink] = ()) -> None:
        """Keep every event, and every row of metrics; each sink gets the rows too."""
        trace.subscribe(self._trace)

        def keep(row: dict[str, Any]) -> None:
            for sink in (self._metrics, *sinks):
                sink(row)

        trace.subscribe(StepMetrics(keep))

    def write_config(self, resolved: Resolved) -> None:
        (self.path / "config.toml").write_text(resolved.to_toml(), encoding="utf-8")

    def write_objective(self, text: str) -> None:
        (self.path / OBJECTIVE).write_text(text + "\n", encoding="utf-8")

    def close(self) -> None:
        with contextlib.ExitStack() as files:  # closes each one, even when another can't be written out
            for file in (self.rollouts, self.evaluations, self.work, self._metrics, self._trace):
                files.callback(file.close)


def choose_folder(run: Run) -> Path:
    """`run.out`, or a new folder under runs/ named after the run and the moment.

    Raises UserError for a folder that already holds a run: nothing is ever written over.
    """
    path = Path(run.out) if run.out else Path("runs") / f"{run.name}-{datetime.now():%Y%m%d-%H%M%S}"
    if (path / "trace.jsonl").exists():
        raise UserError(f"{path} already holds a run: give another --run.out, or go on with it by --resume {path}")
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise UserError(f"{nearest} is no folder, so the run can't be kept in {path}; give another --run.out")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{nearest} can't be written to, so the run can't be kept in {path}; give another --run.out")
    return path
