"""Canaries: what they ask, that each version has its own, and that nobody has to wait for old ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headway.data import PromptSource
from headway.generate.canary import Canaries, CanarySettings
from headway.generate.episode import Sampling
from headway.stages import Sample, SampleRequest
from tests.generate.harness import engine_of, run
from tests.tiny import make_policy, prompt

SAMPLING = Sampling(max_new_tokens=12, temperature=0.7, end_ids=frozenset({27}), stop=("=",))
SOURCE = PromptSource([prompt(text) for text in ("1+2=", "3+4=", "5+6=")], seed=0, shuffle=False, epochs=1)
SETTINGS = CanarySettings(8, SAMPLING, seed=5)


class Engine:
    """Answers when told to."""

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []
        self.go = asyncio.Event()

    async def sample(self, request: SampleRequest) -> Sample:
        self.requests.append(request)
        await self.go.wait()
        return Sample((1, 2), (-0.1, -0.2), (3, 3), "length", "12", (True, True))


@pytest.mark.parametrize(
    ("num_tokens", "lengths"), [(8, [4, 4]), (7, [3, 4]), (2, [1, 1]), (1, [1]), (0, []), (99, [12, 12])]
)
def test_tokens_are_shared_out_and_no_answer_is_longer_than_a_training_one(num_tokens, lengths):
    assert sorted(replace(SETTINGS, num_tokens=num_tokens).lengths) == lengths


def test_requests_are_spare_sampled_as_training_rollouts_are_and_keyed_by_version():
    async def program():
        engine = Engine()
        canaries = Canaries(engine, SOURCE, SETTINGS)
        for version in (0, 1):
            await canaries.start(version)
            engine.go.set()
            rollouts = await canaries.finished()
        return engine.requests, rollouts

    requests, rollouts = run(program())
    assert [request.seed_key for request in requests] == [(5, "canary", v, member) for v in (0, 1) for member in (0, 1)]
    assert [request.prompt.uid for request in requests] == ["1+2=", "3+4=", "5+6=", "1+2="]
    for request in requests:
        assert request.spare
        assert (request.temperature, request.end_ids, request.stop, request.max_new_tokens) == (0.7, {27}, ("=",), 4)
    assert [(rollout.member, rollout.tokens, rollout.versions, rollout.mask) for rollout in rollouts] == [
        (member, (1, 2), (3, 3), (True, True)) for member in (0, 1)
    ]


def test_they_are_given_out_once():
    async def program():
        engine = Engine()
        engine.go.set()
        canaries = Canaries(engine, SOURCE, SETTINGS)
        await canaries.start(1)
        return len(await canaries.finished()), len(await canaries.finished())

    assert run(program()) == (2, 0)


def test_starting_waits_for_nobody_and_gives_up_those_of_before():
    async def program():
        engine = Engine()
        canaries = Canaries(engine, SOURCE, SETTINGS)
        await canaries.start(1)
        old = list(canaries._asked)
        await asyncio.sleep(0)
        await canaries.start(2)
        await asyncio.sleep(0)
        assert all(task.cancelled() for task in old)
        await canaries.close()
        assert await canaries.finished() == []
        return [request.seed_key[2] for request in engine.requests]

    assert run(program()) == [1, 1, 2, 2]


def test_a_failing_engine_is_told_to_whoever_waits_for_them():
    class Failing(Engine):
        async def sample(self, request: SampleRequest) -> Sample:
            raise RuntimeError("the engine is closed")

    async def program():
        canaries = Canaries(Failing(), SOURCE, SETTINGS)
        await canaries.start(1)
        with pytest.raises(RuntimeError, match="closed"):
            await canaries.finished()
        await canaries.start(2)
        await canaries.close()  # and to nobody, where nobody waits

    run(program())


def test_a_real_engine_samples_them_wholly_under_one_version():
    async def program():
        async with engine_of(make_policy(), lanes=1, version=4, spare_lanes=2) as engine:
            canaries = Canaries(engine, SOURCE, replace(SETTINGS, sampling=replace(SAMPLING, stop=())))
            await canaries.start(4)
            return await canaries.finished()

    for rollout in run(program()):
        assert 1 <= len(rollout.tokens) <= 4
        assert set(rollout.versions) == {4}
