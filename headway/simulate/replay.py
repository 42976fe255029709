"""The doubles of a run that was recorded: everything takes as long as it did then, whatever the schedule is now."""

from __future__ import annotations

from headway.simulate.doubles import Doubles, Times
from headway.simulate.engines import ConstantRate
from headway.simulate.recording import Key, Recording, Stays
from headway.simulate.workload import recorded_lengths
from headway.stages import Generated, Ticket
from headway.types import Outcome


class Replay(Doubles):
    """Rollouts have the tokens and the pace they had, scorers their verdict, steps, syncs and checkpoints their time.

    What `headway.simulate.recording` can't know it draws. Each rollout decodes at its own mean pace; that other lanes
    or a busy trainer would have slowed it more, or less, under another schedule, is not modelled.
    """

    def __init__(self, recording: Recording, *, num_members: int, pinned: bool) -> None:
        self._recording = recording
        self._paces_s: dict[int, float] = {}
        super().__init__(
            recorded_lengths(recording, num_members),
            Times(recording.train, recording.sync, self._score_s, recording.save),
            num_members=num_members,
            pinned=pinned,
            engine=lambda: ConstantRate(paces_s=self._paces_s),
        )

    async def generate(self, ticket: Ticket) -> Generated:
        stays, key = self._recorded(ticket)
        stay = stays.stay(key)
        self._paces_s[ticket.index] = stay.lane_s / stay.tokens
        return await super().generate(ticket)

    def length(self, ticket: Ticket) -> float:
        stays, key = self._recorded(ticket)
        return stays.stay(key).tokens

    def grade(self, ticket: Ticket) -> tuple[Outcome, float | None]:
        stays, key = self._recorded(ticket)
        graded = stays.grade(key)
        return (graded.outcome, graded.reward) if graded else super().grade(ticket)

    def _score_s(self, ticket: Ticket) -> float:
        stays, key = self._recorded(ticket)
        graded = stays.grade(key)
        return graded.score_s if graded else 0.0

    def _recorded(self, ticket: Ticket) -> tuple[Stays, Key]:
        """Where to look for a ticket. Without a recorded evaluation, its answers are as those to training prompts."""
        if ticket.evaluation and self._recording.answers.whole:
            return self._recording.answers, (ticket.version, ticket.group)
        return self._recording.rollouts, (ticket.group, ticket.member)
