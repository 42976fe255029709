"""The cache: prompts in bounded pieces beside rollouts that go on, a budget, and who gives way when it is full.

A block holds 32 tokens. What a rollout stands on is in blocks of its prompt, shared by all who stand on it, and in
blocks of its own tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
import torch

from headway.generate.lane import Lane
from headway.generate.torch_engine import TorchEngine
from headway.models.cores import FixedCores
from headway.models.policy import Policy, with_parity
from headway.stages import SampleRequest
from headway.types import Prompt, UserError
from tests import tiny
from tests.generate.harness import Pass, Passes, accounted, answers, ask, assert_same, engine_of, run, sample_together
from tests.tiny import make_policy, own_logprobs, random_ids


@pytest.fixture
def policy() -> Policy:
    return make_policy(max_position_embeddings=256)


def prompt_of(num_tokens: int, seed: int = 0) -> Prompt:
    return Prompt(f"{num_tokens} tokens, {seed}", "", tuple(random_ids(num_tokens, seed).tolist()))


# ---- prompts in pieces


def test_a_long_prompt_delays_nobody(policy):
    """Three rollouts get a token in every pass, beside 16 of the newcomer's 100 tokens; the seventh pass brings his
    first token, and then he is one of them.
    """

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, prefill_tokens=16) as engine:
            running = [asyncio.create_task(engine.sample(ask("abc", 20, member=member))) for member in range(3)]
            async with passes.held_at(3):
                newcomer = asyncio.create_task(engine.sample(ask(prompt_of(100), 3)))
            await asyncio.gather(*running, newcomer)
        return passes.seen[4:]

    assert run(program()) == [*[Pass(3, 16)] * 6, Pass(3, 4), *[Pass(4)] * 2, *[Pass(3)] * 7]


def test_a_long_way_back_delays_nobody_either(policy):
    """A rollout that goes on after 40 tokens has them computed in pieces; its prompt is still there."""

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, prefill_tokens=16) as engine:
            begun = await engine.sample(ask("abc", 50, pause_after=40))
            number = len(passes.seen)
            running = [asyncio.create_task(engine.sample(ask("abc", 9, member=member))) for member in range(1, 3)]
            async with passes.held_at(number):
                back = asyncio.create_task(engine.sample(ask("abc", 42, so_far=begun)))
            await asyncio.gather(*running, back)
        return passes.seen[number:]

    assert run(program()) == [Pass(2), *[Pass(2, 16)] * 2, Pass(2, 8), Pass(3), *[Pass(2)] * 3]


def test_who_came_first_has_his_prompt_first(policy):
    """20 and 10 tokens, 16 at a time: the second prompt has what the first one leaves."""

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, prefill_tokens=16) as engine:
            await sample_together(engine, passes, [ask(prompt_of(20), 2), ask(prompt_of(10), 2)])
        return passes.seen

    assert run(program()) == [Pass(0, 16), Pass(0, 4 + 10), Pass(2)]


def test_a_group_waits_together_for_its_prompt(policy):
    """40 tokens in three passes, once for all four; all of them have their first token with the last piece."""

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, prefill_tokens=16) as engine:
            await sample_together(engine, passes, [ask(prompt_of(40), 2, member=member) for member in range(4)])
        return passes.seen

    assert run(program()) == [Pass(0, 16), Pass(0, 16), Pass(0, 8), Pass(4)]


# ---- prompts that are known


def prefilled(policy: Policy, prompts: Sequence[Prompt], **options) -> list[int]:
    """Prompt tokens that are computed when such prompts are asked one after the other, for two tokens each."""

    async def program():
        passes = Passes(policy)
        numbers = []
        async with engine_of(policy, **options) as engine:
            for prompt in prompts:
                before = len(passes.seen)
                await engine.sample(ask(prompt, 2))
                numbers.append(sum(one.prefilled for one in passes.seen[before:]))
        return numbers

    return run(program())


A, B, C, D = (prompt_of(num_tokens) for num_tokens in (5, 6, 7, 8))


def test_the_prompt_that_was_asked_for_longest_ago_makes_room(policy):
    """Four blocks; an answer takes one beside its prompt's. After A B C and A again, D takes the place of B; then B
    that of A, for C has been asked for since.
    """
    assert prefilled(policy, [A, B, C, A, D, C, B, A], cache_blocks=4) == [5, 6, 7, 0, 8, 0, 6, 5]


def test_as_many_unused_prompts_are_kept_as_there_are_lanes(policy):
    assert prefilled(policy, [A, B, A, B, A], lanes=1) == [5, 6, 5, 6, 5]
    assert prefilled(policy, [A, B, A, B, C, A, B], lanes=2) == [5, 6, 0, 0, 7, 5, 6]


def test_prompts_are_known_by_their_tokens_whoever_asks(policy):
    of_another = Prompt("of another", "", A.tokens)
    longer = Prompt(A.uid, A.text, (*A.tokens, 1))
    assert prefilled(policy, [A, of_another, longer]) == [5, 0, 6]


@torch.no_grad()
def test_b18_no_prompt_is_served_across_versions_while_old_ones_are_in_use():
    """Two members of a group in flight when the weights change; two others and one who asks the same under another name
    come after it. The prompt is computed once for each version, and those in flight keep theirs.
    """
    policy, old, new = make_policy(), make_policy(), make_policy(seed=1)
    prompt, same = tiny.prompt("1+2="), tiny.prompt("1+2=", uid="of another")

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=8) as engine:
            before = [asyncio.create_task(engine.sample(ask(prompt, 20, member=member))) for member in range(2)]
            async with passes.held_at(5):
                load = asyncio.create_task(engine.load(new.weights(), 1))
                await asyncio.sleep(0)
                late = [ask(prompt, 9, member=2), ask(prompt, 9, member=3), ask(same, 9)]
                after = [asyncio.create_task(engine.sample(request)) for request in late]
            await load
            samples = await asyncio.gather(*before), await asyncio.gather(*after)
            return *samples, passes.seen, await engine.status()

    before, after, passes, status = run(program())
    assert [one.prefilled for one in passes if one.prefilled] == [4, 4]
    for sample in before:
        assert sample.versions == (0,) * 6 + (1,) * 14
        assert sample.logprobs[:6] == pytest.approx(
            own_logprobs(old, prompt.tokens, sample.tokens)[:6].tolist(), abs=1e-5
        )
    for sample in after:
        assert sample.versions == (1,) * 9
        assert sample.logprobs == pytest.approx(own_logprobs(new, prompt.tokens, sample.tokens).tolist(), abs=1e-5)
    assert (status.blocks_free + status.blocks_unused, status.blocks_unused) == (status.blocks, 1)


# ---- the budget


@pytest.fixture
def gave_way(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SampleRequest, list[int]]]:
    """Who gave way, and the order in which those who held a lane then had been admitted, himself included."""
    seen = []

    def noting(engine: TorchEngine, lane: Lane) -> None:
        seen.append((lane.request, [other.number - lane.number for other in engine._lanes]))
        preempt(engine, lane)

    preempt = TorchEngine._preempt
    monkeypatch.setattr(TorchEngine, "_preempt", noting)
    return seen


def test_the_youngest_give_way_and_come_back_first(policy, gave_way):
    """Five blocks: a prompt's and one of each of four members, until their 33rd token wants a second one. The first
    member has the last one's, the second the third one's; when both have ended, the others' 33 tokens are computed
    again, and go on.
    """
    requests = [ask("abc", 40, member=member) for member in range(4)]

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, cache_blocks=5) as engine:
            samples = await sample_together(engine, passes, requests)
            return samples, passes.seen, await engine.status(), await engine.status()

    samples, passes, status, again = run(program())
    assert [request for request, _ in gave_way] == [requests[3], requests[2]]
    assert passes == [Pass(0, 3), *[Pass(4)] * 32, *[Pass(2)] * 7, Pass(0, 66), *[Pass(2)] * 6]
    assert (status.num_preempted, status.blocks_free, status.blocks_unused) == (2, 4, 1)
    assert (status.blocks_most_used, again.blocks_most_used) == (5, 0)
    for sample, expected in zip(samples, answers(make_policy(max_position_embeddings=256), requests), strict=True):
        assert_same(sample, expected)


@pytest.mark.parametrize("seed", range(3))
def test_a_cache_that_is_too_small_leaves_no_trace(policy, gave_way, seed):
    """All end, in every bit as alone; whoever gave way was the youngest, and not the oldest at the same time."""
    policy = with_parity(policy, "bitwise")
    chance = random.Random(seed)
    requests = [
        ask(prompt_of(chance.randint(1, 70), seed=number % 4), chance.randint(1, 64), member=number)
        for number in range(10)
    ]

    async def program():
        async with engine_of(policy, lanes=6, cache_blocks=6 + seed, prefill_tokens=50) as engine:
            samples = await asyncio.gather(*(engine.sample(request) for request in requests))
            await accounted(engine)
            return samples, await engine.status()

    samples, status = run(program())
    assert status.num_preempted == len(gave_way) > 0
    for _, others in gave_way:
        assert max(others) == 0
        assert len(others) > 1
    assert samples == answers(policy, requests, lanes=1)


def test_a_rollout_that_gave_way_is_looked_at_and_interrupted_like_any_other(policy):
    """The second one, at its 33rd token; it waits, with all its tokens, for the first one's end."""
    requests = [ask("abc", 60, member=member) for member in range(2)]

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, cache_blocks=3) as engine:
            tasks = [asyncio.create_task(engine.sample(request)) for request in requests]
            async with passes.held_at(40):
                look = asyncio.create_task(engine.peek(requests[1]))
                status = asyncio.create_task(engine.status())
                await asyncio.sleep(0)
                engine.interrupt(requests[1])
            return await look, await status, await tasks[1], await tasks[0]

    look, status, sample, _ = run(program())
    assert (status.num_lanes, status.num_waiting, status.blocks_free) == (1, 1, 0)
    assert len(sample.tokens) == 33
    assert look == sample


def test_what_can_never_fit_is_refused_and_the_next_is_served(policy):
    """Two blocks of 8192 bytes: one for the prompt, one for 32 tokens."""

    async def program():
        async with engine_of(policy, cache_blocks=2) as engine:
            with pytest.raises(UserError) as refusal:
                await engine.sample(ask(prompt_of(5), 33))
            return str(refusal.value), await engine.sample(ask(prompt_of(5), 32))

    message, sample = run(program())
    assert message == (
        "prompt 5 tokens, 0 has 5 tokens; with 33 new ones its keys and values take 24576 bytes, and the cache has "
        "16384: raise generate.cache_bytes or lower max_new_tokens"
    )
    assert len(sample.tokens) == 32


def test_a_budget_of_less_than_two_blocks_is_refused(policy):
    with pytest.raises(UserError, match=r"cache_bytes is 16383, and a block of 32 tokens takes 8192 .* at least 16384"):
        TorchEngine(policy, lanes=1, decode=tiny.decode, cores=FixedCores(1), cache_bytes=16383)
