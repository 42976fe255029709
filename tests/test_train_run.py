"""Whole runs of a tiny model: what they leave, that a killed one loses nothing, and that a failing one ends."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import headway.in_process
from headway import config, run
from headway.models.policy import load_policy, load_tokenizer
from headway.models.weights import fingerprint
from headway.reports.folder import choose_folder
from headway.types import UserError
from tests.runs import DRAINED, Watched, killed_and_resumed, resolved


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- what a run leaves


def test_a_run_leaves_its_whole_folder(working_folder: Path, model_folder: Path):
    out = working_folder / "run"
    run.train(resolved(model_folder, evaluate__size=4, evaluate__every=2, report__rollouts_per_step=3), out)
    left = {path.name for path in out.iterdir()}
    assert left >= {
        "config.toml",
        "trace.jsonl",
        "metrics.jsonl",
        "rollouts.jsonl",
        "evaluations.jsonl",
        "work.jsonl",
        "checkpoints",
        "model",
    }
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["version-00000002", "version-00000004"]
    check_metrics(rows(out / "metrics.jsonl"))
    check_work(rows(out / "work.jsonl"), rows(out / "metrics.jsonl"), rows(out / "trace.jsonl"))
    check_rollouts(rows(out / "rollouts.jsonl"))
    check_model(out, model_folder)
    assert config.resolve(out / "config.toml").config.data.size == 12


def check_work(
    work: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]], trace: Sequence[dict[str, Any]]
) -> None:
    """Every row that was trained is in it, every token that was decoded (the last one of an answer is not, and its
    first comes out of the prompt), and memory only grows.
    """
    assert [row["version"] for row in work] == [1, 2, 3, 4]
    assert all(row["device"] == "cpu" and row["cores"] == 1 for row in work)
    packed = [row["packed_rows"] for row in metrics if "packed_rows" in row]
    assert [total(row["work"], "train", "tokens") for row in work] == packed
    assert all(total(row["work"], "update", "num") == 1 for row in work)
    decoded = sum(total(row["work"], "pass", "rows") for row in work)
    ended = [event for event in trace if event["kind"] == "generated" and event["at_s"] <= trained_s(trace)]
    assert decoded >= sum(event["tokens"] - 1 for event in ended) > 0
    assert all(each["seconds"] > 0 for row in work for each in row["work"])
    peaks = [row["peak_memory_bytes"] for row in work]
    assert peaks == sorted(peaks)
    assert peaks[0] > 0
    assert [row["peak_memory_bytes"] for row in metrics if "packed_rows" in row] == peaks


def total(work: Sequence[dict[str, Any]], kind: str, name: str) -> int:
    return sum(row[name] for row in work if row["kind"] == kind)


def trained_s(trace: Sequence[dict[str, Any]]) -> float:
    """When the last train step began."""
    return max(event["at_s"] for event in trace if event["kind"] == "taken")


def check_metrics(metrics: Sequence[dict[str, Any]]) -> None:
    steps = [row for row in metrics if "evaluated" not in row]
    assert [row["version"] for row in steps] == [1, 2, 3, 4]
    for row in steps:
        assert row["num_rollouts"] == 4
        assert row["skipped_steps"] == 0
        assert row["grad_norm"] > 0
        assert {"loss", "reward_mean", "learning_rate", "entropy", "ess_share", "trained_tokens"} <= row.keys()
        assert row["lag_max"] <= 3
    assert steps[0]["mismatch_kl_k3"] < 1e-9, "numerics alone: every token is of version 0"
    assert [(row["version"], row["evaluated"]) for row in metrics if "evaluated" in row] == [(0, 4), (2, 4), (4, 4)]


def check_rollouts(rollouts: Sequence[dict[str, Any]]) -> None:
    assert Counter(row["version"] for row in rollouts) == {1: 3, 2: 3, 3: 3, 4: 3}
    for row in rollouts:
        assert len(row["pieces"]) == len(row["log_ratios"]) == len(row["versions"])
        assert "".join(piece for piece in row["pieces"] if len(piece) == 1) == row["text"], "special tokens are no text"
        assert row["reward"] == sum(map(str.isdigit, row["text"])) / 8


def check_model(out: Path, model_folder: Path) -> None:
    """Plain `transformers` gives the greedy answers that the engine gave in the last evaluation."""
    trained, base = (fingerprint(load_policy(str(folder), "cpu").weights()) for folder in (out / "model", model_folder))
    assert trained != base
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out / "model"), load_tokenizer(str(out / "model"))
    last = [row for row in rows(out / "evaluations.jsonl") if row["version"] == 4]
    assert len(last) == 4
    for row in last:
        ids = tokenizer(row["prompt"], return_tensors="pt")
        generated = model.generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        answer = tokenizer.decode(generated[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == row["text"]


def test_a_folder_that_holds_a_run_is_refused(working_folder: Path, model_folder: Path):
    settings = resolved(model_folder, run__steps=1, run__out=working_folder / "run")
    run.train(settings, choose_folder(settings.config.run))
    with pytest.raises(UserError, match=f"{working_folder}/run already holds a run"):
        choose_folder(settings.config.run)


def test_the_last_batch_of_the_data_may_be_short(working_folder: Path, model_folder: Path):
    """5 prompts, 2 in a batch: three steps, the last of them with one prompt's answers."""
    out = working_folder / "run"
    run.train(resolved(model_folder, data__size=5, data__epochs=1, run__steps=99), out)
    steps = rows(out / "metrics.jsonl")
    assert [row["num_rollouts"] for row in steps] == [4, 4, 2]
    assert (out / "checkpoints" / "version-00000003").is_dir()


# ---- kill and resume


@pytest.mark.parametrize("run_ahead", [0, 1, 2.5])
def test_a_killed_run_trains_every_prompt_once(working_folder: Path, model_folder: Path, monkeypatch, run_ahead: float):
    """Killed in its fourth step, after the checkpoint of the second."""
    watched = Watched(monkeypatch, kill_at=3)
    settings = resolved(model_folder, schedule__run_ahead=run_ahead, **DRAINED)
    killed_and_resumed(settings, working_folder / "run", watched)
    assert sorted(watched.batches) == [0, 1, 2, 3, 4, 5]
    trained = watched.trained()
    assert set(trained.values()) == {1}
    assert len(trained) == 24
    assert {member for _, member in trained} == {0, 1}


def test_a_resumed_synchronous_run_is_the_uninterrupted_one(working_folder: Path, model_folder: Path, monkeypatch):
    settings = resolved(model_folder, schedule__run_ahead=0, **DRAINED)
    whole = Watched(monkeypatch)
    run.train(settings, working_folder / "whole")
    monkeypatch.undo()
    monkeypatch.chdir(working_folder)
    parts = Watched(monkeypatch, kill_at=3)
    killed_and_resumed(settings, working_folder / "parts", parts)
    for version in range(6):
        ours, theirs = parts.batches[version].rollouts, whole.batches[version].rollouts
        assert [(r.prompt.uid, r.member, r.tokens, r.versions) for r in ours] == [
            (r.prompt.uid, r.member, r.tokens, r.versions) for r in theirs
        ]
        for one, other in zip(ours, theirs, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    one, other = (load_policy(str(working_folder / name / "model"), "cpu").weights() for name in ("whole", "parts"))
    assert max((one[name] - other[name]).abs().max() for name in one) < 1e-3


def test_a_resumed_run_samples_from_the_restored_weights(working_folder: Path, model_folder: Path, monkeypatch):
    """Its engine is loaded from the base model: were it not brought up to date, the first ratios would say so."""
    watched = Watched(monkeypatch, kill_at=3)
    settings = resolved(model_folder, schedule__run_ahead=0, train__learning_rate=0.02, **DRAINED)
    killed_and_resumed(settings, working_folder / "run", watched)
    steps = [row for row in rows(working_folder / "run" / "metrics.jsonl") if "loss" in row]
    assert [row["version"] for row in steps] == [1, 2, 3, 3, 4, 5, 6]
    assert max(row["mismatch_kl_k3"] for row in steps) < 1e-9
    assert {version for r in watched.batches[2].rollouts for version in r.versions} == {2}


def test_a_resume_with_other_prompts_is_refused(working_folder: Path, model_folder: Path):
    out = working_folder / "run"
    run.train(resolved(model_folder), out)
    with pytest.raises(UserError, match="resume with the same data and seed"):
        run.train(resolved(model_folder, data__size=11), out, resume=True)


def test_a_resume_without_a_checkpoint_is_refused(working_folder: Path, model_folder: Path):
    with pytest.raises(UserError, match="there is no checkpoint"):
        run.train(resolved(model_folder), working_folder / "run", resume=True)


# ---- adapters


@pytest.mark.parametrize("merge", [False, True])
def test_a_run_with_lora_leaves_an_adapter_or_a_merged_model(working_folder: Path, model_folder: Path, merge: bool):
    """Its reward rises, and `peft` or `transformers` gives the greedy answers of its last evaluation."""
    out = working_folder / "run"
    settings = resolved(
        model_folder,
        adapter__kind="lora",
        adapter__rank=2,
        adapter__merge=merge,
        train__learning_rate=0.02,
        run__steps=30,
        schedule__batch_size=16,
        schedule__group_size=4,
        evaluate__size=4,
        data__size=40,
    )
    run.train(settings, out)
    steps = [row for row in rows(out / "metrics.jsonl") if "loss" in row]
    rewards = [row["reward_mean"] for row in steps]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
    assert steps[0]["mismatch_kl_k3"] < 1e-9
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    if merge:
        model = AutoModelForCausalLM.from_pretrained(out / "model")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft asks transformers for something by an old name
            model = PeftModel.from_pretrained(base, out / "model")
    last = [row for row in rows(out / "evaluations.jsonl") if row["version"] == 30]
    assert len(last) == 4
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    for row in last:
        ids = tokenizer(row["prompt"], return_tensors="pt")
        generated = model.generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        answer = tokenizer.decode(generated[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == row["text"]


@pytest.mark.parametrize("kind", ["lora", "tinylora"])
def test_a_resumed_run_with_an_adapter_is_the_uninterrupted_one(
    working_folder: Path, model_folder: Path, monkeypatch, kind
):
    """Its checkpoints hold the adapter and no base."""
    settings = resolved(model_folder, adapter__kind=kind, schedule__run_ahead=0, train__learning_rate=0.02, **DRAINED)
    run.train(settings, working_folder / "whole")
    killed_and_resumed(settings, working_folder / "parts", Watched(monkeypatch, kill_at=3))
    one, other = (
        load_file(working_folder / name / "model" / "adapter_model.safetensors") for name in ("whole", "parts")
    )
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=1e-3, rtol=0)
    steps = [row for row in rows(working_folder / "parts" / "metrics.jsonl") if "loss" in row]
    assert max(row["mismatch_kl_k3"] for row in steps) < 1e-9
    kept = torch.load(working_folder / "parts" / "checkpoints" / "version-00000006" / "trainer.pt")
    assert all(".lora_" in name or ".tinylora_v." in name for name in kept["weights"])
    assert len(kept["weights"]) == len(kept["optimizer"]["state"])


def test_a_run_that_goes_on_from_an_adapter(working_folder: Path, model_folder: Path):
    run.train(resolved(model_folder, adapter__kind="lora", adapter__rank=3, run__steps=2), working_folder / "first")
    settings = resolved(model_folder, adapter__kind="lora", adapter__start=working_folder / "first", run__steps=2)
    with pytest.raises(UserError, match=f"no adapter folder: .* did you mean {working_folder}/first/model"):
        run.train(settings, working_folder / "second")
    settings = resolved(model_folder, adapter__kind="lora", adapter__start=working_folder / "first/model", run__steps=2)
    run.train(settings, working_folder / "second")
    assert json.loads((working_folder / "second/model/adapter_config.json").read_text())["r"] == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"adapter__rank": 3}, "adapter.rank is 3, and was 2"),
        ({"adapter__alpha": 8}, "adapter.alpha is 8.0, and was 32.0"),
        ({"adapter__start": "FIRST"}, "adapter.start is "),
        ({"adapter__kind": "none", "adapter__rank": None}, "adapter.kind is none, and was lora"),
    ],
)
def test_an_adapter_is_not_changed_by_a_resume(working_folder: Path, model_folder: Path, changed, said):
    """Its starting values and its sizes are the checkpoint's: other settings would only seem to hold."""
    settings = {"adapter__kind": "lora", "adapter__rank": 2, "run__steps": 2}
    first, second = working_folder / "first", working_folder / "second"
    run.train(resolved(model_folder, **settings), first)
    run.train(resolved(model_folder, **settings, adapter__start=first / "model"), second)
    changed = {key: first / "model" if value == "FIRST" else value for key, value in changed.items()}
    later = {key: value for key, value in {**settings, **changed, "run__steps": 4}.items() if value is not None}
    with pytest.raises(UserError, match=said):
        run.train(resolved(model_folder, **later), first, resume=True)


def test_engine_and_trainer_have_one_adapter_in_storage_of_their_own(working_folder: Path, model_folder: Path):
    settings = resolved(model_folder, adapter__kind="tinylora").config
    parts = headway.in_process.compose(settings, run.chosen_objective(settings), None, lambda what: None)
    asyncio.run(parts.scorer.close())
    ours, theirs = parts.trainer_policy, parts.engine_policy
    assert fingerprint(ours.fixed_state()["frame"]) == fingerprint(theirs.fixed_state()["frame"])
    assert fingerprint(ours.model.state_dict()) == fingerprint(theirs.model.state_dict())
    shared = {t.data_ptr() for t in ours.model.state_dict().values()}
    assert not shared & {t.data_ptr() for t in theirs.model.state_dict().values()}


# ---- runs that fail


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every process that is started from here on."""
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return started


def assert_nothing_is_left(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    assert [process.args for process in processes if process.poll() is None] == []
    ours = ("headway", "grader", "asyncio")
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith(ours)] == []


def test_nothing_is_left_of_a_run_that_ended_well(working_folder: Path, model_folder: Path, processes):
    run.train(resolved(model_folder), working_folder / "run")
    assert len(processes) == 1
    assert_nothing_is_left(processes)


def test_a_scorer_that_raises_ends_the_run_at_once_in_a_line(working_folder: Path, model_folder: Path, processes):
    began_s = time.monotonic()
    with pytest.raises(UserError) as caught:
        run.train(resolved(model_folder, score__scorer="grader:broken", run__steps=1000), working_folder / "run")
    assert "the grader grader:broken failed on prompt addition-" in str(caught.value)
    assert "ValueError: no such thing as a grade" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began_s < 20
    assert len(processes) == 1
    assert_nothing_is_left(processes)


@pytest.mark.parametrize("stage", ["generate", "prepare", "train", "save"])
def test_a_stage_that_fails_ends_the_run_with_its_cause(
    working_folder: Path, model_folder: Path, processes, monkeypatch, stage
):
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(f"no {stage} today")

    name = {"generate": "TorchEngine", "prepare": "prepare_batch", "train": "train_step", "save": "write_checkpoint"}[
        stage
    ]
    if stage == "generate":
        monkeypatch.setattr(headway.in_process.TorchEngine, "_make_pass", fail)
    else:
        monkeypatch.setattr(headway.in_process, name, fail)
    with pytest.raises((OSError, RuntimeError), match=f"no {stage} today"):
        run.train(resolved(model_folder, schedule__run_ahead=2), working_folder / "run")
    assert_nothing_is_left(processes)


def test_a_configuration_that_is_wrong_leaves_no_folder_and_no_process(
    working_folder: Path, model_folder: Path, processes
):
    for settings in (
        {"generate__end_tokens": "<nonsense>"},
        {"model__path": working_folder / "none"},
        {"score__scorer": "grader:nothing"},
        {"generate__max_new_tokens": 64},
        {"schedule__group_size": 1},
        {"generate__cache_bytes": 100},  # less than two blocks
        {"generate__cache_bytes": 16_384, "generate__max_new_tokens": 40},  # two blocks, and a rollout needs three
    ):
        with pytest.raises(UserError):
            run.train(resolved(model_folder, **settings), working_folder / "run")
        assert not (working_folder / "run").exists()
        assert_nothing_is_left(processes)
