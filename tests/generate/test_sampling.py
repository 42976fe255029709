"""What is drawn among: truncation and penalty, against those of `transformers`; and what is recorded of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headway.config import Train
from headway.generate.episode import rollout_of
from headway.models.distribution import Shape
from headway.models.policy import Policy
from headway.prepare.pack import Packing, pack
from headway.stages import Sample, SampleRequest
from headway.train.local import LocalTrainer
from headway.types import Prompt
from tests import tiny
from tests.generate.harness import answers, ask, assert_same
from tests.tiny import END, make_policy

PROMPTS = ("1+2=", "0123456789+-", "a")
WAYS: list[dict[str, Any]] = [
    {"top_k": 4},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.5},
    {"top_k": 6, "top_p": 0.8, "repetition_penalty": 1.2},
]
"""Some keep one id, some different numbers of them, and one all."""


def processors(request: SampleRequest) -> LogitsProcessorList:
    """Those of `transformers`, in the order in which `generate` applies them."""
    chain: list[Any] = []
    if request.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(request.repetition_penalty))
    chain.append(TemperatureLogitsWarper(request.temperature))
    if request.top_k:
        chain.append(TopKLogitsWarper(request.top_k))
    if request.top_p < 1.0:
        chain.append(TopPLogitsWarper(request.top_p))
    if request.min_p:
        chain.append(MinPLogitsWarper(request.min_p))
    return LogitsProcessorList(chain)


@torch.no_grad()
def processed(policy: Policy, request: SampleRequest, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Log-probs of the whole vocabulary before each token; -inf for what is not kept."""
    ids = torch.tensor([[*request.prompt.tokens, *tokens]])
    logits_TV = tiny.plain(policy)(input_ids=ids, use_cache=False).logits[0].float()
    start = len(request.prompt.tokens)
    return [
        torch.log_softmax(processors(request)(ids[:, : start + t], logits_TV[start + t - 1][None])[0], -1)
        for t in range(len(tokens))
    ]


def requests_with(ways: dict[str, Any], num_tokens: int = 12) -> list[SampleRequest]:
    return [
        ask(prompt, num_tokens, member=member, temperature=0.8, **ways) for prompt in PROMPTS for member in range(2)
    ]


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_what_is_kept_is_what_transformers_keeps_and_log_probs_are_among_it(architecture, ways):
    policy = make_policy(architecture)
    requests = requests_with(ways)
    truncates = ways.keys() != {"repetition_penalty"}
    for request, sample in zip(requests, answers(policy, requests), strict=True):
        rows = processed(policy, request, sample.tokens)
        assert sample.logprobs == pytest.approx(
            [row_V[token].item() for row_V, token in zip(rows, sample.tokens, strict=True)], abs=2e-5
        )
        if not truncates:
            assert sample.kept is None, "nobody asked for it"
            continue
        assert sample.kept is not None
        kept = [(row_V > -torch.inf).nonzero()[:, 0].tolist() for row_V in rows]
        assert [list(ids) for ids in sample.kept] == kept
        assert all(token in ids for token, ids in zip(sample.tokens, sample.kept, strict=True))


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_the_trainer_says_the_same_of_the_same_support(policy, ways):
    """And not without what was kept: a token's log-prob is then smaller, for it is one of more."""
    requests = requests_with(ways)
    samples = answers(policy, requests)
    recorded = [logprob for sample in samples for logprob in sample.logprobs]
    assert trainers(policy, requests, samples) == pytest.approx(recorded, abs=2e-5)
    if ways.keys() != {"repetition_penalty"}:
        without = trainers(policy, requests, [replace(sample, kept=None) for sample in samples])
        assert all(less <= logprob + 2e-5 for less, logprob in zip(without, recorded, strict=True))
        assert sum(without) < sum(recorded) - 1


def trainers(policy: Policy, requests: Sequence[SampleRequest], samples: Sequence[Sample]) -> list[float]:
    rollouts = [
        rollout_of(request.prompt, 0, number, sample)
        for number, (request, sample) in enumerate(zip(requests, samples, strict=True))
    ]
    groups = [PROMPTS.index(request.prompt.uid) for request in requests]
    ((micro_batch,),) = pack(rollouts, groups, range(len(rollouts)), Packing(10_000))
    shape = Shape(requests[0].temperature, requests[0].repetition_penalty)
    trainer = LocalTrainer(policy, Train(learning_rate=1e-3), shape=shape, num_steps=1)
    return trainer.forward(micro_batch.rows).logp_N.tolist()


def test_nobody_is_truncated_by_his_neighbours(policy):
    """Every way at once, in one batch: each answer is what it is alone."""
    requests = [
        ask(PROMPTS[member % 3], 15, member=member, temperature=chance, **ways)
        for member, (ways, chance) in enumerate(zip([*WAYS, {}], [0.7, 1.0, 1.3] * 3, strict=True))
    ]
    for request, sample in zip(requests, answers(policy, requests, lanes=9), strict=True):
        (alone,) = answers(policy, [request])
        assert_same(sample, alone)


@pytest.mark.parametrize("ways", [way for way in WAYS if "repetition_penalty" not in way], ids=str)
def test_greedy_answers_know_no_truncation(policy, ways):
    requests = [ask(prompt, 12, temperature=0.0) for prompt in PROMPTS]
    samples = answers(policy, [replace(request, **ways) for request in requests])
    assert samples == answers(policy, requests)
    assert all(sample.kept is None for sample in samples)


@pytest.mark.parametrize("penalty", [1.2, 2.0])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_greedy_answers_with_a_penalty_are_those_of_transformers(architecture, penalty):
    policy = make_policy(architecture)
    requests = [ask(prompt, 20, temperature=0.0, repetition_penalty=penalty) for prompt in PROMPTS]
    samples = answers(policy, [replace(request, end_ids=frozenset({END})) for request in requests])
    for request, sample in zip(requests, samples, strict=True):
        ids = torch.tensor([request.prompt.tokens])
        generated = tiny.plain(policy).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            repetition_penalty=penalty,
            pad_token_id=0,
        )
        assert sample.tokens == tuple(generated[0, ids.shape[1] :].tolist())


def test_tokens_are_drawn_among_what_is_kept_in_their_proportions():
    """After any token: 0.5, 0.3, 0.15, 0.05; the best two are kept, and so are 5/8 and 3/8."""
    policy = tiny.make_bigram([torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()] * 4)
    requests = [ask(Prompt("p", "", (0,)), 60, member=member, top_k=2) for member in range(40)]
    samples = answers(policy, requests, lanes=40, decode=str)
    tokens = [token for sample in samples for token in sample.tokens]
    assert set(tokens) == {0, 1}
    assert tokens.count(1) / len(tokens) == pytest.approx(3 / 8, abs=0.04)
    expected = {0: torch.tensor(5 / 8).log().item(), 1: torch.tensor(3 / 8).log().item()}
    for sample in samples:
        assert sample.logprobs == pytest.approx([expected[token] for token in sample.tokens], abs=1e-6)
        assert [list(ids) for ids in sample.kept] == [[0, 1]] * 60


def test_members_draw_from_streams_of_their_own(policy):
    """Also where few ids are left: 16 members, no two with the same answer."""
    samples = answers(policy, [ask("1+2=", 16, member=member, temperature=1.5, top_k=3) for member in range(16)])
    assert len({sample.tokens for sample in samples}) == 16


@pytest.mark.parametrize("seed", range(2))
def test_what_was_kept_is_kept_over_interruptions(policy, seed):
    """A rollout that pauses anywhere goes on with what was recorded, and ends as the whole one."""
    chance = random.Random(seed)
    requests = requests_with({"top_k": 7, "top_p": 0.9, "repetition_penalty": 1.2})
    whole = answers(policy, requests)
    begun = answers(policy, [replace(request, pause_after=chance.randint(1, 11)) for request in requests])
    resumed = [replace(request, so_far=sample) for request, sample in zip(requests, begun, strict=True)]
    for sample, expected in zip(answers(policy, resumed), whole, strict=True):
        assert_same(sample, expected)
