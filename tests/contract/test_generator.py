"""What every implementation of `headway.stages.Generator` keeps. A new one is a line in IMPLEMENTATIONS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest
import torch

from headway.models.policy import Policy
from headway.models.weights import fingerprint
from headway.stages import Force, Generator, Sample
from headway.types import UserError
from tests.generate.harness import ask, engine_of, run
from tests.tiny import decode, encode, make_policy, own_logprobs, plain

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
        assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions) == len(sample.mask) == 7
        assert all(logprob < 0 for logprob in sample.logprobs)
        assert set(sample.versions) == {0}
        assert all(sample.mask)
        assert sample.kept is None
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


# ---- what is drawn among, and what is put in


@torch.no_grad()
@pytest.mark.parametrize("ways", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}], ids=str)
def test_what_a_truncated_token_was_drawn_among_is_recorded(opened, ways):
    """Its log-prob is what is left when the model's own is divided by the sum of what was kept."""

    async def program():
        async with opened() as generator:
            requests = [ask("1+2=", 9, member=member, **ways) for member in range(3)]
            return await asyncio.gather(*(generator.sample(request) for request in requests))

    for sample in run(program()):
        assert sample.kept is not None
        assert len(sample.kept) == 9
        for place, ids in enumerate(sample.kept):
            assert sample.tokens[place] in ids
            assert list(ids) == sorted(ids)
            if "top_k" in ways:
                assert len(ids) == 3
            before = sample.tokens[:place]
            own = [own_logprobs(make_policy(), encode("1+2="), (*before, token))[-1] for token in ids]
            expected = own[list(ids).index(sample.tokens[place])] - torch.stack(own).logsumexp(0)
            assert sample.logprobs[place] == pytest.approx(expected.item(), abs=1e-5)


def test_greedy_is_greedy_whatever_else_is_asked(opened):
    async def program():
        async with opened() as generator:
            plain = await generator.sample(ask("ab", 9, temperature=0.0))
            return plain, await generator.sample(ask("ab", 9, temperature=0.0, top_k=2, top_p=0.5, min_p=0.1))

    plain, truncated = run(program())
    assert truncated == plain
    assert plain.kept is None


@torch.no_grad()
def test_a_repetition_penalty_makes_what_was_there_less_likely(opened):
    """A positive logit of an id in the context is divided by it, a negative one multiplied; prompt included."""

    async def program():
        async with opened() as generator:
            return await generator.sample(ask("abab", 12, repetition_penalty=1.7))

    sample = run(program())
    logits_TV = plain(make_policy())(input_ids=torch.tensor([[*encode("abab"), *sample.tokens]])).logits[0]
    for place, (token, logprob) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
        logits_V = logits_TV[3 + place].clone()
        for seen in {*encode("abab"), *sample.tokens[:place]}:
            logits_V[seen] *= 1.7 if logits_V[seen] < 0 else 1 / 1.7
        assert logprob == pytest.approx(torch.log_softmax(logits_V, -1)[token].item(), abs=1e-5)


PHRASE = encode("=42?")


def test_a_phrase_is_put_in_where_it_was_asked_for_and_nobody_sampled_it(opened):
    async def program():
        async with opened() as generator:
            without = await generator.sample(ask("ab", 5))
            return without, await generator.sample(ask("ab", 12, force=Force(5, PHRASE)))

    without, sample = run(program())
    assert sample.tokens[:9] == without.tokens + PHRASE
    assert sample.mask == (True,) * 5 + (False,) * 4 + (True,) * 3
    assert sample.logprobs[5:9] == (0.0,) * 4
    assert len(sample.versions) == len(sample.tokens) == 12
    assert sample.text == decode(sample.tokens)


def test_a_phrase_is_left_out_where_the_answer_holds_what_it_is_for_or_has_ended(opened):
    async def program():
        async with opened() as generator:
            whole = await generator.sample(ask("ab", 12))
            unless = Force(5, PHRASE, unless=whole.text[2:4])
            end = frozenset({whole.tokens[4]})
            return (
                whole,
                await generator.sample(ask("ab", 12, force=unless)),
                await generator.sample(ask("ab", 12, force=Force(5, PHRASE), end_ids=end)),
                await generator.sample(ask("ab", 7, force=Force(5, PHRASE))),
            )

    whole, left_out, ended, cut = run(program())
    assert (left_out.tokens, left_out.mask) == (whole.tokens, whole.mask)
    assert (all(ended.mask), ended.finish) == (True, "stop")
    assert (cut.tokens, cut.finish) == (whole.tokens[:5] + PHRASE[:2], "length")


@pytest.mark.parametrize("length", [4, 5, 6, 9, 10])
def test_a_rollout_with_a_phrase_goes_on_where_it_was(opened, length):
    async def program():
        async with opened() as generator:
            request = ask("ab", 14, force=Force(5, PHRASE), top_k=9)
            whole = await generator.sample(request)
            begun = await generator.sample(replace(request, pause_after=length))
            return whole, begun, await generator.sample(replace(request, so_far=begun))

    whole, begun, sample = run(program())
    num = len(begun.tokens)
    assert begun.finish == "interrupted"
    assert (begun.tokens, begun.mask) == (whole.tokens[:num], whole.mask[:num])
    assert replace(sample, logprobs=()) == replace(whole, logprobs=())
    assert sample.logprobs == pytest.approx(whole.logprobs, abs=1e-5)


# ---- sleeping


@pytest.mark.parametrize("weights", [False, True], ids=["the cache", "cache and weights"])
def test_rollouts_in_flight_sleep_and_go_on(opened, weights):
    async def program():
        async with opened() as generator:
            whole = await asyncio.gather(*(generator.sample(ask("ab", 50, member=member)) for member in range(3)))
            tasks = [asyncio.create_task(generator.sample(ask("ab", 50, member=member))) for member in range(3)]
            await asyncio.sleep(0)
            await generator.sleep(weights=weights)
            assert not any(task.done() for task in tasks)
            if weights:
                await generator.load(make_policy().weights(), 0)
            await generator.wake()
            return whole, await asyncio.gather(*tasks)

    for whole, sample in zip(*run(program()), strict=True):
        assert replace(sample, logprobs=()) == replace(whole, logprobs=())
        assert sample.logprobs == pytest.approx(whole.logprobs, abs=1e-5)


def test_what_is_asked_for_in_its_sleep_is_answered_when_it_wakes(opened):
    async def program():
        async with opened() as generator:
            await generator.sleep()
            task = asyncio.create_task(generator.sample(ask("ab", 5)))
            await asyncio.sleep(0.02)
            assert not task.done()
            await generator.wake()
            return await task

    assert len(run(program()).tokens) == 5


def test_it_does_not_wake_without_weights(opened):
    async def program():
        async with opened() as generator:
            await generator.sleep(weights=True)
            for call in (generator.wake(), generator.fingerprint()):
                with pytest.raises(UserError):
                    await call
            await generator.load(make_policy(seed=1).weights(), 4)
            await generator.wake()
            return await generator.fingerprint(), await generator.sample(ask("ab", 5))

    said, sample = run(program())
    assert said == fingerprint(make_policy(seed=1).weights())
    assert sample.versions == (4,) * 5


# ---- ending early, looking on, going on


def assert_beginning(sample: Sample, whole: Sample, length: int) -> None:
    """The interrupted beginning of an answer, with what belongs to its tokens."""
    assert (sample.tokens, sample.versions) == (whole.tokens[:length], whole.versions[:length])
    assert sample.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
    assert (sample.finish, sample.text) == ("interrupted", decode(whole.tokens[:length]))


def test_an_interrupted_rollout_is_returned_as_far_as_it_has_come(opened):
    async def program():
        async with opened() as generator:
            whole = await generator.sample(ask("ab", 60))
            request = ask("ab", 60)
            task = asyncio.create_task(generator.sample(request))
            await asyncio.sleep(0)
            generator.interrupt(request)
            return whole, await task

    whole, sample = run(program())
    assert len(sample.tokens) < 60
    assert_beginning(sample, whole, len(sample.tokens))


def test_a_request_is_itself_and_an_equal_one_goes_on(opened):
    async def program():
        async with opened() as generator:
            first, second = ask("ab", 40), ask("ab", 40)
            tasks = [asyncio.create_task(generator.sample(request)) for request in (first, second)]
            await asyncio.sleep(0)
            generator.interrupt(second)
            return await asyncio.gather(*tasks)

    first, second = run(program())
    assert (first.finish, second.finish) == ("length", "interrupted")


def test_interrupting_what_is_not_in_flight_does_nothing(opened):
    async def program():
        async with opened() as generator:
            request = ask("ab", 6)
            generator.interrupt(request)
            sample = await generator.sample(request)
            generator.interrupt(request)
            return sample, await generator.sample(request)

    before, after = run(program())
    assert before.tokens == after.tokens
    assert after.finish == "length"


@pytest.mark.parametrize("length", [0, 4])
def test_a_rollout_that_waits_is_interrupted_with_what_it_came_with(opened, length):
    """Two others have the places."""

    async def program():
        async with opened() as generator:
            so_far = await generator.sample(ask("ab", 60, pause_after=length)) if length else None
            others = [asyncio.create_task(generator.sample(ask("1+2=", 60, member=member))) for member in range(2)]
            request = ask("ab", 60, so_far=so_far)
            task = asyncio.create_task(generator.sample(request))
            await asyncio.sleep(0)
            generator.interrupt(request)
            return so_far, await task, await asyncio.gather(*others)

    so_far, sample, others = run(program())
    assert sample == (so_far or Sample((), (), (), "interrupted", "", ()))
    assert [other.finish for other in others] == ["length", "length"]


def test_a_look_at_a_rollout_leaves_it_alone(opened):
    async def program():
        async with opened() as generator:
            whole = await generator.sample(ask("ab", 50))
            request = ask("ab", 50)
            task = asyncio.create_task(generator.sample(request))
            await asyncio.sleep(0)
            looks = [await generator.peek(request) for _ in range(4)]
            return whole, looks, await task, await generator.peek(request)

    whole, looks, sample, afterwards = run(program())
    assert sample.tokens == whole.tokens
    assert afterwards is None
    lengths = [len(look.tokens) for look in looks]
    assert lengths == sorted(lengths)
    for look, length in zip(looks, lengths, strict=True):
        assert_beginning(look, whole, length)


@pytest.mark.parametrize("length", [1, 3, 11])
def test_an_interrupted_rollout_goes_on_where_it_was(opened, length):
    async def program():
        async with opened() as generator:
            whole = await generator.sample(ask("ab", 12))
            begun = await generator.sample(ask("ab", 12, pause_after=length))
            return whole, begun, await generator.sample(ask("ab", 12, so_far=begun))

    whole, begun, sample = run(program())
    assert_beginning(begun, whole, length)
    assert sample.logprobs[:length] == begun.logprobs, "what was recorded is not recorded again"
    assert (sample.tokens, sample.versions, sample.finish) == (whole.tokens, whole.versions, "length")
    assert sample.logprobs == pytest.approx(whole.logprobs, abs=1e-5)


def test_a_rollout_may_pause_as_often_as_it_likes(opened):
    async def program():
        async with opened() as generator:
            whole = await generator.sample(ask("ab", 13))
            parts = [await generator.sample(ask("ab", 13, pause_after=3))]
            while parts[-1].finish == "interrupted":
                parts.append(await generator.sample(ask("ab", 13, so_far=parts[-1], pause_after=3)))
            return whole, parts

    whole, parts = run(program())
    assert [len(part.tokens) for part in parts] == [3, 6, 9, 12, 13]
    assert parts[-1].tokens == whole.tokens
    assert parts[-1].logprobs == pytest.approx(whole.logprobs, abs=1e-5)


def test_a_pause_after_nothing_returns_what_it_came_with(opened):
    async def program():
        async with opened() as generator:
            begun = await generator.sample(ask("ab", 12, pause_after=5))
            again = await generator.sample(ask("ab", 12, so_far=begun, pause_after=0))
            return begun, again, await generator.sample(ask("ab", 12, pause_after=0))

    begun, again, nothing = run(program())
    assert again == begun
    assert (nothing.tokens, nothing.finish) == ((), "interrupted")


def test_an_end_that_comes_with_the_pause_is_an_end(opened):
    async def program():
        async with opened() as generator:
            whole = await generator.sample(ask("ab", 12))
            end = frozenset({whole.tokens[5]})
            length = whole.tokens.index(whole.tokens[5]) + 1
            return [
                await generator.sample(ask("ab", 12, end_ids=end, pause_after=length)),
                await generator.sample(ask("ab", 5, pause_after=5)),
            ]

    assert [sample.finish for sample in run(program())] == ["stop", "length"]


def test_a_rollout_that_goes_on_under_other_weights_is_a_patchwork(opened):
    new = make_policy(seed=1)

    async def program():
        async with opened() as generator:
            begun = await generator.sample(ask("ab", 12, pause_after=5))
            await generator.load(new.weights(), 3)
            return begun, await generator.sample(ask("ab", 12, so_far=begun))

    begun, sample = run(program())
    assert sample.versions == (0,) * 5 + (3,) * 7
    assert (sample.tokens[:5], sample.logprobs[:5]) == (begun.tokens, begun.logprobs)


def test_an_update_with_recomputing_lets_rollouts_in_flight_go_on(opened):
    new = make_policy(seed=1)

    async def program():
        async with opened() as generator:
            task = asyncio.create_task(generator.sample(ask("ab", 50)))
            await asyncio.sleep(0)
            await generator.load(new.weights(), 1, recompute=True)
            return await task

    sample = run(program())
    assert list(sample.versions) == sorted(sample.versions)
    assert sample.versions[-1] == 1
    assert len(sample.tokens) == 50


def test_a_rollout_that_has_ended_has_nothing_to_go_on_with(opened):
    async def program():
        async with opened() as generator:
            whole = await generator.sample(ask("ab", 5))
            with pytest.raises(AssertionError, match="has ended"):
                await generator.sample(ask("ab", 5, so_far=whole))

    run(program())


def test_a_budget_that_was_lowered_since_ends_the_rollout(opened):
    async def program():
        async with opened() as generator:
            begun = await generator.sample(ask("ab", 12, pause_after=7))
            return begun, await generator.sample(ask("ab", 6, so_far=begun))

    begun, sample = run(program())
    assert sample == replace(begun, finish="length")


def test_closing_twice_is_closing_once_and_nothing_is_answered_afterwards(opened):
    async def program():
        async with opened() as generator:
            await asyncio.gather(generator.close(), generator.close())
            request = ask("ab")
            calls = [generator.sample(request), generator.load({}, 1), generator.fingerprint(), generator.peek(request)]
            for call in (*calls, generator.sleep(), generator.wake()):
                with pytest.raises(RuntimeError, match="closed"):
                    await call
            generator.interrupt(request)  # too late, as ever

    run(program())
