"""What the engine generates with each architecture is what `transformers` generates; what it can't serve is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from headway.generate.torch_engine import TorchEngine
from headway.models.cores import FixedCores
from headway.models.policy import Policy
from headway.stages import Sample, SampleRequest
from headway.types import Prompt, UserError
from tests import tiny
from tests.tiny import make_policy, random_ids

NUM_NEW = 70
"""Tokens of an answer: more than two blocks of the cache."""

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma3": {"sliding_window": 160},
    "mixtral": {},
    "qwen3_moe": {},
    "mistral": {"sliding_window": None},
    "phi3": {},
    "gpt2": {"n_positions": 160},
    "cohere": {},
    "granite": {},
}
"""With the settings under which they serve sequences of 160 tokens."""

EVERYDAY = ("llama", "qwen2", "qwen3", "gemma", "gemma3", "mixtral", "qwen3_moe")

every_architecture = pytest.mark.parametrize(
    "architecture",
    [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES],
)

PROMPTS = [tuple(random_ids(length, seed=length).tolist()) for length in (1, 5, 31, 32, 33, 64, 80)]


def make(architecture: str) -> Policy:
    settings = ARCHITECTURES[architecture]
    return make_policy(architecture, **({} if architecture == "gpt2" else {"max_position_embeddings": 160}), **settings)


def answers(policy: Policy, temperature: float, members: int = 1) -> list[Sample]:
    """To all prompts at once, on so few lanes that some join while others are under way; prompts come in pieces."""

    async def ask_all() -> list[Sample]:
        engine = TorchEngine(policy, lanes=5, decode=tiny.decode, cores=FixedCores(1), prefill_tokens=20)
        requests = [
            SampleRequest(Prompt(str(number), "", prompt), (0, number, member), NUM_NEW, temperature)
            for number, prompt in enumerate(PROMPTS)
            for member in range(members)
        ]
        try:
            return list(await asyncio.gather(*(engine.sample(request) for request in requests)))
        finally:
            await engine.close()

    return asyncio.run(ask_all())


def generated(policy: Policy) -> list[tuple[int, ...]]:
    """By `transformers`, with its own attention, products and cache; prompts are padded on their left."""
    model = tiny.plain(policy)
    longest = max(map(len, PROMPTS))
    ids_RT = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in PROMPTS])
    mask_RT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    model.generation_config.eos_token_id = None
    output_RT = model.generate(ids_RT, attention_mask=mask_RT, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
    return [tuple(row[longest:].tolist()) for row in output_RT]


@every_architecture
def test_greedy_tokens_are_those_of_transformers(architecture):
    policy = make(architecture)
    ours = [sample.tokens for sample in answers(policy, temperature=0.0)]
    assert ours == generated(policy)
    assert len({tokens[-9:] for tokens in ours}) > 1


@every_architecture
@torch.no_grad()
def test_log_probs_are_those_of_the_models_own_forward(architecture):
    """Of sampled answers, in groups of two that share their prompt's keys and values."""
    policy = make(architecture)
    samples = answers(policy, temperature=0.8, members=2)
    for number, prompt in enumerate(PROMPTS):
        for sample in samples[2 * number : 2 * number + 2]:
            expected = tiny.own_logprobs(policy, prompt, sample.tokens, temperature=0.8)
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=1e-5)


# ---- what can't be served right is refused by name


def refusal(architecture: str, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        make_policy(architecture, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("mamba", "MambaForCausalLM keeps recurrent state, which Headway can't cut and pack"),
        ("qwen3_next", "Qwen3NextForCausalLM keeps recurrent state"),
        ("lfm2", "Lfm2ForCausalLM uses the attention interface of transformers in 1 of its 2 layers"),
        ("bloom", "BloomForCausalLM uses the attention interface of transformers in 0 of its 2 layers"),
        ("falcon", "FalconForCausalLM uses the attention interface of transformers in 0 of its 2 layers"),
        ("stablelm", "StableLmForCausalLM does not use the attention interface of transformers"),
        ("gemma2", "Gemma2Attention uses softcap in its attention, which Headway does not implement"),
        ("gpt_oss", "GptOssAttention uses s_aux in its attention, which Headway does not implement"),
    ],
)
def test_an_architecture_that_would_be_served_wrong_is_refused_by_name(architecture, message):
    assert refusal(architecture).startswith(message)


@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
def test_a_window_is_refused_when_a_sequence_would_reach_beyond_it(architecture):
    """Inside of it all is as without one."""
    assert "attends within a sliding window of 8 tokens" in refusal(architecture, sliding_window=8)
    inside = make_policy(architecture, sliding_window=32, max_position_embeddings=64)
    tiny.packed_hidden(inside, [random_ids(32)])
    with pytest.raises(UserError, match=r"a sliding window of 32 tokens and a sequence here has 33: choose a model"):
        tiny.packed_hidden(inside, [random_ids(33)])
