"""Whole runs with a critic, a frozen reference, several optimizer steps, canaries: what they leave, and that a resume
goes on with all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headway.in_process
from headway import run
from headway.checkpoint import newest_checkpoint
from headway.config import Resolved
from headway.in_process import compose
from headway.models.policy import load_policy
from headway.prepare.pack import Packing, pack
from headway.types import UserError
from tests import runs, tiny


def resolved(model_folder: Path, name: str, **settings: Any) -> Resolved:
    """A small synchronous run of a named objective, in batches of four groups."""
    own = {"objective__name": name, "schedule__batch_size": 8, "schedule__run_ahead": 0}
    return runs.resolved(model_folder, **{**own, **settings})


def steps(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "trained_tokens" in row]


def state(folder: Path, version: int, name: str) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / f"version-{version:08d}" / name, weights_only=True)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


class Killed(Exception):
    pass


def killed_and_resumed(settings: Resolved, out: Path, monkeypatch: pytest.MonkeyPatch, *, at: int) -> None:
    """Killed before it trains version `at`, and resumed from the newest checkpoint."""
    train_step, killed = headway.in_process.train_step, []

    def until(trainer: Any, critic: Any, objective: Any, batch: Any, **options: Any) -> Any:
        if batch.version == at and not killed:
            killed.append(at)
            raise Killed
        return train_step(trainer, critic, objective, batch, **options)

    monkeypatch.setattr(headway.in_process, "train_step", until)
    with pytest.raises(Killed):
        run.train(settings, out)
    run.train(settings, out, resume=True)


# ---- a critic


def test_a_run_with_a_critic_warms_it_up_and_keeps_both(working_folder: Path, model_folder: Path):
    out = working_folder / "run"
    run.train(resolved(model_folder, "ppo", critic__value_warmup_steps=2, critic__value_learning_rate=1e-2), out)
    rows = steps(out)
    assert [row.get("value_warmup", False) for row in rows] == [True, True, False, False]
    assert [row["version"] for row in rows] == [1, 2, 3, 4]
    assert all(row["critic_grad_norm"] > 0 and row["value_loss"] > 0 for row in rows)
    assert rows[0]["value_mean"] == 0.0
    assert rows[3]["value_mean"] != 0.0
    assert ["learning_rate" in row for row in rows] == [False, False, True, True]
    base = load_policy(str(model_folder), "cpu").weights()
    assert largest_difference(state(out, 2, "trainer.pt")["weights"], base) == 0.0
    assert largest_difference(state(out, 4, "trainer.pt")["weights"], base) > 1e-4
    critics = [state(out, version, "critic.pt")["weights"] for version in (2, 4)]
    assert largest_difference(*critics) > 1e-4
    assert "base.embed_tokens.weight" in critics[0]
    assert rows[0]["mismatch_kl_k3"] < 1e-9


def test_a_resumed_run_with_critic_and_reference_is_the_uninterrupted_one(
    working_folder: Path, model_folder: Path, monkeypatch
):
    """Killed before its fourth step. The reference is the base again, not what the policy had become."""
    settings = resolved(model_folder, "ppo", objective__reward_kl=0.1, run__steps=6, critic__value_learning_rate=1e-3)
    run.train(settings, working_folder / "whole")
    killed_and_resumed(settings, working_folder / "parts", monkeypatch, at=3)
    for name in ("trainer.pt", "critic.pt"):
        whole, parts = (state(working_folder / folder, 6, name)["weights"] for folder in ("whole", "parts"))
        assert largest_difference(whole, parts) < 1e-3
    whole, parts = (steps(working_folder / folder) for folder in ("whole", "parts"))
    assert [row["version"] for row in parts] == [1, 2, 3, 3, 4, 5, 6]
    for name in ("reward_kl", "value_mean", "loss"):
        assert [row[name] for row in parts[3:]] == pytest.approx([row[name] for row in whole[2:]], abs=1e-3)


def test_a_critic_is_not_made_up_on_resume(working_folder: Path, model_folder: Path):
    out = working_folder / "run"
    run.train(resolved(model_folder, "olmo3", run__steps=2), out)
    with pytest.raises(UserError, match="holds no critic"):
        run.train(resolved(model_folder, "ppo"), out, resume=True)


@pytest.mark.parametrize("setting", [{"critic__value_warmup_steps": 2}, {"critic__value_learning_rate": 0.0}])
def test_a_setting_of_a_critic_that_is_not_there_is_refused(working_folder: Path, model_folder: Path, setting):
    with pytest.raises(UserError, match="the objective olmo3 has no critic: leave it out, or set objective"):
        run.train(resolved(model_folder, "olmo3", **setting), working_folder / "run")
    assert not (working_folder / "run").exists()


def test_with_an_adapter_the_critic_is_a_full_copy(working_folder: Path, model_folder: Path):
    out = working_folder / "run"
    run.train(resolved(model_folder, "ppo", run__steps=2, adapter__kind="lora", critic__value_learning_rate=1e-2), out)
    weights = state(out, 2, "critic.pt")["weights"]
    assert not any("lora" in name for name in weights)
    before = load_policy(str(model_folder), "cpu").weights()["model.embed_tokens.weight"]
    assert (weights["base.embed_tokens.weight"] - before).abs().max() > 1e-4


# ---- a frozen reference


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_reference_is_the_base_at_the_start_and_on_resume(working_folder: Path, model_folder: Path, adapter: str):
    out = working_folder / "run"
    options = {"run__steps": 3, "run__share_cores": False, "adapter__kind": adapter, "train__learning_rate": 0.01}
    run.train(resolved(model_folder, "grpo", **options), out)
    settings = resolved(model_folder, "grpo", **options, score__scorer="number").config
    chosen, checkpoint = run.chosen_objective(settings), newest_checkpoint(out / "checkpoints")
    parts, fresh = (compose(settings, chosen, start, lambda what: None) for start in (checkpoint, None))
    ((one,),) = pack([tiny.rollout(tiny.prompt("1+2="), [3, 4, 5, 6])], [0], [0], Packing(99))
    base = fresh.trainer.forward(one.rows).logp_N
    assert torch.equal(parts.trainer.forward(one.rows, reference=True).logp_N, base)
    assert (parts.trainer.forward(one.rows).logp_N - base).abs().max() > 1e-3
    for made in (parts, fresh):
        assert (made.reference_hash is None) == (adapter == "lora")


def test_a_resume_over_another_base_is_refused(working_folder: Path, model_folder: Path):
    """The trainer's weights come from the checkpoint, so nothing else would tell."""
    out, other = working_folder / "run", tiny.write_model_folder(working_folder / "other", seed=1)
    run.train(resolved(model_folder, "grpo", run__steps=2), out)
    with pytest.raises(UserError, match="holds other weights than for the run that wrote"):
        run.train(resolved(other, "grpo"), out, resume=True)


def test_without_need_there_is_no_second_copy(working_folder: Path, model_folder: Path):
    settings = resolved(model_folder, "olmo3", score__scorer="number").config
    parts = compose(settings, run.chosen_objective(settings), None, lambda what: None)
    assert parts.critic is None
    assert parts.reference_hash is None


# ---- several optimizer steps


def test_a_run_of_several_optimizer_steps(working_folder: Path, model_folder: Path):
    out = working_folder / "run"
    run.train(
        resolved(
            model_folder, "dr_grpo", train__optimizer_steps=2, train__passes=2, train__learning_rate_schedule="linear"
        ),
        out,
    )
    rows = steps(out)
    assert [row["optimizer_steps"] for row in rows] == [4] * 4
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-3 * (13 - 4 * n) / 16 for n in range(4)])
    assert all(row["mismatch_kl_k3"] < 1e-9 for row in rows), "of the log-probs before the step, and not after a part"


# ---- canaries


def rollouts_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_canaries_are_measured_in_every_step_and_are_outside_every_count(
    working_folder: Path, model_folder: Path, run_ahead: int
):
    out = working_folder / "run"
    run.train(resolved(model_folder, "olmo3", schedule__run_ahead=run_ahead), out)
    for row in steps(out):
        assert 2 <= row["canary_tokens"] <= 8
        assert 0 <= row["canary_kl_k3"] < 1e-9
        assert row["num_rollouts"] == 8


def test_canaries_change_nothing_of_what_is_sampled_and_learned(working_folder: Path, model_folder: Path):
    for tokens in (0, 8):
        settings = resolved(
            model_folder, "dr_grpo", diagnostics__canary_tokens=tokens, report__rollouts_per_step=8, data__size=4
        )
        run.train(settings, working_folder / f"run-{tokens}")
    without, with_them = (rollouts_of(working_folder / f"run-{tokens}") for tokens in (0, 8))
    assert [(row["version"], row["prompt"], row["text"]) for row in without] == [
        (row["version"], row["prompt"], row["text"]) for row in with_them
    ]
    weights = [load_policy(str(working_folder / f"run-{tokens}" / "model"), "cpu").weights() for tokens in (0, 8)]
    assert largest_difference(*weights) < 1e-3
    assert not any(name.startswith("canary") for row in steps(working_folder / "run-0") for name in row)


def test_rollouts_that_are_no_data_are_written_without_log_ratios(working_folder: Path, model_folder: Path):
    """Those of groups with equal rewards, as this objective leaves them out."""
    out = working_folder / "run"
    run.train(resolved(model_folder, "dapo", report__rollouts_per_step=8, run__steps=3), out)
    rows = rollouts_of(out)
    assert all(len(row["log_ratios"]) == len(row["pieces"]) for row in rows)
    dropped = sum(row.get("dropped_rollouts/zero_variance", 0) for row in steps(out))
    assert dropped > 0
    assert sum(set(row["log_ratios"]) == {None} for row in rows) == dropped
