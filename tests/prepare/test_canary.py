"""The trainer's figures of canaries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headway.prepare.canary import canary_metrics
from tests.batches import Counted, make_trainer
from tests.tiny import own_logprobs, prompt, rollout


def canary(policy, tokens, *, off_by: float = 0.0, version: int = 3, member: int = 0):
    with torch.no_grad():
        logprobs = (own_logprobs(policy, prompt("1+2=").tokens, tokens) - off_by).tolist()
    return rollout(prompt("1+2="), tokens, member=member, logprobs=logprobs, versions=[version] * len(tokens))


def test_an_engine_that_computes_the_same_shows_nothing(policy):
    canaries = [canary(policy, [3, 4, 5, 6]), canary(policy, [7, 8, 27], member=1)]
    for budget in (1, 99):
        metrics = canary_metrics(make_trainer(policy), canaries, version=3, micro_batch_tokens=budget)
        assert metrics["canary_tokens"] == 7
        assert abs(metrics["canary_kl_k1"]) < 1e-6
        assert 0 <= metrics["canary_kl_k3"] < 1e-10
        assert metrics["canary_max_abs_log_ratio"] < 1e-5


def test_figures_by_hand(policy):
    """log w is 0.5 at two tokens and -0.1 at one: k1 = -0.3, k3 the mean of w - 1 - log w."""
    canaries = [canary(policy, [3, 4], off_by=0.5), canary(policy, [7], off_by=-0.1, member=1)]
    metrics = canary_metrics(make_trainer(policy), canaries, version=3, micro_batch_tokens=99)
    assert metrics == pytest.approx(
        {
            "canary_tokens": 3,
            "canary_kl_k1": -0.3,
            "canary_kl_k3": (2 * (1.648721 - 1 - 0.5) + (0.904837 - 1 + 0.1)) / 3,
            "canary_max_abs_log_ratio": 0.5,
            "canary_unequal_tokens": 3,
        },
        abs=1e-5,
    )


def test_a_phrase_that_was_put_in_is_not_among_a_canarys_tokens(policy):
    """Its tokens have log-prob 0, and nobody sampled them."""
    sampled = canary(policy, [3, 4, 5, 6])
    logprobs = (*sampled.logprobs[:1], 0.0, 0.0, *sampled.logprobs[3:])
    with_phrase = replace(sampled, logprobs=logprobs, mask=(True, False, False, True))
    metrics = canary_metrics(make_trainer(policy), [with_phrase], version=3, micro_batch_tokens=99)
    assert metrics["canary_tokens"] == 2
    assert metrics["canary_max_abs_log_ratio"] < 1e-5


def test_only_canaries_of_the_trainers_version_count(policy):
    """A patchwork, or one of other weights, would show staleness too."""
    old, mixed = canary(policy, [3, 4], version=2), rollout(prompt("1"), [3, 4], versions=[2, 3])
    trainer = Counted(make_trainer(policy))
    assert canary_metrics(trainer, [old, mixed], version=3, micro_batch_tokens=99) == {}
    assert canary_metrics(trainer, [], version=3, micro_batch_tokens=99) == {}
    assert not trainer.calls
    good = canary(policy, [5])
    assert canary_metrics(trainer, [old, good], version=3, micro_batch_tokens=99)["canary_tokens"] == 1
