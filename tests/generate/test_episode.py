"""From a ticket to a rollout: whose prompt it answers, by which numbers, and what is recorded of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from headway.data import PromptSource
from headway.generate.episode import Episodes, Sampling, rollout_of
from headway.stages import Force, Generated, Sample, SampleRequest
from headway.types import Prompt, Receipt, Rollout, VersionRun
from tests.tiny import prompt

TRAINING = [prompt("1+1="), prompt("2+2=")]
HELD_OUT = [prompt("3+3="), prompt("4+4=")]
EXAMINATION = Sampling(max_new_tokens=20, temperature=0.0, end_ids=frozenset({2, 3}), stop=("\n",))
SAMPLING = Sampling(max_new_tokens=9, temperature=0.7, end_ids=frozenset({2, 3}), stop=("\n",))


@dataclass
class Ticket:
    group: int
    member: int = 0
    index: int = 0
    version: int = 0
    evaluation: bool = False
    max_tokens: float | None = None
    ref: Any = None


@dataclass
class ScriptedEngine:
    """Gives one answer to everyone, and keeps what it was asked."""

    answer: Sample
    asked: list[SampleRequest] = field(default_factory=list)

    async def sample(self, request: SampleRequest) -> Sample:
        self.asked.append(request)
        return self.answer


ANSWER = Sample(
    tokens=(5, 7, 2),
    logprobs=(-0.1, -0.2, -0.3),
    versions=(4, 4, 5),
    finish="stop",
    text="57",
    mask=(True,) * 3,
)


def episode(ticket: Ticket, answer: Sample = ANSWER, *, seed: int = 8) -> tuple[SampleRequest, Generated]:
    engine = ScriptedEngine(answer)
    source = PromptSource(TRAINING, seed=0, shuffle=False)
    episodes = Episodes(engine, source, HELD_OUT, SAMPLING, EXAMINATION, seed)  # type: ignore[arg-type]
    generated = asyncio.run(episodes.generate(ticket))
    (request,) = engine.asked
    return request, generated


def contents(request: SampleRequest) -> dict[str, Any]:
    return {one.name: getattr(request, one.name) for one in fields(request)}


@pytest.mark.parametrize(("group", "asked", "epoch"), [(0, "1+1=", 0), (1, "2+2=", 0), (2, "1+1=", 1), (5, "2+2=", 2)])
def test_a_group_names_its_prompt_and_epoch(group, asked, epoch):
    request, generated = episode(Ticket(group, member=3))
    expected = SampleRequest(prompt(asked), (8, asked, epoch, 3, 0), 9, 0.7, frozenset({2, 3}), ("\n",))
    assert contents(request) == contents(expected)
    assert (generated.ref.prompt, generated.ref.epoch, generated.ref.member) == (prompt(asked), epoch, 3)


def test_an_evaluation_is_greedy_over_held_out_prompts():
    request, generated = episode(Ticket(1, evaluation=True))
    assert (request.prompt, request.temperature) == (prompt("4+4="), 0.0)
    assert (request.end_ids, request.max_new_tokens) == (SAMPLING.end_ids, 20)
    assert generated.ref.prompt == prompt("4+4=")


def test_what_the_engine_says_is_recorded_as_it_is():
    _, generated = episode(Ticket(0))
    rollout = generated.ref
    assert (rollout.tokens, rollout.logprobs, rollout.versions) == (ANSWER.tokens, ANSWER.logprobs, ANSWER.versions)
    assert (rollout.finish, rollout.text) == ("stop", "57")
    assert generated.receipt == Receipt("1+1=", 4, (VersionRun(4, 2), VersionRun(5, 1)), "stop")


@pytest.mark.parametrize(
    ("tokens", "finish"),
    [((5, 7, 2), "stop"), ((5, 7, 9), "length"), ((5, 3), "stop"), ((2, 2, 2, 2), "length"), ((5, 1), "stop")],
    ids=["B12a ended", "B12b cut off", "B12c another end id", "end ids that ended nothing", "B12e a stop string"],
)
def test_b12_every_sampled_token_is_trained_and_finish_is_the_samplers_word(tokens, finish):
    """Neither lengths nor masks nor finish are read off token values."""
    length = len(tokens)
    answer = Sample(tokens, (-1.0,) * length, (0,) * length, finish, "", (True,) * length)
    _, generated = episode(Ticket(0), answer)
    assert generated.ref.mask == (True,) * len(tokens)
    assert generated.ref.tokens == tokens
    assert generated.ref.finish == generated.receipt.finish == finish


def test_what_was_put_in_and_what_was_kept_stay_with_the_rollout_and_come_back_when_it_goes_on():
    """Token 7 was forced, token 2 drawn among 2 and 9."""
    said = replace(BEGUN, tokens=(5, 7, 2), logprobs=(-0.1, 0.0, -0.3), versions=(4, 4, 4))
    said = replace(said, mask=(True, False, True), kept=(None, None, (2, 9)))
    _, generated = episode(Ticket(0), said)
    assert (generated.ref.mask, generated.ref.kept) == (said.mask, said.kept)
    request, _ = episode(Ticket(0, ref=generated.ref))
    assert request.so_far == said


def test_how_it_is_sampled_is_said_to_the_engine():
    ways = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "force": Force(3, (7, 7), "no")}
    request = replace(SAMPLING, **ways).request(prompt("1+1="), (0,))
    assert {name: getattr(request, name) for name in ways} == ways


def test_the_seed_is_part_of_the_identity():
    assert episode(Ticket(0), seed=1)[0].seed_key == (1, "1+1=", 0, 0, 0)


def test_a_prompt_is_handed_on_with_its_tokens():
    request, _ = episode(Ticket(0))
    assert request.prompt == Prompt("1+1=", "1+1=", (1, 10, 1, 12))


# ---- rollouts that end early, and go on

BEGUN = Sample((5, 7), (-0.1, -0.2), (4, 4), "interrupted", "57", (True, True))


def rollout(sample: Sample, *, member: int = 0) -> Rollout:
    return rollout_of(prompt("1+1="), 0, member, sample)


def test_what_a_ticket_has_already_is_gone_on_from():
    request, generated = episode(Ticket(0, ref=rollout(BEGUN), max_tokens=3))
    assert (request.so_far, request.pause_after, request.max_new_tokens) == (BEGUN, 3, 9)
    assert generated.ref.tokens == ANSWER.tokens


def test_a_fresh_ticket_has_nothing_to_go_on_from_and_no_pause():
    request, _ = episode(Ticket(0))
    assert (request.so_far, request.pause_after) == (None, None)


@pytest.mark.parametrize(
    ("sample", "max_tokens"),
    [(BEGUN, 0), (ANSWER, None), (ANSWER, 3), (Sample((5,), (-1.0,), (0,), "length", "5", (True,)), 0)],
)
def test_a_rollout_that_has_ended_or_may_have_no_more_is_returned_as_it_is(sample, max_tokens):
    """One that a checkpoint held without its score, or one that is interrupted while it is paused."""

    async def program():
        engine = FlyingEngine()
        before = rollout(sample)
        return before, await episodes_of(engine).generate(Ticket(0, ref=before, max_tokens=max_tokens)), engine.asked

    before, generated, asked = asyncio.run(program())
    assert generated.ref is before
    assert generated.receipt == Receipt("1+1=", 4, before.version_runs, sample.finish)
    assert asked == []


class FlyingEngine:
    """Answers when told to; shows BEGUN of what is in flight."""

    def __init__(self) -> None:
        self.asked: list[SampleRequest] = []
        self.interrupted: list[SampleRequest] = []
        self.land = asyncio.Event()

    async def sample(self, request: SampleRequest) -> Sample:
        self.asked.append(request)
        await self.land.wait()
        return ANSWER

    def interrupt(self, request: SampleRequest) -> None:
        self.interrupted.append(request)

    async def peek(self, request: SampleRequest) -> Sample | None:
        await asyncio.sleep(0)
        return None if self.land.is_set() else BEGUN


def episodes_of(engine: Any) -> Episodes:
    return Episodes(engine, PromptSource(TRAINING, seed=0, shuffle=False), HELD_OUT, SAMPLING, EXAMINATION, 8)


def test_stop_names_the_request_of_its_ticket():
    """Of two members of a group, and not before its rollout is in flight nor when it is over."""

    async def program():
        engine = FlyingEngine()
        episodes = episodes_of(engine)
        tickets = [Ticket(0, member=member, index=member) for member in (0, 1)]
        episodes.stop(tickets[1])
        tasks = [asyncio.create_task(episodes.generate(ticket)) for ticket in tickets]
        await asyncio.sleep(0)
        episodes.stop(tickets[1])
        engine.land.set()
        await asyncio.gather(*tasks)
        episodes.stop(tickets[0])
        return engine.asked, engine.interrupted

    asked, interrupted = asyncio.run(program())
    assert interrupted == [asked[1]]


def test_a_look_at_what_is_in_flight_and_at_what_is_not():
    """In flight: what the engine has; paused or finished: what the ticket has; not begun: nothing."""

    async def program():
        engine = FlyingEngine()
        episodes = episodes_of(engine)
        flying = Ticket(0, member=3, index=7)
        task = asyncio.create_task(episodes.generate(flying))
        await asyncio.sleep(0)
        looks = [
            await episodes.look_at(flying),
            await episodes.look_at(Ticket(0, index=8, ref=rollout(ANSWER))),
            await episodes.look_at(Ticket(0, index=9)),
        ]
        engine.land.set()
        await task
        return looks

    flying, finished, nothing = asyncio.run(program())
    assert flying == rollout(BEGUN, member=3)
    assert finished == rollout(ANSWER)
    assert nothing is None


def test_a_rollout_that_ends_while_it_is_looked_at_is_seen_whole():
    async def program():
        engine = FlyingEngine()
        episodes = episodes_of(engine)
        flying = Ticket(0, index=7)
        task = asyncio.create_task(episodes.generate(flying))
        await asyncio.sleep(0)
        look = episodes.look_at(flying)
        engine.land.set()
        return await look, await task

    look, generated = asyncio.run(program())
    assert look == generated.ref
    assert look.finish == "stop"


def test_a_rollout_of_which_nothing_is_sampled_yet_is_nothing():
    class Waiting(FlyingEngine):
        async def peek(self, request: SampleRequest) -> Sample | None:
            return Sample((), (), (), "interrupted", "", ())

    async def program():
        engine = Waiting()
        episodes = episodes_of(engine)
        task = asyncio.create_task(episodes.generate(Ticket(0)))
        await asyncio.sleep(0)
        look = await episodes.look_at(Ticket(0))
        engine.land.set()
        await task
        return look

    assert asyncio.run(program()) is None


def test_a_rollout_that_is_given_up_is_not_in_flight_any_more():
    async def program():
        engine = FlyingEngine()
        episodes = episodes_of(engine)
        task = asyncio.create_task(episodes.generate(Ticket(0)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        episodes.stop(Ticket(0))
        return engine.interrupted, await episodes.look_at(Ticket(0))

    assert asyncio.run(program()) == ([], None)


async def look_at(episodes: Episodes, ticket: Ticket) -> Rollout | None:
    return await episodes.look_at(ticket)


def test_a_look_finds_a_rollout_that_has_ended_and_that_nobody_was_told_of_yet():
    """A checkpoint may begin in the turn of the loop in which a rollout ends; its ticket has it a turn later."""

    async def program():
        engine = FlyingEngine()
        episodes = episodes_of(engine)
        ticket = Ticket(0)
        flight = asyncio.create_task(episodes.generate(ticket))
        await asyncio.sleep(0)
        engine.land.set()
        look = asyncio.create_task(look_at(episodes, ticket))  # in the same turn, after its end
        return (await flight).ref, await look

    ended, seen = asyncio.run(program())
    assert seen is ended
