"""Handing new weights to an engine in the same process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from headway.models.policy import in_dtype
from headway.models.weights import fingerprint
from headway.sync.memory import MemorySync
from headway.types import UserError
from tests.generate.harness import Passes, ask, engine_of, run
from tests.tiny import make_policy

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}


class Receiver:
    """A generator that keeps what it is told, but for the weights it `loses`."""

    def __init__(self, loses: str | None = None) -> None:
        self.weights = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
        self.version = 0
        self.num_hashes = 0
        self.recompute: bool | None = None
        self._loses = loses

    async def sample(self, request: Any) -> Any:
        raise NotImplementedError

    def interrupt(self, request: Any) -> None:
        raise NotImplementedError

    async def peek(self, request: Any) -> Any:
        raise NotImplementedError

    async def load(self, weights: Any, version: int, *, recompute: bool = False) -> None:
        self.recompute = recompute
        self.weights |= {name: tensor.clone() for name, tensor in weights.items() if name != self._loses}
        self.version = version

    async def fingerprint(self) -> str:
        self.num_hashes += 1
        return fingerprint(self.weights)

    async def close(self) -> None: ...


def test_weights_and_version_arrive():
    receiver = Receiver()
    asyncio.run(MemorySync(receiver, verify=True).sync(WEIGHTS, 4))
    assert fingerprint(receiver.weights) == fingerprint(WEIGHTS)
    assert receiver.version == 4


@pytest.mark.parametrize("recompute", [True, False])
def test_whether_caches_are_recomputed_is_said_with_the_weights(recompute):
    receiver = Receiver()
    asyncio.run(MemorySync(receiver, verify=True, recompute=recompute).sync(WEIGHTS, 4))
    assert receiver.recompute is recompute


@pytest.mark.parametrize("lost", ["a", "b"])
def test_weights_that_did_not_arrive_end_the_run(lost):
    receiver = Receiver(loses=lost)
    with pytest.raises(RuntimeError, match="the engine's weights differ from the trainer's after version 4") as caught:
        asyncio.run(MemorySync(receiver, verify=True).sync(WEIGHTS, 4))
    assert fingerprint(WEIGHTS)[:12] in str(caught.value)
    assert fingerprint(receiver.weights)[:12] in str(caught.value)


def test_without_verification_no_hash_is_asked_for():
    receiver = Receiver(loses="a")
    asyncio.run(MemorySync(receiver, verify=False).sync(WEIGHTS, 4))
    assert receiver.num_hashes == 0


def test_a_rollout_in_flight_goes_on_under_the_new_version(policy):
    trainer_policy = make_policy(seed=1)

    async def program():
        passes = Passes(policy)
        async with engine_of(policy) as engine:
            task = asyncio.create_task(engine.sample(ask("1+2=", 50)))
            async with passes.held_at(3):
                sync = asyncio.create_task(MemorySync(engine, verify=True).sync(trainer_policy.weights(), 1))
            await sync
            return await task, await engine.fingerprint()

    sample, received = run(program())
    assert sample.versions == (0,) * 4 + (1,) * 46
    assert received == fingerprint(trainer_policy.weights())


def test_the_engine_does_not_share_the_trainers_storage(policy):
    trainer_policy = make_policy(seed=1)

    async def program():
        async with engine_of(policy) as engine:
            await MemorySync(engine, verify=True).sync(trainer_policy.weights(), 1)
            published = fingerprint(trainer_policy.weights())
            with torch.no_grad():
                trainer_policy.head.weight_VD.mul_(2.0)
            return published, await engine.fingerprint()

    published, engine_hash = run(program())
    assert engine_hash == published


def test_an_engine_that_keeps_weights_in_another_dtype_is_compared_in_that_one(policy):
    trainer_policy = make_policy(seed=1)
    in_bf16 = in_dtype(policy, torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in in_bf16.weights().items()}

    async def program():
        async with engine_of(in_bf16) as engine:
            await MemorySync(engine, verify=True, dtypes=dtypes).sync(trainer_policy.weights(), 1)
            return await engine.fingerprint()

    assert run(program()) != fingerprint(trainer_policy.weights()), "it was rounded"


def test_a_refusal_reaches_the_caller(policy):
    async def program():
        async with engine_of(policy) as engine:
            await MemorySync(engine, verify=True).sync(make_policy("qwen3").weights(), 1)

    with pytest.raises(UserError, match="was sent to a model that has none of that name"):
        run(program())
