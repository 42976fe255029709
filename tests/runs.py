"""Whole runs of a tiny model, for the tests that start them through `run.train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway import config
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
