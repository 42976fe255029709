"""Whole runs with bitwise parity: engine and trainer agree in every bit, and a killed run ends in the same weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import headway.generate.torch_engine
from headway import config, run
from headway.checkpoint import newest_checkpoint
from headway.models.distribution import Drawn
from headway.models.weights import fingerprint
from headway.reports.folder import CHECKPOINTS
from tests.runs import Killed, Watched, resolved

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def figures(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def assert_no_mismatch(row: dict[str, Any], part: str) -> None:
    """Of a part of the tokens: exactly, in every figure."""
    for name in ("mismatch_kl_k1", "mismatch_kl_k3", "mismatch_reverse_kl_k1", "mismatch_reverse_kl_k3", "chi2_token"):
        assert row[f"{name}{part}"] == 0.0
    assert row[f"ratio_q01{part}"] == row[f"ratio_q99{part}"] == row[f"ess_share{part}"] == 1.0


# ---- the mismatch of tokens of lag 0


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_the_quickstart_has_no_mismatch_at_lag_0(tmp_path: Path, monkeypatch, run_ahead: int):
    """Its own recipe with a quarter of its batch, on two threads; what is a batch ahead has only its canaries."""
    monkeypatch.chdir(ROOT)
    words = "--parity bitwise --steps 3 --batch-size 64 --lanes 32 --evaluate.size 8 --threads 2"
    settings = config.resolve(Path("recipes/quickstart.toml"), [*words.split(), "--run-ahead", str(run_ahead)])
    run.train(settings, tmp_path / "run")
    rows = figures(tmp_path / "run")
    assert len(rows) == 3
    for row in rows:
        assert row["canary_kl_k1"] == row["canary_kl_k3"] == row["canary_max_abs_log_ratio"] == 0.0
        assert row["canary_tokens"] > 0
        assert row["unequal_tokens"] == 0.0
    for row in rows[:1] if run_ahead else rows:
        assert_no_mismatch(row, "")
        assert_no_mismatch(row, "/lag_0")
        assert (row["ratio_min"], row["ratio_max"], row["max_abs_log_ratio"]) == (1.0, 1.0, 0.0)
    assert all(row["mismatch_kl_k3"] > 0 for row in rows[1:]) == bool(run_ahead)


@pytest.mark.parametrize(
    "more",
    [
        {"schedule__in_flight": "recompute"},
        {"schedule__iteration_tokens": 7, "schedule__in_flight": "recompute", "generate__cache_bytes": 300_000},
        {"schedule__overlap": False, "generate__sleep": "weights", "schedule__in_flight": "recompute"},
        {"generate__top_p": 0.9, "generate__repetition_penalty": 1.2, "generate__prefill_tokens": 3},
        {"adapter__kind": "lora", "train__learning_rate": 0.02, "schedule__in_flight": "recompute"},
        {"adapter__kind": "tinylora", "train__learning_rate": 0.02, "schedule__in_flight": "recompute"},
    ],
    ids=str,
)
def test_tokens_of_lag_0_have_no_mismatch_in_rollouts_that_outlast_updates(
    working_folder: Path, model_folder: Path, more: dict[str, Any]
):
    """Where the cache is computed again under new weights, those that follow older tokens have none either."""
    settings = {
        "model__parity": "bitwise",
        "generate__max_new_tokens": 40,
        "schedule__run_ahead": 1,
        "run__steps": 10,
        "data__size": 60,
        "prepare__micro_batch_tokens": 64,
    }
    run.train(resolved(model_folder, **{**settings, **more}), working_folder / "run")
    rows = figures(working_folder / "run")
    parts = ("numerics", "stale_cache") if more.get("schedule__in_flight") else ("numerics",)
    measured = [(row, f"/{part}") for row in rows for part in parts if row.get(f"tokens/{part}")]
    assert {part for _, part in measured} == {f"/{part}" for part in parts}
    for row, part in measured:
        assert_no_mismatch(row, part)
    assert all(row["unequal_tokens"] == row["canary_max_abs_log_ratio"] == 0.0 for row in rows)
    assert max(row["mismatch_kl_k3"] for row in rows) > 0


@pytest.mark.parametrize("who", ["rollouts", "canaries"])
def test_a_mismatch_of_one_bit_raises_an_alarm(working_folder: Path, model_folder: Path, monkeypatch, capsys, who: str):
    """The last bit of every log-prob that is drawn is off, in the second version, of one kind of rollouts."""
    sample = headway.generate.torch_engine.sample
    draw = headway.generate.torch_engine.TorchEngine._draw

    def off(engine: Any, lanes: Any, hidden_ND: torch.Tensor) -> None:
        wrong = [engine._version == 1 and lane.request.spare == (who == "canaries") for lane in lanes]

        def sampled(*arguments: Any) -> Drawn:
            drawn = sample(*arguments)
            beyond = [float(numpy.nextafter(numpy.float32(x), numpy.float32(-math.inf))) for x in drawn.logprobs]
            logprobs = [b if is_wrong else x for x, b, is_wrong in zip(drawn.logprobs, beyond, wrong, strict=True)]
            return Drawn(drawn.tokens, logprobs, drawn.kept)

        monkeypatch.setattr(headway.generate.torch_engine, "sample", sampled)
        draw(engine, lanes, hidden_ND)

    monkeypatch.setattr(headway.generate.torch_engine.TorchEngine, "_draw", off)
    settings = {"model__parity": "bitwise", "schedule__run_ahead": 0}
    run.train(resolved(model_folder, **settings), working_folder / "run")
    rows = figures(working_folder / "run")
    assert [row["unequal_tokens"] > 0 for row in rows] == [False, True, False, False]
    said = [line for line in capsys.readouterr().out.splitlines() if "warning: train step" in line]
    num = int(rows[1]["unequal_tokens"])
    assert any(
        line.startswith(f"warning: train step 2: {num} tokens that were sampled by the weights") for line in said
    )
    assert "model.parity is bitwise: that is a fault" in run.report(working_folder / "run")


def test_without_bitwise_parity_nobody_counts_bits(working_folder: Path, model_folder: Path):
    run.train(resolved(model_folder, schedule__run_ahead=0), working_folder / "run")
    assert all("unequal_tokens" not in row for row in figures(working_folder / "run"))


# ---- a killed run ends in the same weights


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"objective__name": "ppo"}, marks=pytest.mark.slow),
        pytest.param({"adapter__kind": "lora"}, marks=pytest.mark.slow),
        pytest.param({"generate__sleep": "weights", "generate__top_p": 0.9}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_that_was_killed_twice_ends_in_the_same_weights(
    working_folder: Path, model_folder: Path, monkeypatch, more: dict[str, Any]
):
    """Between two checkpoints, and before the first step after one."""
    settings = resolved(model_folder, **REPEATABLE, **more)
    run.train(settings, working_folder / "whole")
    for kill_at in (3, 4):
        Watched(monkeypatch, kill_at=kill_at)
        with pytest.raises(Killed):
            run.train(settings, working_folder / "killed", resume=kill_at > 3)
    run.train(settings, working_folder / "killed", resume=True)
    assert weights_of(working_folder / "killed") == weights_of(working_folder / "whole")


REPEATABLE = {
    "model__parity": "bitwise",
    "schedule__run_ahead": 0,
    "run__steps": 7,
    "data__size": 60,
    "train__optimizer_steps": 2,
    "train__learning_rate_schedule": "cosine",
    "evaluate__size": 5,
    "evaluate__every": 2,
    "generate__max_new_tokens": 24,
    "prepare__micro_batch_tokens": 40,
}


def weights_of(folder: Path) -> str:
    """A hash of all that the run has trained."""
    newest = newest_checkpoint(folder / CHECKPOINTS).folder
    return fingerprint(torch.load(newest / "trainer.pt", weights_only=True)["weights"])
