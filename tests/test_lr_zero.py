"""B14: with learning rate 0 nothing changes, round after round, through the real stages and the real loop.

Five rounds of generate -> score -> prepare -> train -> sync, at temperature 0.7, on a model whose config asks for
dropout. Dropout left on, a stale cache or a temperature forgotten on one side would show in the ratios of the first
round, or of a later one.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headway import clock, config, run
from headway.in_process import InProcessStages, Parts, compose
from headway.models.weights import fingerprint
from headway.reports.folder import RunFolder
from headway.trace import Event, Trace
from headway.types import Prompt, Score
from tests import tiny

ROUNDS = 5


class LengthScorer:
    """A reward that differs within a group: gradients are not 0, so that only the learning rate is."""

    async def score(self, prompt: Prompt, text: str) -> Score:
        return Score(len(text) / 10)

    async def close(self) -> None: ...


def configuration(folder: Path, run_ahead: float) -> config.Config:
    values = {
        "model.path": folder,
        "model.device": "cpu",
        "data.source": "addition",
        "data.size": 12,
        "run.steps": ROUNDS,
        "score.scorer": "number",
        "generate.temperature": 0.7,
        "generate.max_new_tokens": 12,
        "generate.lanes": 6,
        "run.threads": 1,
        "train.learning_rate": 0.0,
        "prepare.micro_batch_tokens": 40,
        "schedule.batch_size": 8,
        "schedule.group_size": 4,
        "schedule.run_ahead": run_ahead,
    }
    words = [f"--{name}={value}" for name, value in values.items()]
    return config.resolve(None, words).config


def hashes_after_each_sync(stages: InProcessStages, parts: Parts) -> list[tuple[str, str]]:
    """(trainer's, engine's), filled in as the run goes on."""
    hashes: list[tuple[str, str]] = []
    sync = stages.sync

    async def sync_and_note(weights: Any, version: int) -> None:
        await sync(weights, version)
        trainer = await asyncio.to_thread(fingerprint, parts.trainer.weights())
        hashes.append((trainer, await stages._engine.fingerprint()))

    stages.sync = sync_and_note  # type: ignore[method-assign]
    return hashes


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_b14_five_rounds_change_nothing(tmp_path: Path, run_ahead: float):
    model_folder = tiny.write_model_folder(tmp_path / "model", attention_dropout=0.1)
    settings = configuration(model_folder, run_ahead)
    parts = compose(settings, run.chosen_objective(settings), None, lambda what: None)
    asyncio.run(parts.scorer.close())
    parts = dataclasses.replace(parts, scorer=LengthScorer())
    start = fingerprint(parts.trainer.weights())
    events: list[Event] = []

    async def program() -> list[tuple[str, str]]:
        folder = RunFolder(tmp_path / "run")
        async with parts.stages(folder) as stages:
            hashes = hashes_after_each_sync(stages, parts)
            await run.drive(settings, stages, run.sizes(settings), Trace(events.append), clock_name="wall")
        folder.close()
        return hashes

    hashes = clock.run(program())
    metrics = [event["metrics"] for event in events if event.kind == "trained"]
    assert parts.engine_policy.model.config.attention_dropout == 0.1
    assert len(metrics) == len(hashes) == ROUNDS
    for figures in metrics:
        assert figures["ratio_min"] == pytest.approx(1.0, abs=1e-5)
        assert figures["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert abs(figures["mismatch_kl_k3"]) < 1e-8
        assert abs(figures["mismatch_kl_k1"]) < 1e-6
        assert figures["acted_share/tis"] == 0
        assert figures["canary_tokens"] >= 2
        assert 0 <= figures["canary_kl_k3"] < 1e-8
        assert abs(figures["canary_kl_k1"]) < 1e-6
        assert figures["canary_max_abs_log_ratio"] < 1e-5
        assert figures["grad_norm"] > 0
    assert set(hashes) == {(start, start)}
    if run_ahead:
        assert any(name.startswith("tokens/lag_") and name != "tokens/lag_0" for figures in metrics for name in figures)
