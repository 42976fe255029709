"""An independent simulator of the schedule: one heap of events and one loop, no tasks, nothing shared with Headway.

At every instant, everything that is due happens first (rollouts finish, scores arrive, steps end, weights arrive);
then the idle trainer takes a batch; then free lanes are filled. What that causes at the same instant is a further pass.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field
from fractions import Fraction

GENERATED, SCORED, TRAINED, PUBLISHED = range(4)


@dataclass(frozen=True)
class Case:
    """A schedule to play. lengths: of the rollouts by start index (the last one repeats), or drawn from `seed`."""

    lanes: int = 2
    group_size: int = 1
    groups_per_batch: int = 2
    run_ahead: float = 1.0
    steps: int = 2
    train_time: float = 1.0
    sync_time: float = 0.0
    score_times: tuple[float, ...] = (0.0,)
    lengths: tuple[float, ...] | None = None
    longest: int = 4
    unit: float = 1.0
    unscored: float = 0.0
    num_groups: int | None = None
    seed: int = 0

    def length(self, index: int) -> float:
        if self.lengths is not None:
            return float(self.lengths[min(index, len(self.lengths) - 1)])
        return self.unit * random.Random(f"{self.seed}:length:{index}").randint(1, self.longest)

    def score_time(self, index: int) -> float:
        return self.score_times[index % len(self.score_times)]

    def is_scored(self, group: int, member: int) -> bool:
        return random.Random(f"{self.seed}:score:{group}:{member}").random() >= self.unscored

    def fails(self, group: int) -> bool:
        """Fewer than two of its rollouts are scored (of a group of one: it isn't)."""
        num_scored = sum(self.is_scored(group, member) for member in range(self.group_size))
        return num_scored < min(2, self.group_size)


def random_case(seed: int) -> Case:
    """Small whole lengths make many things happen at one instant; units of 0.1 make sums that are not exact."""
    pick = random.Random(seed)
    return Case(
        lanes=pick.randint(1, 7),
        group_size=pick.choice([1, 1, 2, 3]),
        groups_per_batch=pick.randint(1, 4),
        run_ahead=pick.choice([0, 0, 0.5, 1, 1.25, 2, 3]),
        steps=pick.randint(1, 9),
        train_time=pick.choice([0.0, 0.5, 1.0, 2.0, 3.0]),
        sync_time=pick.choice([0.0, 0.0, 0.5, 1.0]),
        score_times=pick.choice([(0.0,), (1.0,), (0.0, 2.0, 0.5)]),
        longest=pick.choice([1, 3, 9]),
        unit=pick.choice([1.0, 1.0, 0.1]),
        unscored=pick.choice([0.0, 0.0, 0.2]),
        num_groups=pick.choice([None, None, pick.randint(1, 20)]),
        seed=seed,
    )


@dataclass
class History:
    """What happened: starts as (at, rollout, group, member, lane, version), batches as (at, rollouts, lags)."""

    starts: list[tuple[float, int, int, int, int, int]] = field(default_factory=list)
    batches: list[tuple[float, list[int], list[int]]] = field(default_factory=list)
    failed: list[tuple[float, int]] = field(default_factory=list)
    published: list[float] = field(default_factory=list)


@dataclass
class _Rollout:
    index: int
    group: int
    member: int
    lane: int
    version: int


def simulate(case: Case) -> History:
    """Play the case to its end."""
    history = History()
    rollouts: list[_Rollout] = []
    events: list[tuple[float, int, int]] = []
    idle_lanes = list(range(case.lanes))
    unfinished = {}  # group -> members that are not scored yet
    ready: list[int] = []
    num_started = num_released = version = 0
    is_training = False
    now = 0.0

    def data_ended() -> bool:
        return case.num_groups is not None and num_started >= case.num_groups and len(rollouts) % case.group_size == 0

    while True:
        # decide
        enough = len(ready) >= case.groups_per_batch or (ready and data_ended() and not unfinished)
        if enough and not is_training and version < case.steps:
            taken, ready = ready[: case.groups_per_batch], ready[case.groups_per_batch :]
            chosen = [r for g in taken for r in rollouts if r.group == g and case.is_scored(g, r.member)]
            history.batches.append((now, [r.index for r in chosen], [version - r.version for r in chosen]))
            is_training = True
            heapq.heappush(events, (now + case.train_time, TRAINED, 0))
        while idle_lanes and not data_ended():
            member = len(rollouts) % case.group_size
            if member == 0:
                slots = math.floor((version + 1 + Fraction(str(case.run_ahead))) * case.groups_per_batch)
                if num_started - num_released >= slots:
                    break
                unfinished[num_started] = case.group_size
                num_started += 1
            rollout = _Rollout(len(rollouts), num_started - 1, member, heapq.heappop(idle_lanes), version)
            rollouts.append(rollout)
            history.starts.append((now, rollout.index, rollout.group, member, rollout.lane, version))
            heapq.heappush(events, (now + case.length(rollout.index), GENERATED, rollout.index))
        if not events:
            return history
        # jump, and let everything that is due happen
        now = events[0][0]
        newly_ready: list[int] = []
        while events and events[0][0] == now:
            _, kind, index = heapq.heappop(events)
            if kind == GENERATED:
                heapq.heappush(idle_lanes, rollouts[index].lane)
                heapq.heappush(events, (now + case.score_time(index), SCORED, index))
            elif kind == SCORED:
                group = rollouts[index].group
                unfinished[group] -= 1
                if not unfinished[group]:
                    del unfinished[group]
                    if case.fails(group):
                        num_released += 1
                        history.failed.append((now, group))
                    else:
                        newly_ready.append(group)
            elif kind == TRAINED:
                heapq.heappush(events, (now + case.sync_time, PUBLISHED, 0))
            else:
                version += 1
                is_training = False
                history.published.append(now)
                if version == case.steps:
                    return history
        ready += sorted(newly_ready)
        if data_ended() and not unfinished and not ready and not is_training:
            return history
