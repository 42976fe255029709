"""Whole runs in which the engine gives its memory back while the trainer trains."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headway.in_process
from headway import run
from headway.checkpoint import newest_checkpoint
from headway.generate.torch_engine import EngineStatus, TorchEngine
from headway.models.policy import load_policy
from headway.models.weights import fingerprint
from headway.reports.folder import CHECKPOINTS
from headway.reports.summary import kept_steps
from headway.trace import read_trace
from tests.runs import Killed, Watched, resolved

STEPS = 6
EVALUATED = {"evaluate__size": 5, "evaluate__every": 1, "run__steps": STEPS, "data__size": 60, "checkpoint__every": 2}
"""More held-out prompts than lanes are free when a batch is taken, in every step."""


class Engines:
    """What the engine of a run holds whenever the trainer trains: (asleep, has a cache, has its weights)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[bool, bool, bool]] = []
        self.engine: TorchEngine
        init, train_step = TorchEngine.__init__, headway.in_process.train_step

        def made(engine: TorchEngine, *arguments: Any, **options: Any) -> None:
            init(engine, *arguments, **options)
            self.engine = engine

        def watched(*arguments: Any, **options: Any) -> Any:
            self.seen.append((self.engine._is_asleep, bool(self.engine._pool.layers), self._has_weights()))
            return train_step(*arguments, **options)

        monkeypatch.setattr(TorchEngine, "__init__", made)
        monkeypatch.setattr(headway.in_process, "train_step", watched)

    def _has_weights(self) -> bool:
        return all(tensor.untyped_storage().nbytes() for tensor in self.engine._policy.weights().values())


def weights_of(folder: Path) -> str:
    return fingerprint(load_policy(str(folder / "model")).weights())


@pytest.mark.parametrize(("sleep", "seen"), [("cache", (True, False, True)), ("weights", (True, False, False))])
def test_memory_is_given_back_while_a_batch_is_trained_and_nothing_else_changes(
    working_folder: Path, model_folder: Path, monkeypatch, sleep, seen
):
    """Synchronous, with an evaluation and canaries in every step; in every bit, since the runs are repeatable."""
    settings = {**EVALUATED, "schedule__run_ahead": 0, "model__parity": "bitwise"}
    run.train(resolved(model_folder, **settings), working_folder / "awake")
    engines = Engines(monkeypatch)
    run.train(resolved(model_folder, **settings, generate__sleep=sleep), working_folder / "asleep")
    assert engines.seen == [seen] * STEPS
    assert weights_of(working_folder / "asleep") == weights_of(working_folder / "awake")
    rewards = [evaluations(working_folder / name) for name in ("awake", "asleep")]
    assert rewards[0] == rewards[1]
    assert len(rewards[0]) == STEPS + 1
    steps = kept_steps(read_trace(working_folder / "asleep" / "trace.jsonl"))
    assert all(step.trained["metrics"]["canary_tokens"] > 0 for step in steps)


def evaluations(folder: Path) -> list[tuple[int, float]]:
    return [
        (event["version"], event["mean_reward"])
        for event in read_trace(folder / "trace.jsonl")
        if event.kind == "evaluated"
    ]


@pytest.mark.parametrize(
    ("sleep", "more"),
    [
        ("cache", {"schedule__in_flight": "recompute"}),
        ("cache", {"adapter__kind": "lora"}),
        ("weights", {}),
    ],
)
def test_rollouts_in_flight_pause_while_the_engine_sleeps(
    working_folder: Path, model_folder: Path, monkeypatch, sleep, more
):
    """By turns as in APRIL, each batch with an evaluation before it is taken; each prompt is trained once."""
    engines, out = Engines(monkeypatch), working_folder / "run"
    settings = {
        **EVALUATED,
        "schedule__run_ahead": 2,
        "schedule__overlap": False,
        "generate__max_new_tokens": 40,
        **more,
    }
    run.train(resolved(model_folder, **settings, generate__sleep=sleep), out)
    assert len(engines.seen) == STEPS
    assert all(asleep and not has_cache for asleep, has_cache, _ in engines.seen)
    assert {has_weights for *_, has_weights in engines.seen} == {sleep == "cache"}
    events = read_trace(out / "trace.jsonl")
    assert Counter(event["reason"] for event in events if event.kind == "paused")["training"] > 0
    trained = [rollout for step in kept_steps(events) for rollout in step.taken["rollouts"]]
    assert len(set(trained)) == len(trained) == 4 * STEPS
    assert "page: " in run.report(out)


def test_no_batch_is_taken_during_an_evaluation(working_folder: Path, model_folder: Path):
    settings = {**EVALUATED, "schedule__run_ahead": 2, "schedule__overlap": False, "generate__sleep": "weights"}
    run.train(resolved(model_folder, **settings), working_folder / "run")
    kinds = [
        (event.kind, event["version"])
        for event in read_trace(working_folder / "run" / "trace.jsonl")
        if event.kind in ("evaluated", "taken")
    ]
    expected = [(kind, version) for version in range(STEPS) for kind in ("evaluated", "taken")]
    assert kinds == [*expected, ("evaluated", STEPS)]


def test_a_checkpoint_of_paused_rollouts_is_written_and_gone_on_with(
    working_folder: Path, model_folder: Path, monkeypatch
):
    watched, out = Watched(monkeypatch, kill_at=3), working_folder / "run"
    settings = {
        "data__epochs": 1,
        "run__steps": 99,
        "schedule__run_ahead": 2,
        "schedule__overlap": False,
        "generate__sleep": "weights",
        "generate__max_new_tokens": 40,
    }
    with pytest.raises(Killed):
        run.train(resolved(model_folder, **settings), out)
    assert newest_checkpoint(out / CHECKPOINTS).rows
    del watched.batches[2]
    run.train(resolved(model_folder, **settings), out, resume=True)
    assert set(watched.trained().values()) == {1}
    assert len(watched.trained()) == 24


def test_a_step_says_how_full_the_cache_was_and_how_often_a_rollout_gave_way_since_the_one_before(
    working_folder: Path, model_folder: Path, monkeypatch
):
    real, preempted = TorchEngine.status, iter([2, 10, 10, 13])

    async def status(engine: TorchEngine) -> EngineStatus:
        return replace(await real(engine), blocks=10, blocks_most_used=5, num_preempted=next(preempted))

    monkeypatch.setattr(TorchEngine, "status", status)
    settings = resolved(model_folder, run__steps=4, schedule__run_ahead=0)
    run.train(settings, working_folder / "run")
    batch_size = settings.config.schedule.batch_size
    rows = [step.trained["metrics"] for step in kept_steps(read_trace(working_folder / "run" / "trace.jsonl"))]
    assert [row["cache_used"] for row in rows] == [0.5] * 4
    assert [row["preempted_share"] * batch_size for row in rows] == pytest.approx([2, 8, 0, 3])
