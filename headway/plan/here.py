"""The plan of a run in one process, and the measured pace that it stands on: nouns that `headway.planning` fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.plan.in_process import InProcessJob
from headway.plan.memory import Pool
from headway.plan.proposal import Assumption, least_lag


@dataclass(frozen=True)
class Pace:
    """Of one model on one machine, alone unless it is said otherwise.

    pass_s, row_s, cached_s, prefill_s: a pass of the engine takes pass_s, and of these one for each rollout under way,
    each token in their caches, and each token of a prompt; rate: operations a second of the trainer's passes; update_s:
    of an optimizer step; rest_s: beside them, for each token that is trained; sync_s: from trained to published;
    lead_s: from a batch that is taken to the trainer's beginning, which waits for canaries; score_s: of a rollout;
    engine_slowdown, trainer_slowdown: how many times as long each takes while both work; device: what it ran on, as
    torch calls it; source: the runs that it is from; assumed: of engine and trainer, whose slowdown no run has shown.
    """

    pass_s: float
    row_s: float
    cached_s: float
    prefill_s: float
    rate: float
    update_s: float
    rest_s: float
    sync_s: float
    lead_s: float
    score_s: float
    engine_slowdown: float
    trainer_slowdown: float
    device: str
    source: str
    assumed: tuple[str, ...] = ()

    def decode_s(self, rows: float, cached: float) -> float:
        """Of a pass over so many rollouts that have so many tokens in their caches together."""
        return self.pass_s + self.row_s * rows + self.cached_s * cached


@dataclass(frozen=True)
class Schedule:
    """A simulated one, in seconds: with `run_ahead`, as the recipe has it or not."""

    run_ahead: float
    own: bool
    step_s: float
    tokens_per_s: float
    mean_lag: float
    token_lag: float
    trainer_idle: float
    lanes_idle: float


@dataclass(frozen=True)
class Beside:
    """What a run that is over took: bytes at its peak, seconds of a train step (mean of those without an evaluation in
    them, the first left out), and how many there were of those.
    """

    name: str
    peak_bytes: float
    step_s: float
    num_steps: int


@dataclass(frozen=True)
class HerePlan:
    """budget: bytes that may be planned with; assumed: what the verdict stands on and nobody said; pace: None where no
    run was given to calibrate on; decode: of passes without a prompt rollouts, cached tokens and seconds, as if alone;
    schedules: none without a pace; own: that of the recipe; chosen: the recommended one; recipe: the file it was
    planned from; settings: those of the command line, and simulation: those of its schedules' simulations, by key;
    beside: None where a recipe was planned.
    """

    name: str
    job: InProcessJob
    pool: Pool
    budget: float
    assumptions: tuple[Assumption, ...]
    assumed: tuple[str, ...]
    pace: Pace | None
    decode: tuple[tuple[float, float, float], ...]
    schedules: tuple[Schedule, ...]
    recipe: Path | None
    settings: Mapping[str, Any]
    simulation: Mapping[str, Any]
    beside: Beside | None

    @property
    def fits(self) -> bool:
        return self.pool.peak.expected <= self.budget

    @property
    def own(self) -> Schedule | None:
        return next((schedule for schedule in self.schedules if schedule.own), None)

    @property
    def chosen(self) -> Schedule | None:
        """The one with the least lag among those that are as fast as the fastest."""
        if not self.schedules:
            return None
        return least_lag(self.schedules, lambda schedule: schedule.tokens_per_s, lambda schedule: schedule.token_lag)
