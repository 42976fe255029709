"""What every implementation of `headway.stages.Generator` keeps. A new one is a line in IMPLEMENTATIONS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import torch

from headway.models.policy import Policy
from headway.models.weights import fingerprint
from headway.stages import Generator
from headway.types import UserError
from tests.generate.harness import ask, engine_of, run
from tests.tiny import make_policy

Opened = AbstractAsyncContextManager[Generator]


@asynccontextmanager
async def embedded(policy: Policy) -> AsyncIterator[Generator]:
    async with engine_of(policy, lanes=2) as engine:
        yield engine


IMPLEMENTATIONS: dict[str, Callable[[Policy], Opened]] = {"embedded": embedded}


@pytest.fixture(params=IMPLEMENTATIONS)
def opened(request: pytest.FixtureRequest) -> Callable[[], Opened]:
    """A new generator of two rollouts at a time, which samples from `make_policy()` under version 0."""
    return lambda: IMPLEMENTATIONS[request.param](make_policy())


def test_a_token_has_one_log_prob_and_one_version(opened):
    async def program():
        async with opened() as generator:
            return await asyncio.gather(*(generator.sample(ask("1+2=", 7, member=member)) for member in range(5)))

    for sample in run(program()):
        assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions) == 7
        assert all(logprob < 0 for logprob in sample.logprobs)
        assert set(sample.versions) == {0}
        assert sample.finish == "length"


def test_what_is_drawn_follows_from_the_identity(opened):
    async def program():
        async with opened() as generator:
            together = await asyncio.gather(*(generator.sample(ask("ab", 9, member=member)) for member in range(4)))
            return together, [await generator.sample(ask("ab", 9, member=member)) for member in reversed(range(4))]

    together, one_by_one = run(program())
    assert [sample.tokens for sample in together] == [sample.tokens for sample in reversed(one_by_one)]
    assert len({sample.tokens for sample in together}) == 4


def test_temperature_0_is_greedy_whoever_asks(opened):
    async def program():
        async with opened() as generator:
            return [await generator.sample(ask("ab", 9, member=member, temperature=0.0)) for member in range(3)]

    samples = run(program())
    assert len({sample.tokens for sample in samples}) == 1
    assert samples[0].logprobs == (0.0,) * 9


def test_an_end_id_is_the_last_token(opened):
    async def program():
        async with opened() as generator:
            whole = await generator.sample(ask("ab", 12))
            end = whole.tokens[5]
            return whole, end, await generator.sample(ask("ab", 12, end_ids=frozenset({end})))

    whole, end, ended = run(program())
    length = whole.tokens.index(end) + 1
    assert ended.tokens == whole.tokens[:length]
    assert ended.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
    assert ended.finish == "stop"


def test_a_stop_string_cuts_the_text_and_no_ids(opened):
    async def program():
        async with opened() as generator:
            whole = await generator.sample(ask("ab", 12))
            stop = whole.text[3:5]
            return whole, stop, await generator.sample(ask("ab", 12, stop=(stop,)))

    whole, stop, stopped = run(program())
    place = whole.text.index(stop)
    assert (stopped.text, stopped.finish) == (whole.text[:place], "stop")
    assert stopped.tokens == whole.tokens[: place + 2]


def test_loaded_weights_are_those_sampled_from(opened):
    new = make_policy(seed=1)

    async def program():
        async with opened() as generator:
            before = await generator.sample(ask("ab", 6))
            hash_before = await generator.fingerprint()
            await generator.load(new.weights(), 7)
            return before, hash_before, await generator.sample(ask("ab", 6)), await generator.fingerprint()

    before, hash_before, after, hash_after = run(program())
    assert hash_before == fingerprint(make_policy().weights())
    assert hash_after == fingerprint(new.weights())
    assert before.versions == (0,) * 6
    assert after.versions == (7,) * 6
    assert after.logprobs != pytest.approx(before.logprobs, abs=1e-3)


def test_weights_are_its_own(opened):
    """What happens to the sender's tensors afterwards is nothing to the generator."""
    new = make_policy(seed=1)

    async def program():
        async with opened() as generator:
            await generator.load(new.weights(), 1)
            before = await generator.fingerprint()
            for tensor in new.weights().values():
                tensor.zero_()
            return before, await generator.fingerprint()

    before, after = run(program())
    assert before == after


def test_rollouts_in_flight_go_on_over_an_update(opened):
    """Versions of a rollout never fall, and end with the newest."""
    new = make_policy(seed=1)

    async def program():
        async with opened() as generator:
            task = asyncio.create_task(generator.sample(ask("ab", 50)))
            await asyncio.sleep(0)
            await asyncio.gather(*(generator.load(new.weights(), version) for version in (1, 2)))
            return await task

    sample = run(program())
    assert list(sample.versions) == sorted(sample.versions)
    assert sample.versions[-1] == 2
    assert len(sample.tokens) == 50


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"nonsense": torch.zeros(1)},
        {**make_policy().weights(), "nonsense": torch.zeros(1)},
        {**make_policy(seed=1).weights(), "model.norm.weight": torch.zeros(3)},
    ],
    ids=["none", "another", "one too many", "another shape"],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(opened, weights):
    async def program():
        async with opened() as generator:
            before = await generator.sample(ask("ab", 6))
            with pytest.raises(UserError):
                await generator.load(weights, 1)
            return before, await generator.sample(ask("ab", 6)), await generator.fingerprint()

    before, after, hash_after = run(program())
    assert (after.tokens, after.versions) == (before.tokens, before.versions)
    assert hash_after == fingerprint(make_policy().weights())


def test_more_requests_than_places_are_all_answered(opened):
    async def program():
        async with opened() as generator:
            return await asyncio.gather(*(generator.sample(ask("ab", 1 + n % 5, member=n)) for n in range(23)))

    assert [len(sample.tokens) for sample in run(program())] == [1 + n % 5 for n in range(23)]


def test_cancelling_the_caller_frees_the_place(opened):
    async def program():
        async with opened() as generator:
            long = [asyncio.create_task(generator.sample(ask("ab", 60, member=member))) for member in range(2)]
            await asyncio.sleep(0)
            for task in long:
                task.cancel()
            sample = await generator.sample(ask("1+2=", 5))
            return sample, await asyncio.gather(*long, return_exceptions=True)

    sample, cancelled = run(program())
    assert len(sample.tokens) == 5
    assert all(isinstance(error, asyncio.CancelledError) for error in cancelled)


def test_a_request_that_exceeds_the_context_is_refused_and_the_next_is_served(opened):
    async def program():
        async with opened() as generator:
            with pytest.raises(UserError, match="context of 64"):
                await generator.sample(ask("ab", 63))
            return await generator.sample(ask("ab", 62))

    assert len(run(program()).tokens) == 62


def test_closing_twice_is_closing_once_and_nothing_is_answered_afterwards(opened):
    async def program():
        async with opened() as generator:
            await asyncio.gather(generator.close(), generator.close())
            for call in (generator.sample(ask("ab")), generator.load({}, 1), generator.fingerprint()):
                with pytest.raises(RuntimeError, match="closed"):
                    await call

    run(program())
