"""A ticket becomes a rollout: its group names the prompt, the engine samples the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.data import PromptSource
from headway.stages import Generated, Generator, Sample, SampleRequest, Ticket
from headway.types import Prompt, Receipt, Rollout


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled, the same for every prompt. Temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float
    end_ids: frozenset[int]
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Episodes:
    """Single-turn episodes: one prompt, one answer.

    Training tickets take the prompt of their group; evaluation tickets take a held-out prompt, and are sampled as
    `evaluation` says.
    """

    engine: Generator
    source: PromptSource
    held_out: Sequence[Prompt]
    sampling: Sampling
    evaluation: Sampling
    seed: int

    async def generate(self, ticket: Ticket) -> Generated:
        """-> a `Rollout` as reference. Its random numbers are keyed by (seed, prompt, epoch, member, turn)."""
        if ticket.evaluation:
            prompt, epoch, sampling = self.held_out[ticket.group], 0, self.evaluation
        else:
            (prompt, epoch), sampling = self.source.at(ticket.group), self.sampling
        turn = 0
        sample = await self.engine.sample(
            SampleRequest(
                prompt=prompt,
                seed_key=(self.seed, prompt.uid, epoch, ticket.member, turn),
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                end_ids=sampling.end_ids,
                stop=sampling.stop,
            )
        )
        rollout = rollout_of(prompt, epoch, ticket.member, sample)
        return Generated(rollout, Receipt(prompt.uid, len(prompt.tokens), rollout.version_runs, rollout.finish))


def rollout_of(prompt: Prompt, epoch: int, member: int, sample: Sample) -> Rollout:
    """A sampled answer as the rollout of its prompt; every token of it may be trained."""
    return Rollout(
        prompt=prompt,
        epoch=epoch,
        member=member,
        tokens=sample.tokens,
        logprobs=sample.logprobs,
        versions=sample.versions,
        mask=(True,) * len(sample.tokens),
        finish=sample.finish,
        text=sample.text,
    )
