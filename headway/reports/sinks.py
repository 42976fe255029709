"""Where the rows of `metrics.jsonl` go besides: TensorBoard, Weights & Biases, trackio. Each is an optional extra.

A sink gets every row's numbers as they come; a row's version is its place on the x axis. Nothing is sent over a network
by itself: TensorBoard and trackio write files, and wandb is offline unless WANDB_MODE says otherwise.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from headway.reports.metrics import is_number
from headway.types import UserError

PROJECT = "headway"


class Sink(Protocol):
    """Takes the rows of a run."""

    def __call__(self, row: Mapping[str, Any]) -> None:
        """A row of `StepMetrics`: of a train step, or of an evaluation."""
        ...

    def close(self) -> None:
        """All rows are there; what is buffered is written out."""
        ...


Settings = Mapping[str, Any]
"""The effective configuration: section -> key -> value."""


def require(names: Sequence[str]) -> None:
    """Raises UserError for a sink whose package is missing, with the extra that brings it."""
    for name in names:
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None:  # a folder of that name is no package
            raise UserError(
                f"report.sinks {name} needs the package {name}, which is not installed: pip install 'headway[{name}]', "
                f"or leave {name} out of report.sinks"
            )


@contextlib.contextmanager
def opened(names: Sequence[str], run_folder: Path, settings: Settings) -> Iterator[list[Sink]]:
    """The sinks of a run whose folder is there. They are closed however the block is left."""
    with contextlib.ExitStack() as sinks:
        made = [SINKS[name](run_folder, settings) for name in names]
        for sink in made:
            sinks.callback(sink.close)
        yield made


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What of a row can be drawn. Version is left out: it is the x axis."""
    return {name: value for name, value in row.items() if name != "version" and is_number(value)}


class TensorBoard:
    """Event files in RUN/tensorboard, written by the package tensorboard alone: no torch, no TensorFlow."""

    def __init__(self, run_folder: Path, settings: Settings) -> None:
        summary = importlib.import_module("tensorboard.summary")
        folder = run_folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = summary.Writer(summary.DirectoryOutput(str(folder)))

    def __call__(self, row: Mapping[str, Any]) -> None:
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["version"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project headway in RUN/wandb; `wandb sync` sends an offline one later."""

    def __init__(self, run_folder: Path, settings: Settings) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=PROJECT,
            name=run_folder.resolve().name,
            dir=str(run_folder),
            config=dict(settings),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True, console="off"),  # the terminal is the progress line's
        )
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")  # an evaluation may come after the next version's step

    def __call__(self, row: Mapping[str, Any]) -> None:
        self._run.log({**numbers(row), "version": row["version"]})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of the project headway in trackio's own folder (TRACKIO_DIR)."""

    def __init__(self, run_folder: Path, settings: Settings) -> None:
        self._trackio = importlib.import_module("trackio")
        self._trackio.init(project=PROJECT, name=run_folder.resolve().name, config=dict(settings))

    def __call__(self, row: Mapping[str, Any]) -> None:
        self._trackio.log(numbers(row), step=row["version"])

    def close(self) -> None:
        self._trackio.finish()


SINKS: dict[str, Callable[[Path, Settings], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
"""Word of report.sinks -> what makes the sink; the word is also the name of its package and of the extra."""
