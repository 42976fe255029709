"""The same policy on a GPU: engine and trainer agree there as they do on the CPU. Skipped where there is no GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headway.generate.torch_engine import TorchEngine
from headway.models.attention import PackedAttention, Segment
from headway.models.cores import FixedCores
from headway.models.distribution import Conditions, Shape, token_logprobs
from headway.models.paged import LayerShape
from headway.models.policy import Policy, as_policy, in_dtype, with_parity
from headway.stages import Sample, SampleRequest
from headway.types import Prompt, UserError
from tests.models.test_paged import Schedule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"
NUM_NEW = 70
"""Tokens of an answer: more than two blocks of the cache."""

PROMPTS = [Prompt("a", "", (3, 1, 4, 1, 5)), Prompt("b", "", (2, 7) * 24), Prompt("c", "", (1, 8, 2, 8) * 8)]

T = TypeVar("T")


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
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    return as_policy(LlamaForCausalLM(config).to(DEVICE))


def with_engine(policy: Policy, program: Callable[[TorchEngine], Awaitable[T]], **options: Any) -> T:
    async def run() -> T:
        engine = TorchEngine(policy, decode=str, cores=FixedCores(1), **{"lanes": 4, "prefill_tokens": 20, **options})
        try:
            return await program(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def ask(prompt: Prompt = PROMPTS[0], member: int = 0, num_new: int = NUM_NEW, **options: Any) -> SampleRequest:
    return SampleRequest(prompt, (0, prompt.uid, member), num_new, **{"temperature": 0.7, **options})


def sampled(policy: Policy, *, engine: dict[str, Any] | None = None, **options: Any) -> list[Sample]:
    """Two answers to each prompt, all at once."""
    requests = [ask(prompt, member, **options) for prompt in PROMPTS for member in range(2)]

    async def sample_all(of: TorchEngine) -> list[Sample]:
        return list(await asyncio.gather(*(of.sample(request) for request in requests)))

    return with_engine(policy, sample_all, **(engine or {}))


def trainers_logprobs(policy: Policy, prompt: Prompt, answer: Sample, shape: Shape) -> list[float]:
    """Of an answer in a pass of its own, after its prompt."""
    rows, own = torch.tensor((*prompt.tokens, *answer.tokens[:-1]), device=DEVICE), len(prompt.tokens)
    plan = policy.packed([Segment(0, own), Segment(own, len(rows) - own, 0, own)])
    first = own - 1
    with torch.no_grad():
        hidden_TD = policy.hidden(rows, torch.arange(len(rows), device=DEVICE), plan)[first:]
        seen = [rows[: row + 1].unique() for row in range(first, len(rows))]
        targets_N = torch.tensor(answer.tokens, device=DEVICE)
        logp_N, _ = token_logprobs(policy.head, hidden_TD, targets_N, shape, Conditions(seen, answer.kept))
    return logp_N.tolist()


# ---- engine and trainer


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.8, "repetition_penalty": 1.3}, {"min_p": 0.1, "temperature": 1.0}],
    ids=str,
)
def test_recorded_logprobs_are_the_trainers(policy: Policy, options: dict[str, Any]) -> None:
    shape = Shape(options.get("temperature", 0.7), options.get("repetition_penalty", 1.0))
    for number, answer in enumerate(sampled(policy, **options)):
        expected = trainers_logprobs(policy, PROMPTS[number // 2], answer, shape)
        assert list(answer.logprobs) == pytest.approx(expected, abs=1e-4)
        assert len(answer.tokens) == NUM_NEW


def test_bitwise_parity_holds_or_is_refused(policy: Policy) -> None:
    """Whether it can be had is tried on this GPU; what is promised then is kept by the engine too."""
    try:
        exact = with_parity(policy, "bitwise")
    except UserError as refused:
        pytest.skip(str(refused))
    for engine in ({}, {"lanes": 1}, {"lanes": 6, "prefill_tokens": 7}):
        for number, answer in enumerate(sampled(exact, engine=engine)):
            assert list(answer.logprobs) == trainers_logprobs(exact, PROMPTS[number // 2], answer, Shape(0.7))


def test_greedy_answers_are_those_of_transformers(policy: Policy) -> None:
    answers = sampled(policy, temperature=0.0)
    policy.model.set_attn_implementation("sdpa")
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt.tokens], device=DEVICE)
        expected = policy.model.generate(
            ids, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tuple(expected[0, len(prompt.tokens) :].tolist()) == answers[2 * number].tokens


def test_an_engine_in_bfloat16_is_near(policy: Policy) -> None:
    model: Any = LlamaForCausalLM(policy.model.config).to(DEVICE)
    model.load_state_dict(policy.model.state_dict())
    half = in_dtype(as_policy(model), torch.bfloat16)
    gaps = []
    for number, answer in enumerate(sampled(half)):
        expected = trainers_logprobs(policy, PROMPTS[number // 2], answer, Shape(0.7))
        gaps += [abs(one - other) for one, other in zip(answer.logprobs, expected, strict=True)]
    assert 0 < sum(gaps) / len(gaps) < 0.1


@pytest.mark.parametrize("fixed_order", [False, True])
def test_any_schedule_of_a_sequences_rows_is_one_pass(fixed_order: bool) -> None:
    for seed in range(8):
        schedule = Schedule(seed, LayerShape(2, 16, 16), 3, (1, 4), scatter=seed % 2 == 1, fixed_order=fixed_order)
        schedule.move_to(torch.device(DEVICE))
        torch.testing.assert_close(schedule.in_passes(), schedule.at_once(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fixed_order", [False, True])
def test_gradients_of_attention_are_those_of_the_cpu(fixed_order: bool) -> None:
    segments = [Segment(0, 40), Segment(40, 9, 0, 40), Segment(49, 64, 0, 40), Segment(113, 33)]
    tensors = [torch.randn(heads, 146, 16) for heads in (6, 2, 2)]
    results = []
    for device in (torch.device("cpu"), torch.device(DEVICE)):
        query_HTD, key_GTD, value_GTD = leaves = [tensor.to(device).requires_grad_() for tensor in tensors]
        plan = PackedAttention(segments, device, fixed_order=fixed_order)
        output = plan.attend(0, query_HTD, key_GTD, value_GTD, 0.25)
        gradients = torch.autograd.grad(output.square().sum(), leaves)
        results.append([tensor.cpu() for tensor in (output.detach(), *gradients)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


# ---- in flight


def test_an_interrupted_rollout_goes_on_where_it_was(policy: Policy) -> None:
    async def in_two_stretches(engine: TorchEngine) -> tuple[Sample, Sample]:
        whole = await engine.sample(ask())
        begun = await engine.sample(ask(pause_after=35))
        return whole, await engine.sample(ask(so_far=begun))

    whole, sample = with_engine(policy, in_two_stretches)
    assert sample.tokens == whole.tokens
    assert list(sample.logprobs) == pytest.approx(list(whole.logprobs), abs=1e-4)


def test_recomputing_for_the_same_weights_changes_nothing(policy: Policy) -> None:
    async def updated_on_the_way(engine: TorchEngine) -> tuple[Sample, Sample]:
        whole = await engine.sample(ask(num_new=200))
        again = asyncio.create_task(engine.sample(ask(num_new=200)))
        await asyncio.sleep(0.05)
        weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
        await engine.load(weights, 1, recompute=True)
        return whole, await again

    whole, sample = with_engine(policy, updated_on_the_way)
    assert sample.tokens == whole.tokens
    assert list(sample.logprobs) == pytest.approx(list(whole.logprobs), abs=1e-4)


def test_who_gives_way_when_the_cache_is_full_loses_nothing(policy: Policy) -> None:
    plenty, scarce = sampled(policy), sampled(policy, engine={"cache_bytes": 7 * 2 * 2 * 2 * 16 * 32 * 4})
    for one, other in zip(plenty, scarce, strict=True):
        assert one.tokens == other.tokens
        assert list(one.logprobs) == pytest.approx(list(other.logprobs), abs=1e-4)


def test_sleep_gives_back_the_memory_of_the_gpu(policy: Policy) -> None:
    """That of a cache of 64 MiB and of the weights; after waking the answers are what they were."""

    async def around_a_nap(engine: TorchEngine) -> tuple[Sample, Sample, list[int]]:
        before = await engine.sample(ask())
        weights = {name: tensor.cpu().clone() for name, tensor in policy.weights().items()}
        memory = [torch.cuda.memory_allocated()]
        await engine.sleep(weights=True)
        memory.append(torch.cuda.memory_allocated())
        await engine.load(weights, 1)
        await engine.wake()
        after = await engine.sample(ask())
        memory.append(torch.cuda.memory_allocated())
        return before, after, memory

    before, after, (awake, asleep, again) = with_engine(policy, around_a_nap, cache_bytes=2**26)
    assert after.tokens == before.tokens
    assert awake - asleep > 0.9 * 2**26 + sum(tensor.numel() * 4 for tensor in policy.weights().values()) // 2
    assert again == pytest.approx(awake, rel=0.05)
