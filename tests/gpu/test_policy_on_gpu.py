"""The same policy on a GPU: engine and trainer agree there as they do on the CPU. Skipped where there is no GPU."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headway.generate.torch_engine import TorchEngine
from headway.models.attention import PackedAttention, Segment
from headway.models.cores import FixedCores
from headway.models.distribution import token_logprobs
from headway.models.policy import Policy, as_policy
from headway.stages import Sample, SampleRequest
from headway.types import Prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [Prompt("a", "", (3, 1, 4, 1, 5)), Prompt("b", "", (2, 7)), Prompt("c", "", (1, 8, 2, 8))]


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return as_policy(LlamaForCausalLM(config).cuda())


def sampled(policy: Policy, temperature: float) -> list[Sample]:
    async def sample_all() -> list[Sample]:
        engine = TorchEngine(policy, lanes=2, decode=str, cores=FixedCores(1))
        requests = [SampleRequest(prompt, (0, prompt.uid), 12, temperature) for prompt in PROMPTS for _ in range(2)]
        try:
            return await asyncio.gather(*(engine.sample(request) for request in requests))
        finally:
            await engine.close()

    return asyncio.run(sample_all())


def test_recorded_logprobs_are_the_trainers(policy: Policy) -> None:
    for number, answer in enumerate(sampled(policy, temperature=0.7)):
        prompt = PROMPTS[number // 2].tokens
        rows = torch.tensor((*prompt, *answer.tokens[:-1]), device="cuda")
        plan = PackedAttention([Segment(0, len(rows))], policy.device)
        hidden_TD = policy.hidden(rows, torch.arange(len(rows), device="cuda"), plan)[len(prompt) - 1 :]
        targets_N = torch.tensor(answer.tokens, device="cuda")
        logp_N, _ = token_logprobs(policy.head, hidden_TD, targets_N, 0.7)
        torch.testing.assert_close(logp_N.cpu(), torch.tensor(answer.logprobs), atol=1e-4, rtol=0)


def test_greedy_answers_are_those_of_transformers(policy: Policy) -> None:
    answers = sampled(policy, temperature=0.0)
    policy.model.set_attn_implementation("sdpa")
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt.tokens], device="cuda")
        expected = policy.model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert tuple(expected[0, len(prompt.tokens) :].tolist()) == answers[2 * number].tokens


def test_an_interrupted_rollout_goes_on_where_it_was(policy: Policy) -> None:
    def ask(**more) -> SampleRequest:
        return SampleRequest(PROMPTS[0], (0, "a"), 12, 0.7, **more)

    async def in_two_stretches() -> tuple[Sample, Sample]:
        engine = TorchEngine(policy, lanes=2, decode=str, cores=FixedCores(1))
        try:
            whole = await engine.sample(ask())
            begun = await engine.sample(ask(pause_after=5))
            return whole, await engine.sample(ask(so_far=begun))
        finally:
            await engine.close()

    whole, sample = asyncio.run(in_two_stretches())
    assert sample.tokens == whole.tokens
    torch.testing.assert_close(torch.tensor(sample.logprobs), torch.tensor(whole.logprobs), atol=1e-4, rtol=0)


def test_recomputing_for_the_same_weights_changes_nothing(policy: Policy) -> None:
    async def updated_on_the_way() -> tuple[Sample, Sample]:
        engine = TorchEngine(policy, lanes=2, decode=str, cores=FixedCores(1))
        try:
            whole = await engine.sample(SampleRequest(PROMPTS[0], (0, "a"), 200, 0.7))
            again = asyncio.create_task(engine.sample(SampleRequest(PROMPTS[0], (0, "a"), 200, 0.7)))
            await asyncio.sleep(0.05)
            weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
            await engine.load(weights, 1, recompute=True)
            return whole, await again
        finally:
            await engine.close()

    whole, sample = asyncio.run(updated_on_the_way())
    assert sample.tokens == whole.tokens
    torch.testing.assert_close(torch.tensor(sample.logprobs), torch.tensor(whole.logprobs), atol=1e-4, rtol=0)
