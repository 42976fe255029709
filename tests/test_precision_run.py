"""Whole runs with an engine in bfloat16 beside a trainer in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headway.in_process
from headway import run
from headway.generate.torch_engine import TorchEngine
from headway.models.weights import fingerprint
from tests.runs import DRAINED, Watched, killed_and_resumed, resolved

HALF = {"generate__dtype": "bfloat16", "schedule__run_ahead": 1}


@pytest.fixture
def engines(monkeypatch) -> list[TorchEngine]:
    """Those that runs make."""
    made: list[TorchEngine] = []

    def engine(*arguments: Any, **options: Any) -> TorchEngine:
        made.append(TorchEngine(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(headway.in_process, "TorchEngine", engine)
    return made


def figures(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"adapter__kind": "lora"},
        {"adapter__kind": "tinylora"},
        {"generate__sleep": "weights", "schedule__overlap": False},
        {"train__compute_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_the_engine_samples_in_bfloat16_from_weights_that_are_float32(
    working_folder: Path, model_folder: Path, engines, more
):
    """Every hand-over is verified in the engine's dtype, and the numerics show in the canaries."""
    out = working_folder / "run"
    run.train(resolved(model_folder, **{**HALF, **more}), out)
    (engine,) = engines
    assert engine._policy.dtype == torch.bfloat16
    assert {key.dtype for key, _ in engine._pool.layers} <= {torch.bfloat16}
    saved = torch.load(out / "checkpoints" / "version-00000004" / "trainer.pt", weights_only=True)["weights"]
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    in_half = {name: tensor.bfloat16() for name, tensor in saved.items()}
    assert fingerprint(engine._policy.weights()) == fingerprint(saved if engine._policy.adapter else in_half)
    rows = figures(out)
    assert len(rows) == 4
    for row in rows:
        assert 1e-9 < row["canary_kl_k3"] < 1e-2
        assert row["canary_unequal_tokens"] > 0


@pytest.mark.parametrize("more", [{}, {"adapter__kind": "lora"}], ids=str)
def test_a_resumed_run_hands_its_weights_to_an_engine_in_bfloat16(
    working_folder: Path, model_folder: Path, monkeypatch, engines, more
):
    watched = Watched(monkeypatch, kill_at=3)
    settings = resolved(model_folder, **{**DRAINED, **HALF, **more})
    killed_and_resumed(settings, working_folder / "run", watched)
    assert len(engines) == 2
    assert set(watched.trained().values()) == {1}
