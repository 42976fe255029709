"""What goes wrong, and when: a seed is a whole scenario of sizes, rules, times and faults.

The scenario of a seed is the same for ever, so a seed that has shown a fault of Headway's shows it again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from pydantic import ValidationError

from headway.config import Config

Death = Literal["kill", "trainer crash", "full disk", "silent engine"]
"""What ends the run; it is resumed from its newest whole checkpoint."""

Disturbance = Literal[
    "engine crash",
    "lost rollout",
    "hung rollout",
    "slow scorer",
    "failing scorer",
    "lost sync",
    "duplicated sync",
]
"""What the run lives through."""

DEATHS: tuple[Death, ...] = get_args(Death)
DISTURBANCES: tuple[Disturbance, ...] = get_args(Disturbance)

_COUNTED = {
    "kill": "at trace event",
    "trainer crash": "in train step",
    "full disk": "while writing checkpoint",
    "silent engine": "from sync",
    "hung rollout": "at hand-over",
    "lost sync": "at sync",
    "duplicated sync": "at sync",
}
"""Kinds whose `at` is a number of something in their life, counted from 1, and of what; the others' is a time."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    life: counted from 0; the run begins a new one after every death. at: when, in time since the life began, or at the
    how-manieth of something (from 1). for_s: how long a scorer stays slow or fails, or how late the second
    acknowledgement comes.
    """

    kind: Death | Disturbance
    life: int
    at: float
    for_s: float = 0.0

    def __str__(self) -> str:
        when = f"{_COUNTED[self.kind]} {self.at:g}" if self.kind in _COUNTED else f"at time {self.at:g}"
        return f"life {self.life}: {self.kind} {when}" + (f", for {self.for_s:g}" if self.for_s else "")


@dataclass(frozen=True)
class Scenario:
    """A run and all that befalls it.

    config: sizes, rules and times; num_groups: how many groups the data hold (None: no end); longest, unit: a rollout
    is 1 to `longest` times `unit` long; unscored: the share of rollouts that no grader can score; num_rewards: how many
    different rewards there are; save_s: what a checkpoint takes to write; reads_late: the rollouts that it keeps are
    read while it is written, not when it is begun.
    """

    seed: int
    config: Config
    num_groups: int | None
    longest: int
    unit: float
    unscored: float
    num_rewards: int
    save_s: float
    reads_late: bool
    faults: tuple[Fault, ...]

    @property
    def groups_per_batch(self) -> int:
        return self.config.schedule.batch_size // self.config.schedule.group_size

    @property
    def num_members(self) -> int:
        """Rollouts that a group starts."""
        return self.config.schedule.group_size + self.config.schedule.redundant

    @property
    def drains(self) -> bool:
        """The run goes on until the data and all that came of them are used up."""
        return self.num_groups is not None and self.config.run.steps * self.groups_per_batch >= self.num_groups

    def of(self, kind: Death | Disturbance, life: int) -> list[Fault]:
        return [fault for fault in self.faults if fault.kind == kind and fault.life == life]

    def length(self, number: int) -> float:
        """Of a rollout by its identity, group x num_members + member."""
        return self._drawn(number)[0]

    def reward(self, group: int, member: int) -> float | None:
        """None: no grader can score it."""
        return self._drawn(group * self.num_members + member)[1]

    def _drawn(self, number: int) -> tuple[float, float | None]:
        if number not in self._draws:
            pick = random.Random(f"{self.seed}:{number}")
            length = self.unit * pick.randint(1, self.longest)
            unscored, reward = pick.random() < self.unscored, float(pick.randrange(self.num_rewards))
            self._draws[number] = length, None if unscored else reward
        return self._draws[number]

    @cached_property
    def _draws(self) -> dict[int, tuple[float, float | None]]:
        return {}

    @cached_property
    def decided_by_identity(self) -> bool:
        """What becomes of a group hangs on its own answers alone, and on no time."""
        schedule = self.config.schedule
        kinds = [fault.kind for fault in self.faults]
        num_lost = sum(kind in ("engine crash", "lost rollout", "hung rollout") for kind in kinds)
        timely = not schedule.redundant and "drop" not in schedule.stragglers and "failing scorer" not in kinds
        return timely and num_lost <= schedule.max_lost

    def __str__(self) -> str:
        data = "no end of data" if self.num_groups is None else f"{self.num_groups} groups of data"
        reading = ", which reads its rollouts while it is written" if self.reads_late else ""
        lines = [
            f"scenario {self.seed}",
            f"  {' '.join(_words(self.config))}",
            f"  {data}; lengths 1 to {self.longest} times {self.unit:g}; {self.num_rewards} rewards, "
            f"{self.unscored:.0%} unscored; {self.save_s:g} for a checkpoint{reading}",
            *(f"  {fault}" for fault in self.faults),
        ]
        return "\n".join(lines)


def _words(config: Config) -> Iterator[str]:
    """The settings that were given, as on a command line."""
    for section, values in config.model_dump(exclude_unset=True).items():
        for key, value in values.items():
            shown = ",".join(value) if isinstance(value, tuple) else f"{value:g}" if type(value) is float else value
            if value not in (None, ()):
                yield f"--{section}.{key.replace('_', '-')} {str(shown).lower() if value in (True, False) else shown}"


def scenario(seed: int) -> Scenario:
    """The scenario of a seed: only combinations that a configuration may hold."""
    pick = random.Random(f"scenario:{seed}")
    while True:
        longest, unit = pick.choice([1, 3, 9]), pick.choice([1.0, 1.0, 0.5, 0.1])
        num_groups = pick.choice([None, pick.randint(1, 12), pick.randint(1, 40)])
        settings = {
            **_sizes(pick, num_groups),
            "schedule": _schedule(pick, longest * unit),
            "sync": {"resend_s": None},
        }
        try:
            config = Config.model_validate(settings)
        except ValidationError:
            continue
        if random.Random(f"sleep:{seed}").random() < 0.5 and _can_sleep(config):
            settings["generate"] |= {"sleep": "cache"}
            config = Config.model_validate(settings)
        faults = _faults(pick, config, num_groups, longest * unit)
        if any(fault.kind in ("lost sync", "silent engine") for fault in faults):
            settings["sync"] = {"resend_s": config.simulate.sync_time + pick.choice([0.5, 1.0, 4.0])}
            config = Config.model_validate(settings)
        return Scenario(
            seed,
            config,
            num_groups,
            longest,
            unit,
            unscored=pick.choice([0.0, 0.0, 0.2]),
            num_rewards=pick.choice([2, 2, 3]),
            save_s=pick.choice([0.0, 0.0, 0.5, 3.0]),
            reads_late=pick.random() < 0.3,
            faults=faults,
        )


def _can_sleep(config: Config) -> bool:
    """Whether no rollout is in flight beside a train step."""
    return config.schedule.run_ahead == 0 or not config.schedule.overlap


def _sizes(pick: random.Random, num_groups: int | None) -> dict[str, Any]:
    return {
        "run": {"steps": pick.randint(1, 8) if num_groups is None or pick.random() < 0.2 else 1000},
        "generate": {"lanes": pick.randint(1, 7)},
        "evaluate": {"size": pick.choice([0, 0, 0, 1, 3]), "every": pick.choice([0, 1, 2])},
        "checkpoint": {"every": pick.choice([0, 1, 1, 2, 3])},
        "simulate": {
            "train_time": pick.choice([0.0, 0.5, 1.0, 2.0, 3.0]),
            "sync_time": pick.choice([0.0, 0.0, 0.5, 1.0]),
            "score_time": pick.choice([0.0, 0.0, 1.0]),
        },
    }


def _schedule(pick: random.Random, longest: float) -> dict[str, Any]:
    group_size, groups_per_batch = pick.choice([1, 1, 2, 3]), pick.randint(1, 4)
    redundant = pick.choice([0, 0, 0, 1, 2])
    order = pick.choice(["finished", "started", "window"])
    stragglers = pick.choice(
        [(), (), (), ("drop",), ("interrupt",), ("restart",), ("drop", "interrupt"), ("drop", "restart")]
    )
    dynamic_sampling = pick.choice([False, False, True])
    return {
        "batch_size": group_size * groups_per_batch,
        "group_size": group_size,
        "run_ahead": pick.choice([0, 0, 0.5, 1, 1.25, 2, 3]),
        "order": order,
        "window": pick.randint(1, 3 * groups_per_batch + 2) if order == "window" else None,
        "max_lag": pick.randint(0, 2) if stragglers else None,
        "stragglers": stragglers,
        "max_restarts": pick.choice([None, 2]) if "restart" in stragglers else None,
        "in_flight": pick.choice([None, "keep", "recompute", "drain", "restart", "pinned"]),
        "overlap": pick.choice([True, True, False]),
        "iteration_tokens": pick.choice([None, None, None, 1, 2]),
        "redundant": redundant,
        "surplus": pick.choice(["abort", "keep"]) if redundant else None,
        "dynamic_sampling": dynamic_sampling,
        "max_filtered": 1000 if dynamic_sampling else None,
        "deadline_s": pick.choice([None, None, 0.7 * longest, 2 * longest]),
        "max_lost": pick.choice([3, 3, 1, 0]),
        "max_failed": 10_000,  # a scorer that fails for a while is to be outlasted
    }


def _faults(pick: random.Random, config: Config, num_groups: int | None, longest: float) -> tuple[Fault, ...]:
    """Up to three deaths, one a life, and up to four disturbances in any life."""
    num_deaths = pick.choice([0, 1, 1, 2, 3])
    schedule = config.schedule
    num_groups = num_groups or config.run.steps * schedule.batch_size // schedule.group_size
    num_rollouts = num_groups * (schedule.group_size + schedule.redundant)
    total_s = num_rollouts * longest / config.generate.lanes / (1 + num_deaths)
    deaths = [_death(pick, life, 8 * num_rollouts) for life in range(num_deaths)]
    kinds: list[Disturbance] = [kind for kind in DISTURBANCES if kind != "hung rollout" or schedule.deadline_s]
    disturbances = [
        _disturbance(pick, pick.choice(kinds), pick.randint(0, num_deaths), num_rollouts, total_s)
        for _ in range(pick.choice([0, 1, 2, 3, 4]))
    ]
    return tuple(sorted([*deaths, *_acknowledged(disturbances)], key=lambda fault: (fault.life, fault.at)))


def _death(pick: random.Random, life: int, num_events: int) -> Fault:
    kind = pick.choice((*DEATHS, DEATHS[0], DEATHS[0]))
    return Fault(kind, life, pick.randint(1, num_events) if kind == "kill" else pick.randint(1, 4))


def _disturbance(pick: random.Random, kind: Disturbance, life: int, num_rollouts: int, total_s: float) -> Fault:
    if kind == "hung rollout":
        return Fault(kind, life, pick.randint(1, num_rollouts))
    if kind == "lost sync":
        return Fault(kind, life, pick.randint(1, 4))
    if kind == "duplicated sync":
        return Fault(kind, life, pick.randint(1, 4), for_s=pick.choice([0.0, 0.5, 2.0, 10.0]))
    at = float(round(pick.uniform(0, total_s)))  # at whole times, where much happens at one instant
    return Fault(kind, life, at, for_s=pick.choice([1.0, 5.0]) if kind.endswith("scorer") else 0.0)


def _acknowledged(disturbances: list[Fault]) -> list[Fault]:
    """All but a third lost sync of one life: weights are sent three times, and one of them arrives."""
    lost = [fault for fault in disturbances if fault.kind == "lost sync"]
    return [fault for fault in disturbances if fault.kind != "lost sync" or fault in lost[:2]]
