"""What the ledger keeps account of: rollouts, the groups that they belong to, evaluations. Integers and references."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headway.stages import Reference
from headway.types import Outcome, Receipt

Fate = Literal["interrupt", "pause", "discard"]
"""What becomes of a rollout that is stopped: it is scored as it is, it goes on later, or it is thrown away."""


@dataclass(slots=True, eq=False)
class RolloutTicket:
    """One rollout's place in the schedule (the `Ticket` of `headway.stages`).

    version: published when it was last handed to a lane; fate: what becomes of it once its stage has stopped it, and
    why; discarded: its group wants it no more; lane_s: time it held lanes, up to its last pause.
    """

    index: int
    group: int
    member: int
    lane: int
    version: int
    started_s: float
    evaluation: bool = False
    max_tokens: float | None = None
    ref: Reference = None
    receipt: Receipt | None = None
    outcome: Outcome | None = None
    reward: float | None = None
    fate: Fate | None = None
    why: str = ""
    discarded: bool = False
    resumed_s: float = 0.0
    lane_s: float = 0.0

    @property
    def oldest_version(self) -> int:
        """The version of the rollout's oldest token (of its start, while nothing is known of its tokens)."""
        runs = self.receipt.version_runs if self.receipt else ()
        return min((run.version for run in runs), default=self.version)

    @property
    def num_tokens(self) -> float:
        return self.receipt.num_tokens if self.receipt else 0


@dataclass(slots=True, eq=False)
class Group:
    """The rollouts of one prompt, alive from the start of its first member until it is taken or released.

    order: its number in order of start; size: how many members are trained; members: the tickets of those that have
    started; ready: it may be taken; urgent: one of its members was interrupted, so it is taken first; lost: how often
    the engine has lost each member.
    """

    index: int
    order: int
    size: int
    num_members: int
    members: dict[int, RolloutTicket] = field(default_factory=dict)
    num_finished: int = 0
    ready: bool = False
    urgent: bool = False
    num_restarts: int = 0
    lost: dict[int, int] = field(default_factory=dict)

    @property
    def scored(self) -> list[RolloutTicket]:
        """The members that are trained, in order."""
        done = [ticket for ticket in self.members.values() if ticket.outcome == "scored"]
        return sorted(done, key=lambda ticket: ticket.member)

    @property
    def prompt_uid(self) -> str | None:
        receipts = [ticket.receipt for ticket in self.members.values() if ticket.receipt]
        return receipts[0].prompt_uid if receipts else None


@dataclass(slots=True)
class Evaluation:
    """Held-out prompts answered greedily under one version; publishing waits until the last is scored.

    waiting: prompts that still want a lane; lost: how often the engine has lost each answer.
    """

    version: int
    size: int
    waiting: list[int]
    rewards: list[float | None] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.rewards) == self.size
