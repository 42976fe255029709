"""Whole runs of a tiny model, for the tests that start them through `run.train`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import headway.in_process
from headway import config, run
from headway.batch import Batch
from headway.config import Resolved

GRADER = """
def digits(text, prompt):
    return sum(character.isdigit() for character in text) / 8

def broken(text, prompt):
    raise ValueError("no such thing as a grade")
"""
"""A user's module: a reward that differs within a group, and a grader that fails."""


def resolved(model_folder: Path, **settings: Any) -> Resolved:
    """The configuration of a small run on the CPU. settings: SECTION__KEY=VALUE."""
    values = {
        "model.path": model_folder,
        "model.device": "cpu",
        "data.source": "addition",
        "data.size": 12,
        "run.steps": 4,
        "score.scorer": "grader:digits",
        "generate.max_new_tokens": 8,
        "generate.lanes": 8,
        "run.threads": 1,
        "train.learning_rate": 1e-3,
        "schedule.batch_size": 4,
        "schedule.group_size": 2,
        "checkpoint.every": 2,
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    return config.resolve(None, [f"--{name}={value}" for name, value in values.items()])


class Killed(Exception):
    pass


class Watched:
    """`train_step`, which keeps what it trains and is killed once, before it trains `kill_at` (a version)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kill_at: int | None = None) -> None:
        self.batches: dict[int, Batch] = {}
        self._kill_at, self._train_step = kill_at, headway.in_process.train_step
        monkeypatch.setattr(headway.in_process, "train_step", self)

    def __call__(self, trainer: Any, critic: Any, objective: Any, batch: Batch, **options: Any) -> Any:
        if batch.version == self._kill_at:
            self._kill_at = None
            raise Killed
        self.batches[batch.version] = batch  # what a resume trains again takes the place of what was lost
        return self._train_step(trainer, critic, objective, batch, **options)

    def trained(self) -> Counter[tuple[str, int]]:
        return Counter((r.prompt.uid, r.member) for batch in self.batches.values() for r in batch.rollouts)


DRAINED = {"data__epochs": 1, "run__steps": 99, "checkpoint__every": 2, "report__rollouts_per_step": 0}
"""12 prompts, 2 in a batch: 6 steps."""


def killed_and_resumed(settings: Resolved, out: Path, watched: Watched) -> None:
    with pytest.raises(Killed):
        run.train(settings, out)
    lost = [version for version in watched.batches if version >= 2]
    for version in lost:
        del watched.batches[version]
    run.train(settings, out, resume=True)
