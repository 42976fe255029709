"""From a ticket to a rollout: whose prompt it answers, by which numbers, and what is recorded of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from headway.data import PromptSource
from headway.generate.episode import Episodes, Sampling
from headway.stages import Generated, Sample, SampleRequest
from headway.types import Prompt, Receipt, VersionRun
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
    ref: object = None


@dataclass
class ScriptedEngine:
    """Gives one answer to everyone, and keeps what it was asked."""

    answer: Sample
    asked: list[SampleRequest] = field(default_factory=list)

    async def sample(self, request: SampleRequest) -> Sample:
        self.asked.append(request)
        return self.answer


ANSWER = Sample(tokens=(5, 7, 2), logprobs=(-0.1, -0.2, -0.3), versions=(4, 4, 5), finish="stop", text="57")


def episode(ticket: Ticket, answer: Sample = ANSWER, *, seed: int = 8) -> tuple[SampleRequest, Generated]:
    engine = ScriptedEngine(answer)
    source = PromptSource(TRAINING, seed=0, shuffle=False)
    episodes = Episodes(engine, source, HELD_OUT, SAMPLING, EXAMINATION, seed)  # type: ignore[arg-type]
    generated = asyncio.run(episodes.generate(ticket))
    (request,) = engine.asked
    return request, generated


@pytest.mark.parametrize(("group", "asked", "epoch"), [(0, "1+1=", 0), (1, "2+2=", 0), (2, "1+1=", 1), (5, "2+2=", 2)])
def test_a_group_names_its_prompt_and_epoch(group, asked, epoch):
    request, generated = episode(Ticket(group, member=3))
    assert request == SampleRequest(prompt(asked), (8, asked, epoch, 3, 0), 9, 0.7, frozenset({2, 3}), ("\n",))
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
    answer = Sample(tokens, (-1.0,) * len(tokens), (0,) * len(tokens), finish, "")
    _, generated = episode(Ticket(0), answer)
    assert generated.ref.mask == (True,) * len(tokens)
    assert generated.ref.tokens == tokens
    assert generated.ref.finish == generated.receipt.finish == finish


def test_the_seed_is_part_of_the_identity():
    assert episode(Ticket(0), seed=1)[0].seed_key == (1, "1+1=", 0, 0, 0)


def test_a_prompt_is_handed_on_with_its_tokens():
    request, _ = episode(Ticket(0))
    assert request.prompt == Prompt("1+1=", "1+1=", (1, 10, 1, 12))
