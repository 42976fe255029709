"""Whole runs in which tokens are drawn from another distribution than the plain one: the trainer computes that one too.

B09 and its kind: top-p, top-k or a repetition penalty on one side only, and every ratio is off from the first token
on. With learning rate 0 no weight moves, so every ratio has to be 1.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headway.prepare.prepare
from headway import run
from headway.models.policy import Policy, load_policy
from headway.trace import read_trace
from headway.types import Rollout, UserError
from tests import tiny
from tests.runs import DRAINED, Watched, killed_and_resumed, resolved

STILL = {
    "train__learning_rate": 0.0,
    "generate__temperature": 0.7,
    "run__steps": 3,
    "data__size": 60,
    "generate__max_new_tokens": 16,
    "train__optimizer_steps": 2,
    "objective__name": "grpo",
    "objective__corrections": "tis",
    "objective__kl_coefficient": 0.1,
    "objective__kl_estimator": "k3_corrected",
}
"""Two optimizer steps ask for proximal log-probs, the KL term for the reference's."""

TRUNCATED = [
    {"generate__top_p": 0.8},
    {"generate__top_k": 3},
    {"generate__min_p": 0.2},
    {"generate__top_k": 8, "generate__top_p": 0.9, "generate__min_p": 0.05, "generate__repetition_penalty": 1.5},
]


def trained(watched: Watched) -> list[Rollout]:
    return [rollout for batch in watched.batches.values() for rollout in batch.rollouts]


def figures(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.mark.parametrize("parity", ["close", "bitwise"])
@pytest.mark.parametrize("sampling", [*TRUNCATED, {"generate__repetition_penalty": 2.0}], ids=str)
def test_ratios_are_1_where_the_trainer_computes_what_was_sampled(
    working_folder: Path, model_folder: Path, monkeypatch, sampling, parity
):
    watched, out = Watched(monkeypatch), working_folder / "run"
    run.train(resolved(model_folder, **{**STILL, **sampling, "model__parity": parity}), out)
    rows = figures(out)
    assert len(rows) == 3
    for row in rows:
        assert row["ratio_min"] == pytest.approx(1.0, abs=1e-4)
        assert row["ratio_max"] == pytest.approx(1.0, abs=1e-4)
        for kind in ("mismatch_kl", "canary_kl", "reference_kl"):
            assert 0 <= row[f"{kind}_k3"] < 1e-8
        assert row.get("unequal_tokens", 0.0) == 0.0
        assert (row["max_abs_log_ratio"], row["canary_unequal_tokens"]) == (0.0, 0.0) or parity == "close"
        assert row["entropy"] > 0
    kept = [ids for rollout in trained(watched) for ids in rollout.kept or [None]]
    if "generate__top_k" in sampling:
        assert {len(ids) for ids in kept} <= set(range(1, 9))
    assert (None not in kept) == (sampling in TRUNCATED)


def test_without_the_kept_set_every_ratio_is_off_by_the_kept_mass(
    working_folder: Path, model_folder: Path, monkeypatch
):
    """log pi - log mu is the log of what the kept ids have of pi, on every token: all ratios are below 1."""
    pack = headway.prepare.prepare.pack

    def forgetful(rollouts: list[Rollout], *arguments: Any) -> Any:
        return pack([replace(rollout, kept=None) for rollout in rollouts], *arguments)

    monkeypatch.setattr(headway.prepare.prepare, "pack", forgetful)
    watched, out = Watched(monkeypatch), working_folder / "run"
    run.train(resolved(model_folder, **{**STILL, "generate__top_p": 0.8, "report__rollouts_per_step": 4}), out)
    policy = load_policy(str(model_folder))
    for row, batch in zip(figures(out), watched.batches.values(), strict=True):
        masses = [mass for rollout in batch.rollouts for mass in kept_masses(policy, rollout)]
        assert 0.8 <= min(masses) < max(masses) < 1
        assert row["mismatch_kl_k1"] == pytest.approx(-sum(map(math.log, masses)) / len(masses), abs=1e-5)
        assert row["ratio_min"] == pytest.approx(min(masses), abs=1e-5)
        assert row["ratio_max"] == pytest.approx(max(masses), abs=1e-5)


def kept_masses(policy: Policy, rollout: Rollout) -> list[float]:
    """What the kept ids of each token have of the full distribution, by the model's own forward pass."""
    assert rollout.kept is not None
    prompt_tokens = rollout.prompt.tokens
    ids = torch.tensor([[*prompt_tokens, *rollout.tokens]])
    with torch.no_grad():
        logits_TV = tiny.plain(policy)(input_ids=ids, use_cache=False).logits[0, len(prompt_tokens) - 1 : -1]
    p_TV = torch.softmax(logits_TV.double() / 0.7, -1)
    return [p_V[list(kept)].sum().item() for p_V, kept in zip(p_TV, rollout.kept, strict=True)]


def test_kept_sets_survive_a_kill_token_by_token(working_folder: Path, model_folder: Path, monkeypatch):
    """Partial rollouts go on with those of their first tokens, and ratios stay 1 after the resume."""
    watched, out = Watched(monkeypatch, kill_at=3), working_folder / "run"
    settings = {**STILL, **DRAINED, "generate__top_p": 0.8, "schedule__run_ahead": 2, "generate__max_new_tokens": 40}
    settings["data__size"] = 12
    killed_and_resumed(resolved(model_folder, **settings), out, watched)
    assert set(watched.trained().values()) == {1}
    assert len(watched.trained()) == 24
    carried = [rollout for rollout in trained(watched) if len(set(rollout.versions)) > 1]
    assert carried
    for rollout in trained(watched):
        assert rollout.kept is not None
        assert all(token in kept for token, kept in zip(rollout.tokens, rollout.kept, strict=True))
    for row in figures(out):
        assert row["max_abs_log_ratio"] < 1e-4


# ---- a phrase that is put in

FORCED = {
    **STILL,
    "generate__force_after": 4,
    "generate__force_phrase": " aha ",
    "generate__force_unless": "=",
    "generate__max_new_tokens": 14,
    "report__rollouts_per_step": 4,
    "diagnostics__canary_tokens": 24,
}


def forced(rollout: Rollout) -> bool:
    return False in rollout.mask


@pytest.mark.parametrize("sampling", [{}, {"generate__top_p": 0.8}], ids=str)
def test_a_forced_phrase_is_context_and_is_never_trained(
    working_folder: Path, model_folder: Path, monkeypatch, sampling
):
    watched, out = Watched(monkeypatch), working_folder / "run"
    run.train(resolved(model_folder, **{**FORCED, **sampling}), out)
    phrase = tiny.encode(" aha ")
    rollouts = trained(watched)
    assert any(map(forced, rollouts))
    for rollout in rollouts:
        ended_before = len(rollout.tokens) < 4 or (len(rollout.tokens) == 4 and rollout.finish == "stop")
        assert forced(rollout) == (not ended_before and "=" not in tiny.decode(rollout.tokens[:4]))
        if forced(rollout):
            assert rollout.tokens[4:9] == phrase
            assert rollout.mask == tuple(not 4 <= place < 9 for place in range(len(rollout.tokens)))
            assert rollout.logprobs[4:9] == (0.0,) * 5
            assert rollout.text[4:9] == " aha "
            assert len(rollout.tokens) <= 14
    for row, batch in zip(figures(out), watched.batches.values(), strict=True):
        assert row["max_abs_log_ratio"] < 1e-4
        assert row["canary_max_abs_log_ratio"] < 1e-4
        assert row["trained_tokens"] == row["tokens"] == sum(sum(rollout.mask) for rollout in batch.rollouts)
        lengths = [len(rollout.tokens) for rollout in batch.rollouts]
        assert row["response_tokens_mean"] == pytest.approx(sum(lengths) / len(lengths))
    lengths = Counter(len(rollout.tokens) for rollout in rollouts)
    assert Counter(e["tokens"] for e in read_trace(out / "trace.jsonl") if e.kind == "generated") >= lengths
    for line in (out / "rollouts.jsonl").read_text().splitlines():
        shown = json.loads(line)
        put_in = [ratio is None for ratio in shown["log_ratios"]]
        assert put_in == ([False] * 4 + [True] * 5 + [False] * (len(put_in) - 9) if True in put_in else put_in)


def test_a_phrase_that_leaves_no_room_for_an_answer_is_refused(working_folder: Path, model_folder: Path):
    said = (
        r"generate.force_after 4 and the 5 tokens of generate.force_phrase leave no room for an answer in "
        r"generate.max_new_tokens 9: give at least 10"
    )
    with pytest.raises(UserError, match=said):
        run.train(resolved(model_folder, **{**FORCED, "generate__max_new_tokens": 9}), working_folder / "run")


def test_a_phrase_that_the_tokenizer_does_not_know_is_refused(working_folder: Path, model_folder: Path):
    """Nobody would see the ids of unknown characters that stand in the answers instead of it."""
    said = r"generate.force_phrase = 'aha ☃' holds characters that the model's tokenizer doesn't know"
    with pytest.raises(UserError, match=said):
        run.train(resolved(model_folder, **{**FORCED, "generate__force_phrase": "aha ☃"}), working_folder / "run")
