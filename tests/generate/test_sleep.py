"""Sleep and wake: memory is given back and taken again, and rollouts in flight notice nothing."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from headway.models.policy import Policy, load_policy, with_parity
from headway.models.products import USES_ONEDNN
from headway.models.weights import fingerprint
from headway.types import Prompt, UserError
from tests.generate.harness import Pass, Passes, accounted, answers, ask, engine_of, run
from tests.tiny import make_policy, random_ids


@pytest.fixture
def policy() -> Policy:
    return with_parity(make_policy(), "bitwise")


REQUESTS = [
    ask(prompt, num, member=member, temperature=temperature)
    for member, (prompt, num, temperature) in enumerate(
        [("1+2=", 20, 1.0), ("1+2=", 12, 0.7), ("a", 30, 1.0), ("0123456789+-", 25, 1.3), ("bb c", 14, 0.0)]
    )
]


@pytest.mark.parametrize("weights", [False, True], ids=["the cache", "cache and weights"])
@pytest.mark.parametrize("number", [0, 1, 7], ids=["in a prompt", "at its first token", "later"])
def test_rollouts_in_flight_survive_it_in_every_bit(policy, number, weights):
    """Four of five are in flight, one waits; prompts take two passes. They stand still while it lasts."""
    own = make_policy().weights()

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=4, prefill_tokens=10) as engine:
            tasks = [asyncio.create_task(engine.sample(request)) for request in REQUESTS]
            async with passes.held_at(number):
                asleep = asyncio.create_task(engine.sleep(weights=weights))
            await asleep
            before = len(passes.seen)
            await asyncio.sleep(0.02)
            assert len(passes.seen) == before == number + 1
            if weights:
                await engine.load(own, 0)
            await engine.wake()
            samples = await asyncio.gather(*tasks)
            await accounted(engine)
            return samples

    samples = run(program())
    assert samples == answers(with_parity(make_policy(), "bitwise"), REQUESTS)


def test_what_was_in_the_cache_is_computed_again(policy):
    """A prompt of 4 tokens, and the 3 tokens sampled by then; another's prompt of 3, which waited in the cache."""

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=2) as engine:
            await engine.sample(ask("abc", 1))
            task = asyncio.create_task(engine.sample(ask("1+2=", 5)))
            async with passes.held_at(3):
                asleep = asyncio.create_task(engine.sleep())
            await asleep
            del passes.seen[:]
            await engine.wake()
            await task
            await engine.sample(ask("abc", 1))
        return passes.seen

    assert run(program()) == [Pass(0, 4), Pass(0, 3), Pass(1), Pass(0, 3)]


def test_what_is_asked_for_while_it_sleeps_waits_until_it_wakes(policy):
    """And may be looked at, interrupted and given up meanwhile."""

    async def program():
        async with engine_of(policy) as engine:
            await engine.sleep()
            requests = [ask("abc", 6, member=member) for member in range(3)]
            tasks = [asyncio.create_task(engine.sample(request)) for request in requests]
            await asyncio.sleep(0.01)
            look = await engine.peek(requests[0])
            engine.interrupt(requests[1])
            tasks[2].cancel()
            interrupted = await tasks[1]
            status = await engine.status()
            assert not tasks[0].done()
            await engine.wake()
            sample = await tasks[0]
            return look, interrupted, sample, status, await engine.status()

    look, interrupted, sample, asleep, awake = run(program())
    assert look == interrupted
    assert (look.tokens, look.finish) == ((), "interrupted")
    assert sample == answers(policy, [ask("abc", 6)])[0]
    assert (asleep.asleep, awake.asleep) == (True, False)
    assert (asleep.num_passes, asleep.blocks_free, asleep.num_lanes) == (0, asleep.blocks, 0)
    assert (awake.num_lanes, awake.num_waiting) == (0, 0)


def test_weights_that_were_given_up_must_come_before_it_wakes(policy):
    """Refused ones do not count. Nothing can be said of weights that are not there."""
    new = make_policy(seed=1)

    async def program():
        async with engine_of(policy) as engine:
            await engine.sleep(weights=True)
            for call in (engine.wake(), engine.fingerprint()):
                with pytest.raises(UserError, match="weights were given up when it went to sleep: load new ones first"):
                    await call
            with pytest.raises(UserError, match="was not sent"):
                await engine.load({}, 1)
            assert sum(tensor.untyped_storage().nbytes() for tensor in policy.weights().values()) == 0
            with pytest.raises(UserError, match="load new ones first"):
                await engine.wake()
            await engine.load(new.weights(), 3)
            said = await engine.fingerprint()
            assert (await engine.status()).asleep, "weights alone wake nobody"
            await engine.wake()
            return said, await engine.sample(ask("abc", 6))

    said, sample = run(program())
    assert said == fingerprint(new.weights())
    assert sample.versions == (3,) * 6
    assert sample.logprobs == answers(with_parity(make_policy(seed=1), "bitwise"), [ask("abc", 6)])[0].logprobs


def test_weights_out_of_a_model_folder_can_be_given_up_too(model_folder):
    """They lie in a mapped file at first, which nobody can shrink."""
    policy = load_policy(str(model_folder), "cpu")
    weights = {name: tensor.clone() for name, tensor in policy.weights().items()}

    async def program():
        async with engine_of(policy) as engine:
            before = await engine.sample(ask("abc", 6))
            await engine.sleep(weights=True)
            await engine.load(weights, 0)
            await engine.wake()
            return before, await engine.sample(ask("abc", 6))

    before, after = run(program())
    assert before == after


def test_weights_that_come_while_it_sleeps_with_its_own_are_those_it_wakes_with(policy):
    async def program():
        async with engine_of(policy) as engine:
            await engine.sleep()
            await engine.load(make_policy(seed=1).weights(), 1)
            await engine.wake()
            return await engine.sample(ask("abc", 6))

    assert run(program()).versions == (1,) * 6


def test_sleeping_twice_is_sleeping_once_and_waking_twice_too(policy):
    async def program():
        async with engine_of(policy) as engine:
            await engine.wake()
            await engine.sleep()
            await engine.sleep(weights=True)
            await engine.sleep(weights=True)
            await engine.load(make_policy().weights(), 0)
            await engine.wake()
            await engine.wake()
            return await engine.sample(ask("abc", 6))

    assert run(program()) == answers(with_parity(make_policy(), "bitwise"), [ask("abc", 6)])[0]


@pytest.mark.skipif(not USES_ONEDNN, reason="weights are packed where oneDNN multiplies them")
def test_weights_are_packed_while_they_are_used_and_in_sleep_they_are_not(policy):
    layer = policy.model.model.layers[0].mlp.down_proj

    async def program():
        async with engine_of(policy) as engine:
            await engine.sample(ask("abc", 2))
            first = layer.packed
            await engine.load({name: tensor * 1.5 for name, tensor in policy.weights().items()}, 1)
            await engine.sample(ask("abc", 2))
            second = layer.packed
            await engine.sleep(weights=True)
            return first, second

    first, second = run(program())
    assert None not in (first, second)
    assert first is not second
    assert layer.packed is None


def test_an_engine_is_closed_in_its_sleep(policy):
    async def program():
        async with engine_of(policy) as engine:
            await engine.sleep(weights=True)
            task = asyncio.create_task(engine.sample(ask("abc", 6)))
            await asyncio.sleep(0)
            await engine.close()
            with pytest.raises(RuntimeError, match="the engine is closed"):
                await task

    run(program())


def resident_mb() -> float:
    """Memory of this process that is there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def resident_over_three_sleeps() -> list[tuple[float, float, float, float]]:
    """Memory when awake, with the cache gone, with both gone, and woken again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
    sizes = {"hidden_size": 64, "head_dim": 256, "num_key_value_heads": 4, "num_hidden_layers": 4}
    policy = make_policy(**sizes, vocab_size=120_000, initializer_range=0.02)
    weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
    requests = [ask(Prompt(str(seed), "", tuple(random_ids(60, seed).tolist())), 1) for seed in range(24)]

    async def program():
        seen = []
        async with engine_of(policy, lanes=24, cache_blocks=200, decode=str) as engine:
            for _ in range(3):
                await asyncio.gather(*(engine.sample(request) for request in requests))
                trim(0)  # what passes before it have given back is not at issue here
                full = resident_mb()
                await engine.sleep()
                without_cache = resident_mb()
                await engine.sleep(weights=True)
                without_both = resident_mb()
                await engine.load(weights, 0)
                await engine.wake()
                seen.append((full, without_cache, without_both, resident_mb()))
        return seen

    return run(program())


@pytest.mark.skipif(sys.platform != "linux", reason="needs a system that says how much memory is taken")
def test_memory_is_given_back_and_taken_again():
    """Again and again. The cache: two blocks of 1 MiB of each of 24 prompts are written, 50 MB of the budget's 210. The
    weights: embedding and head, each of 64 by 120,000, 61 MB. In a process of its own, since the heap of one that has
    run other tests gives back and takes memory at moments of its own.
    """
    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        first, *later = fresh.apply(resident_over_three_sleeps)
    for full, without_cache, without_both, awake in (first, *later):
        assert full - without_cache > 44
        assert without_cache - without_both > 45
        assert awake > without_both
    for resident in later:
        assert all(now < before + 40 for now, before in zip(resident, first, strict=True))
