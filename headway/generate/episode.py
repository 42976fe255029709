"""A ticket becomes a rollout: its group names the prompt, the engine samples the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

from headway.data import PromptSource
from headway.stages import Force, Generated, Generator, Sample, SampleRequest, Ticket
from headway.types import Prompt, Receipt, Rollout


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled, the same for every prompt; as in `stages.SampleRequest`. Temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float
    end_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    force: Force | None = None

    def request(
        self,
        prompt: Prompt,
        seed_key: tuple[int | str, ...],
        *,
        max_new_tokens: int | None = None,
        so_far: Sample | None = None,
        pause_after: int | None = None,
        spare: bool = False,
    ) -> SampleRequest:
        """To sample an answer to this prompt. max_new_tokens: instead of the usual budget."""
        return SampleRequest(
            prompt=prompt,
            seed_key=seed_key,
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=self.temperature,
            end_ids=self.end_ids,
            stop=self.stop,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            force=self.force,
            so_far=so_far,
            pause_after=pause_after,
            spare=spare,
        )


@dataclass
class Flight:
    """A rollout in flight: what was asked of the engine, and what it has returned by now."""

    request: SampleRequest
    epoch: int
    member: int
    rollout: Rollout | None = None


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
    _flights: dict[int, Flight] = field(default_factory=dict)

    async def generate(self, ticket: Ticket) -> Generated:
        """-> a `Rollout` as reference. Its random numbers are keyed by (seed, prompt, epoch, member, turn).

        It goes on from what the ticket has of it; one that has ended, or may have no more tokens, is returned as it is.
        """
        flight = self._flight(ticket)
        before: Rollout | None = ticket.ref
        if before is not None and (before.finish != "interrupted" or ticket.max_tokens == 0):
            return generated(before)
        self._flights[ticket.index] = flight
        try:
            sample = await self.engine.sample(flight.request)
        finally:
            asyncio.get_running_loop().call_soon(self._forget, ticket.index, flight)
        flight.rollout = rollout_of(flight.request.prompt, flight.epoch, flight.member, sample)
        return generated(flight.rollout)

    def _forget(self, index: int, flight: Flight) -> None:
        """One turn of the loop after its end: a checkpoint that begins in between finds it here, and not yet in its
        ticket.
        """
        if self._flights[index] is flight:  # it has not gone on since
            del self._flights[index]

    def stop(self, ticket: Ticket) -> None:
        """Ask the engine for what there is of a rollout in flight."""
        if flight := self._flights.get(ticket.index):
            self.engine.interrupt(flight.request)

    def look_at(self, ticket: Ticket) -> Awaitable[Rollout | None]:
        """The rollout as far as it has come, which goes on; None: nothing has been sampled.

        Whether it is in flight is seen at the call, and how far it is by its end.
        """
        return self._look_at(self._flights.get(ticket.index), ticket.ref)

    async def _look_at(self, flight: Flight | None, before: Rollout | None) -> Rollout | None:
        if flight is None:
            return before
        sample = await self.engine.peek(flight.request)
        if sample is None:  # it has ended since
            return flight.rollout
        return rollout_of(flight.request.prompt, flight.epoch, flight.member, sample) if sample.tokens else None

    def _flight(self, ticket: Ticket) -> Flight:
        if ticket.evaluation:
            prompt, epoch, sampling = self.held_out[ticket.group], 0, self.evaluation
        else:
            (prompt, epoch), sampling = self.source.at(ticket.group), self.sampling
        turn = 0
        request = sampling.request(
            prompt,
            (self.seed, prompt.uid, epoch, ticket.member, turn),
            so_far=None if ticket.ref is None else sample_of(ticket.ref),
            pause_after=None if ticket.max_tokens is None else int(ticket.max_tokens),
        )
        return Flight(request, epoch, ticket.member)


def generated(rollout: Rollout) -> Generated:
    """A rollout and its receipt."""
    prompt = rollout.prompt
    return Generated(rollout, Receipt(prompt.uid, len(prompt.tokens), rollout.version_runs, rollout.finish))


def sample_of(rollout: Rollout) -> Sample:
    """What the engine had said of a single-turn rollout."""
    return Sample(
        rollout.tokens, rollout.logprobs, rollout.versions, rollout.finish, rollout.text, rollout.mask, rollout.kept
    )


def rollout_of(prompt: Prompt, epoch: int, member: int, sample: Sample) -> Rollout:
    """A sampled answer as the rollout of its prompt; every token that was sampled may be trained."""
    return Rollout(
        prompt=prompt,
        epoch=epoch,
        member=member,
        tokens=sample.tokens,
        logprobs=sample.logprobs,
        versions=sample.versions,
        mask=sample.mask,
        finish=sample.finish,
        text=sample.text,
        kept=sample.kept,
    )
