"""B14: with learning rate 0 nothing changes, round after round, through the real stages and the real loop.

Five rounds of generate -> score -> prepare -> train -> sync, at temperature 0.7, on a model whose config asks for
dropout. Dropout left on, a stale cache or a temperature forgotten on one side would show in the ratios of the first
round, or of a later one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from experiments.objectives import demanded
from headway import clock, config, run
from headway.in_process import InProcessStages, Parts, compose
from headway.models.weights import fingerprint
from headway.objectives.named import PRESETS
from headway.program import drive, rules, sizes
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


def configuration(folder: Path, run_ahead: float, **more: object) -> config.Config:
    values: dict[str, object] = {
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
        **{name.replace("__", "."): value for name, value in more.items()},
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


@dataclasses.dataclass(frozen=True)
class Played:
    """A run that is over. start: hash of the trainer's weights before it; hashes: after each sync, on both sides."""

    parts: Parts
    start: str
    hashes: list[tuple[str, str]]
    metrics: list[dict[str, Any]]


def play(tmp_path: Path, settings: config.Config) -> Played:
    parts = compose(settings, run.chosen_objective(settings), None, lambda what: None)
    asyncio.run(parts.scorer.close())
    parts = dataclasses.replace(parts, scorer=LengthScorer())
    start = fingerprint(parts.trainer.weights())
    events: list[Event] = []

    async def program() -> list[tuple[str, str]]:
        folder = RunFolder(tmp_path / "run")
        async with parts.stages(folder) as stages:
            hashes = hashes_after_each_sync(stages, parts)
            trace = Trace(events.append)
            await drive(settings, stages, sizes(settings), rules(settings), trace, clock_name="wall")
        folder.close()
        return hashes

    hashes = clock.run(program())
    return Played(parts, start, hashes, [event["metrics"] for event in events if event.kind == "trained"])


@pytest.mark.parametrize("parity", ["close", "bitwise"])
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_b14_five_rounds_change_nothing(tmp_path: Path, run_ahead: float, parity: str):
    model_folder = tiny.write_model_folder(tmp_path / "model", attention_dropout=0.1)
    played = play(tmp_path, configuration(model_folder, run_ahead, model__parity=parity))
    metrics = played.metrics
    assert played.parts.engine_policy.model.config.attention_dropout == 0.1
    assert len(metrics) == len(played.hashes) == ROUNDS
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
        if parity == "bitwise":
            exact = (
                "mismatch_kl_k1",
                "mismatch_kl_k3",
                "max_abs_log_ratio",
                "canary_kl_k1",
                "canary_max_abs_log_ratio",
            )
            assert {figures[name] for name in (*exact, "unequal_tokens")} == {0.0}
            assert figures["ratio_min"] == figures["ratio_max"] == 1.0
    assert set(played.hashes) == {(played.start, played.start)}
    if run_ahead:
        assert any(name.startswith("tokens/lag_") and name != "tokens/lag_0" for figures in metrics for name in figures)


@pytest.mark.parametrize("optimizer_steps", [1, 2])
@pytest.mark.parametrize("name", PRESETS)
def test_with_every_objective_the_loss_is_defined_and_nothing_moves(tmp_path: Path, name: str, optimizer_steps: int):
    """Stale by version, and yet all ratios are 1: no weight is cut, no clip acts, the reference is where it was."""
    settings = {"run__steps": 2, "train__optimizer_steps": optimizer_steps, **demanded(PRESETS[name])}
    if PRESETS[name].needs_critic:
        settings["critic__value_learning_rate"] = 0.0
    if name in ("reinforce", "rloo") and optimizer_steps > 1:  # refused: no ratio follows the current policy
        settings["objective__unsound"] = True
    model_folder = tiny.write_model_folder(tmp_path / "model")
    played = play(tmp_path, configuration(model_folder, 1, objective__name=name, **settings))
    assert set(played.hashes) == {(played.start, played.start)}
    assert len(played.metrics) == 2
    for figures in played.metrics:
        assert math.isfinite(figures["loss"])
        assert figures["grad_norm"] > 0
        assert figures["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert figures["mismatch_kl_k3"] < 1e-8
        acted = {key: value for key, value in figures.items() if key.startswith("acted_share/")}
        assert set(acted.values()) <= {0.0}, acted
        assert abs(figures.get("reference_kl_k3", 0.0)) < 1e-8


@pytest.mark.parametrize("kind", ["lora", "tinylora"])
def test_with_an_adapter_neither_it_nor_the_base_moves(tmp_path: Path, kind: str):
    """Weight decay is off and the rate is 0; the reference is the adapter switched off."""
    model_folder = tiny.write_model_folder(tmp_path / "model")
    settings = {"adapter__kind": kind, "objective__name": "grpo", **demanded(PRESETS["grpo"])}
    played = play(tmp_path, configuration(model_folder, 1, run__steps=3, **settings))
    assert set(played.hashes) == {(played.start, played.start)}
    for figures in played.metrics:
        assert figures["grad_norm"] > 0
        assert abs(figures["reference_kl_k3"]) < 1e-8
        assert figures["sync_bytes"] == 4 * figures["trainable_parameters"]
