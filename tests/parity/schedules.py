"""Random schedules of everything that may happen to an engine's rollouts, and what the trainer says of their tokens.

A schedule follows from its seed: what is done at each pass of the engine is decided while it stands before that pass,
and is obeyed right after it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from headway.config import Train
from headway.generate.episode import rollout_of
from headway.generate.torch_engine import EngineStatus, TorchEngine
from headway.models.distribution import Shape
from headway.models.paged import num_blocks_for
from headway.models.policy import Policy
from headway.prepare.pack import Packing, pack
from headway.stages import Force, Sample, SampleRequest
from headway.train.local import LocalTrainer
from headway.types import Prompt, Rollout
from tests.generate.harness import LIMIT_S, engine_of, run
from tests.generate.meddling import Meddled, meddled_with

LONGEST_PROMPT, LONGEST_ANSWER = 45, 36
"""Tokens: so many that prompts and answers end in any part of their first or second block of the cache."""

Weights = Mapping[str, torch.Tensor]


class ChangingCores:
    """One thread for most units of work, and two for some.

    Where other processes want the cores too, threads that wait for each other make a unit a hundred times as long.
    """

    def __init__(self, chance: random.Random, two_threads: float) -> None:
        self._chance, self._two_threads = random.Random(chance.random()), two_threads

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def unit(self) -> Iterator[int]:
        num = 2 if self._chance.random() < self._two_threads else 1
        torch.set_num_threads(num)
        try:
            yield num
        finally:
            torch.set_num_threads(1)


@dataclass
class Schedule:
    """requests: of which those at `compared` have the one shape that a trainer is made for. two_threads: the share of
    units of work that two threads do. loads: (weights, version) that come in this order, if the schedule is long
    enough; recompute: with each of them, or None for now and then.
    """

    seed: int
    requests: list[SampleRequest]
    compared: range
    shape: Shape
    lanes: int
    cache_blocks: int | None
    prefill_tokens: int
    two_threads: float
    loads: Sequence[tuple[Weights, int]] = ()
    recompute: bool | None = None
    samples: list[Sample] = field(default_factory=list)
    status: EngineStatus | None = None

    @staticmethod
    def of(
        seed: int,
        vocabulary: int = 28,
        *,
        longest_prompt: int = LONGEST_PROMPT,
        longest_answer: int = LONGEST_ANSWER,
        **options: Any,
    ) -> Schedule:
        """vocabulary: ids of prompts and phrases are below it."""
        chance = random.Random(seed)
        shape = Shape(chance.choice([0.7, 1.0]), chance.choice([1.0, 1.0, 1.3]))
        ways = {
            "top_k": chance.choice([0, 0, 5]),
            "top_p": chance.choice([1.0, 1.0, 0.9]),
            "min_p": chance.choice([0.0, 0.0, 0.05]),
        }
        requests = []
        for number in range(chance.randint(1, 3)):
            ids = tuple(chance.randrange(vocabulary) for _ in range(chance.randint(1, longest_prompt)))
            for member in range(chance.randint(1, 4)):
                requests.append(
                    SampleRequest(
                        Prompt(f"p{number}", "", ids),
                        (seed, number, member),
                        chance.randint(1, longest_answer),
                        shape.temperature,
                        repetition_penalty=shape.repetition_penalty,
                        force=_force(chance, vocabulary),
                        pause_after=chance.choice([None, None, chance.randint(1, longest_answer)]),
                        **ways,
                    )
                )
        compared = range(len(requests))
        company = [
            replace(request, seed_key=(seed, "company", number), temperature=chance.choice([0.0, 1.6]))
            for number, request in enumerate(chance.sample(requests, chance.randint(0, min(2, len(requests)))))
        ]
        longest = max(num_blocks_for(len(r.prompt.tokens)) + num_blocks_for(r.max_new_tokens) for r in requests)
        return Schedule(
            seed,
            requests + company,
            compared,
            shape,
            lanes=chance.choice([1, 3, 4, 6, 8]),
            cache_blocks=chance.choice([None, longest + chance.randint(0, 3)]),
            prefill_tokens=chance.choice([2, 7, 16, 512]),
            two_threads=chance.choice([0.0, 0.0, 0.02]),
            **options,
        )

    def play(self, policy: Policy, limit_s: float = LIMIT_S) -> Schedule:
        """Let an engine answer all requests; whatever interrupts them, they go on."""
        self.samples, self.status = run(self._play(policy), limit_s)
        return self

    async def _play(self, policy: Policy) -> tuple[list[Sample], EngineStatus]:
        chance = random.Random(f"play {self.seed}")
        options = {"lanes": self.lanes, "cache_blocks": self.cache_blocks, "prefill_tokens": self.prefill_tokens}
        cores = ChangingCores(chance, self.two_threads)
        async with engine_of(policy, cores=cores, **options) as engine:
            with meddled_with(policy, engine, self._meddle(chance)) as meddled:
                samples = await meddled.answers(self.requests, first=chance.randint(0, len(self.requests)))
            return samples, await engine.status()

    def _meddle(self, chance: random.Random) -> Callable[[Meddled], Awaitable[None]]:
        """Few deeds, for each of some kinds makes what is in flight begin its cache again."""
        loads, one_at_a_time = iter(self.loads), asyncio.Lock()
        weights_now = None
        deeds = ["interrupt"] * 4 + ["peek", "nap", "nap"] + ["load"] * len(self.loads)
        chance.shuffle(deeds)

        async def load(engine: TorchEngine, weights: Weights, version: int, recompute: bool) -> None:
            nonlocal weights_now
            async with one_at_a_time:
                await engine.load(weights, version, recompute=recompute)
            weights_now = weights, version

        async def nap(engine: TorchEngine) -> None:
            async with one_at_a_time:
                await engine.sleep(weights=weights_now is not None)
                if weights_now:
                    await engine.load(*weights_now)
                await engine.wake()

        async def meddle(meddled: Meddled) -> None:
            if chance.random() < 0.2:
                meddled.arrive(chance.randint(1, 2))
            if not deeds or chance.random() < 0.9:
                return
            deed = deeds.pop()
            if deed == "nap":
                meddled.ask(nap(meddled.engine))
            elif deed == "load":
                recompute = chance.random() < 0.5 if self.recompute is None else self.recompute
                meddled.ask(load(meddled.engine, *next(loads), recompute))
            elif meddled.in_flight and deed == "interrupt":
                meddled.engine.interrupt(chance.choice(meddled.in_flight))
            elif meddled.in_flight:
                meddled.ask(meddled.engine.peek(chance.choice(meddled.in_flight)))

        return meddle

    @property
    def rollouts(self) -> list[Rollout]:
        """Those that are compared."""
        return [rollout_of(self.requests[number].prompt, 0, number, self.samples[number]) for number in self.compared]

    def trainers_logprobs(self, policy: Policy) -> list[float]:
        """Of every token of the rollouts that was sampled, packed at random."""
        chance = random.Random(f"pack {self.seed}")
        rollouts = self.rollouts
        groups = [number // chance.randint(1, 4) if chance.random() < 0.3 else uid for number, uid in _uids(rollouts)]
        packing = Packing(chance.choice([10, 60, 150, 4000]), whole_groups=chance.random() < 0.3)
        wanted = list(range(len(rollouts)))
        (packs,) = pack(rollouts, _as_numbers(groups), wanted, packing)
        cores = ChangingCores(chance, self.two_threads)
        trainer = LocalTrainer(policy, Train(learning_rate=1e-3), shape=self.shape, num_steps=1, cores=cores)
        logp_M = torch.zeros(sum(sum(rollout.mask) for rollout in rollouts))
        for micro_batch in packs:
            logp_M[micro_batch.token_N] = trainer.forward(micro_batch.rows).logp_N
        return logp_M.tolist()

    def sampled(self, values: str) -> list[Any]:
        """Such values of every token of the rollouts that was sampled: logprobs or versions."""
        return [
            value
            for rollout in self.rollouts
            for value, is_sampled in zip(getattr(rollout, values), rollout.mask, strict=True)
            if is_sampled
        ]

    def num_different(self, policy: Policy) -> int:
        """Log-probs of which the engine and the trainer say different bits."""
        theirs = self.trainers_logprobs(policy)
        return sum(mine != other for mine, other in zip(self.sampled("logprobs"), theirs, strict=True))


def _force(chance: random.Random, vocabulary: int) -> Force | None:
    if chance.random() < 0.7:
        return None
    return Force(chance.randint(1, 20), tuple(chance.randrange(vocabulary) for _ in range(chance.randint(1, 9))))


def _uids(rollouts: Sequence[Rollout]) -> Iterator[tuple[int, str]]:
    return enumerate(rollout.prompt.uid for rollout in rollouts)


def _as_numbers(groups: Sequence[Any]) -> list[int]:
    """Neighbours that are equal have one number, which nobody else has."""
    numbers = [0]
    for before, after in itertools.pairwise(groups):
        numbers.append(numbers[-1] + (before != after))
    return numbers
