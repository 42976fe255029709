"""A phrase that is put into an answer after so many sampled tokens: in the ids and the text, and in no loss."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from headway.generate.randomness import stream_key, uniforms
from headway.stages import Force, Sample, SampleRequest
from headway.types import Prompt
from tests import tiny
from tests.generate.harness import Passes, answers, ask, assert_same, engine_of, run
from tests.tiny import encode, make_chain, make_policy, own_logprobs

T, F = True, False


def decode(ids) -> str:
    """Token 1 is a, token 2 is b, and so on; 0 is the prompt's."""
    return "".join("?abcdefghi"[token] for token in ids)


def chained(force: Force | None, *, budget: int = 8, **options) -> Sample:
    """The answer to token 0, after which 1, 2, 3, 4, 5 come one after the other; after 7 or 9 comes 4."""
    policy = make_chain(0, 1, 2, 3, 4, 5, 6)
    policy.model.table_VD.data[4, 7] = policy.model.table_VD.data[4, 9] = 20.0
    return answers(policy, [ask(Prompt("p", "", (0,)), budget, force=force, **options)], decode=decode)[0]


def test_the_phrase_is_put_in_after_so_many_sampled_tokens():
    sample = chained(Force(2, (8, 7)), budget=6)
    assert (sample.tokens, sample.text, sample.finish) == ((1, 2, 8, 7, 4, 5), "abhgde", "length")
    assert sample.mask == (T, T, F, F, T, T)
    assert sample.logprobs[2:4] == (0.0, 0.0)
    assert sample.versions == (0,) * 6
    assert sample.kept is None


def test_it_is_put_in_once():
    """The third sampled token is the first one after it, and the phrase is not counted among them."""
    sample = chained(Force(3, (7,)), budget=6)
    assert (sample.tokens, sample.mask) == ((1, 2, 3, 7, 4, 5), (T, T, T, F, T, T))


@pytest.mark.parametrize(("unless", "tokens"), [("b", (1, 2, 3, 4)), ("ab", (1, 2, 3, 4)), ("c", (1, 2, 7, 4))])
def test_it_is_not_put_into_an_answer_that_holds_by_then_what_it_is_for(unless, tokens):
    assert chained(Force(2, (7,), unless), budget=4).tokens == tokens


@pytest.mark.parametrize(
    ("options", "tokens", "finish"),
    [
        ({"end_ids": frozenset({2})}, (1, 2), "stop"),
        ({"stop": ("ab",)}, (1, 2), "stop"),
        ({"budget": 2}, (1, 2), "length"),
        ({"budget": 1}, (1,), "length"),
    ],
    ids=["an end id", "a stop string", "the budget", "before its time"],
)
def test_an_answer_that_has_ended_by_then_has_no_phrase(options, tokens, finish):
    sample = chained(Force(2, (7, 7)), **options)
    assert (sample.tokens, sample.finish, sample.mask) == (tokens, finish, (T,) * len(tokens))


@pytest.mark.parametrize(("budget", "tokens"), [(3, (1, 2, 8)), (4, (1, 2, 8, 7)), (5, (1, 2, 8, 7, 4))])
def test_the_budget_holds_whatever_is_put_in(budget, tokens):
    sample = chained(Force(2, (8, 7)), budget=budget)
    assert (sample.tokens, sample.finish) == (tokens, "length")
    assert sample.mask == (T, T, F, F, T)[:budget]
    assert len(sample.logprobs) == len(sample.versions) == budget


def test_the_context_holds_too():
    """57 tokens of prompt and 7 new ones fill it: the phrase of six is cut to four, and no row is beyond the last."""
    policy = make_policy()
    prompt = Prompt("p", "", (1,) * 57)
    (sample,) = answers(policy, [ask(prompt, 7, force=Force(3, (5,) * 6))])
    assert (sample.mask, sample.finish) == ((T, T, T, F, F, F, F), "length")


def test_an_end_id_in_the_phrase_is_no_end_and_one_after_it_is():
    sample = chained(Force(2, (5, 7)), end_ids=frozenset({5}))
    assert (sample.tokens, sample.finish, sample.text) == ((1, 2, 5, 7, 4, 5), "stop", "abegd")
    sample = chained(Force(2, (7, 5)), end_ids=frozenset({5}), budget=4)
    assert (sample.tokens, sample.finish, sample.text) == ((1, 2, 7, 5), "length", "abge")


@pytest.mark.parametrize(
    ("stop", "tokens", "text"),
    [
        ("d", (1, 2, 9, 7, 4), "abig"),
        ("gd", (1, 2, 9, 7, 4), "abi"),
        ("bi", (1, 2, 9, 7), "a"),
        ("ig", (1, 2, 9, 7), "ab"),
    ],
    ids=["after it", "its end and what follows", "what comes before and its beginning", "in it"],
)
def test_a_stop_string_ends_the_answer_wherever_it_comes_from(stop, tokens, text):
    sample = chained(Force(2, (9, 7)), stop=(stop,))
    assert (sample.tokens, sample.text, sample.finish) == (tokens, text, "stop")


def test_a_stop_string_that_a_long_phrase_completes_is_seen():
    sample = chained(Force(2, (9, *(7,) * 20)), stop=("bi",), budget=40)
    assert (len(sample.tokens), sample.text, sample.finish) == (23, "a", "stop")


def test_token_t_is_drawn_with_number_t_whoever_wrote_those_before_it():
    policy = tiny.make_bigram([torch.tensor([0.2, 0.3, 0.5]).log().tolist()] * 3)
    request = ask(Prompt("p", "", (0,)), 20, force=Force(4, (2, 2, 2)))
    (sample,) = answers(policy, [request], decode=str)
    numbers = uniforms(torch.full((20,), stream_key(*request.seed_key)), torch.arange(20)).tolist()
    drawn = [(number >= 0.2) + (number >= 0.5) for number in numbers]
    assert sample.tokens == (*drawn[:4], 2, 2, 2, *drawn[7:])


# ---- with a model that remembers


FORCED = [
    ask("1+2=", 16, member=0, force=Force(3, encode("ab 5"))),
    ask("1+2=", 16, member=1, force=Force(7, encode("a"))),
    ask("abc", 30, member=2, force=Force(1, encode("0123456789"))),
    ask("abc", 12, member=3, top_k=5, force=Force(11, encode("m"))),
]


@pytest.fixture(scope="module")
def whole() -> list[Sample]:
    return answers(make_policy(), FORCED)


@torch.no_grad()
def test_what_follows_stands_on_it(policy, whole):
    for request, sample in zip(FORCED[:3], whole[:3], strict=True):
        assert request.force is not None
        first = request.force.after_tokens
        assert sample.tokens[first : first + len(request.force.tokens)] == request.force.tokens
        assert [place for place, sampled in enumerate(sample.mask) if not sampled] == [
            first + place for place in range(len(request.force.tokens))
        ]
        expected = own_logprobs(policy, request.prompt.tokens, sample.tokens)
        for logprob, other, sampled in zip(sample.logprobs, expected.tolist(), sample.mask, strict=True):
            assert logprob == (pytest.approx(other, abs=1e-5) if sampled else 0.0)


def test_what_was_kept_says_nothing_of_it(whole):
    kept = whole[3].kept
    assert kept is not None
    assert [ids is None for ids in kept] == [F] * 11 + [T]


@pytest.mark.parametrize("prefill_tokens", [1, 3])
def test_the_phrase_may_be_computed_in_pieces(policy, whole, prefill_tokens):
    for sample, expected in zip(answers(policy, FORCED, prefill_tokens=prefill_tokens), whole, strict=True):
        assert_same(sample, expected)


@pytest.mark.parametrize("length", range(16))
def test_a_pause_before_in_or_after_it_leaves_no_trace(policy, whole, length):
    """One that comes just before it has the phrase when it goes on; one that would come in the middle, after it."""
    begun = answers(policy, [replace(request, pause_after=length) for request in FORCED])
    for sample, expected in zip(begun, whole, strict=True):
        assert sample.tokens == expected.tokens[: len(sample.tokens)]
        if sample.finish == "interrupted" and sample.mask[-1:] != (F,):
            assert len(sample.tokens) == length
    rest = [
        replace(one, so_far=so_far) for one, so_far in zip(FORCED, begun, strict=True) if so_far.finish == "interrupted"
    ]
    expected = [one for one, so_far in zip(whole, begun, strict=True) if so_far.finish == "interrupted"]
    for sample, other in zip(answers(policy, rest), expected, strict=True):
        assert_same(sample, other)


@pytest.mark.parametrize("what", ["interrupt", "load", "recompute", "sleep"])
def test_whatever_comes_while_it_is_computed_leaves_no_trace(what):
    """Its ten tokens take ten passes here; after four of them the rollout is interrupted and goes on, or the weights
    are handed over again, or the engine sleeps.
    """
    policy, own = make_policy(), make_policy().weights()
    request: SampleRequest = FORCED[2]

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, prefill_tokens=1) as engine:
            task = asyncio.create_task(engine.sample(request))
            async with passes.held_at(3 + 4):
                if what == "interrupt":
                    engine.interrupt(request)
                elif what == "sleep":
                    asked = asyncio.create_task(engine.sleep())
                else:
                    asked = asyncio.create_task(engine.load(own, 0, recompute=what == "recompute"))
            if what == "interrupt":
                begun = await task
                assert begun.mask == (T, *(F,) * 10)
                return await engine.sample(replace(request, so_far=begun))
            await asked
            await engine.wake()
            return await task

    assert_same(run(program()), answers(make_policy(), [request])[0])
