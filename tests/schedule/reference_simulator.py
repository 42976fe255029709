"""An independent simulator of the schedule: one heap of events and one loop, no tasks, nothing shared with Headway.

At every instant, everything that is due happens first: rollouts leave their lanes, scores arrive, rollouts pass their
deadlines, steps end, weights arrive. Then stragglers are dealt with, the idle trainer takes a batch, new weights leave,
and free lanes are filled. What that causes at the same instant is a further pass; new weights that leave are such a
cause, so lanes are filled after it.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field, replace
from fractions import Fraction

GENERATED, SCORED, LATE, TRAINED, PUBLISHED = range(5)

Key = tuple[int, int]
"""Group and member."""


@dataclass(frozen=True)
class Case:
    """A schedule to play.

    lengths: of the rollouts by identity, group x members + member (the last one repeats), or drawn from `seed`; scores,
    rewards and whether a rollout is scored go by identity too, so a rollout that begins again is what it was.
    num_rewards: how many different rewards there are.
    """

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
    order: str = "finished"
    window: int | None = None
    max_lag: int | None = None
    stragglers: tuple[str, ...] = ()
    max_restarts: int = 1
    in_flight: str = "keep"
    overlap: bool = True
    redundant: int = 0
    keep_redundant: bool = False
    dynamic_sampling: bool = False
    num_rewards: int = 1
    deadline: float | None = None
    iteration_tokens: float | None = None

    @property
    def num_members(self) -> int:
        return self.group_size + self.redundant

    def length(self, group: int, member: int = 0) -> float:
        identity = group * self.num_members + member
        if self.lengths is not None:
            return float(self.lengths[min(identity, len(self.lengths) - 1)])
        return self.unit * random.Random(f"{self.seed}:length:{identity}").randint(1, self.longest)

    def score_time(self, group: int, member: int = 0) -> float:
        return self.score_times[(group * self.num_members + member) % len(self.score_times)]

    def is_scored(self, group: int, member: int) -> bool:
        return random.Random(f"{self.seed}:score:{group}:{member}").random() >= self.unscored

    def reward(self, group: int, member: int) -> float:
        return random.Random(f"{self.seed}:reward:{group}:{member}").randrange(self.num_rewards) + 1.0

    def fails(self, group: int) -> bool:
        """Fewer than two of its rollouts are scored (of a group of one: it isn't)."""
        num_scored = sum(self.is_scored(group, member) for member in range(self.num_members))
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


def random_policies(seed: int) -> Case:
    """A random case under random policies, of those that go together."""
    pick = random.Random(f"policies:{seed}")
    case = random_case(seed)
    order = pick.choice(["finished", "started", "window"])
    in_flight = pick.choice(["keep", "keep", "drain", "restart"])
    late = [("drop",)] if in_flight == "drain" else [("drop",), ("interrupt",), ("restart",)]
    both = [] if in_flight == "drain" else [("drop", "interrupt"), ("drop", "restart")]
    stragglers = pick.choice([(), *late, *both])
    redundant = pick.choice([0, 0, 1, 2])
    dynamic_sampling = case.group_size > 1 and pick.random() < 0.3
    return replace(
        case,
        longest=pick.choice([3, 9, 20]),
        order=order,
        window=pick.randint(1, 9) if order == "window" else None,
        max_lag=pick.randint(0, 3) if stragglers else None,
        stragglers=stragglers,
        max_restarts=pick.randint(1, 2),
        in_flight=in_flight,
        overlap=in_flight == "drain" or pick.random() < 0.7,
        redundant=redundant,
        keep_redundant=bool(redundant) and pick.random() < 0.5,
        dynamic_sampling=dynamic_sampling,
        num_rewards=2 if dynamic_sampling else 1,
        deadline=pick.choice([None, None, 2.0, 5.0]),
        iteration_tokens=pick.choice([None, 1.0, 3.0]) if in_flight == "keep" else None,
    )


@dataclass
class History:
    """What happened.

    starts, resumes: (at, rollout, group, member, lane, version); batches: (at, rollouts, lags); released: (at, why,
    group); pauses: (at, rollout, tokens so far); aborts: (at, rollout, its lane if it held one); ends: (at, rollout,
    tokens) of those that are whole or interrupted.
    """

    starts: list[tuple[float, int, int, int, int, int]] = field(default_factory=list)
    resumes: list[tuple[float, int, int, int, int, int]] = field(default_factory=list)
    batches: list[tuple[float, list[int], list[int]]] = field(default_factory=list)
    released: list[tuple[float, str, int]] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    pauses: list[tuple[float, int, float]] = field(default_factory=list)
    aborts: list[tuple[float, int, int | None]] = field(default_factory=list)
    ends: list[tuple[float, int, float]] = field(default_factory=list)

    @property
    def failed(self) -> list[tuple[float, int]]:
        return [(at, group) for at, why, group in self.released if why == "failed"]

    def sorted(self) -> History:
        """What happened at one instant, in one order: by group or rollout; starts and batches have theirs."""
        return replace(
            self,
            released=sorted(self.released),
            pauses=sorted(self.pauses),
            aborts=sorted(self.aborts, key=lambda abort: abort[:2]),
            ends=sorted(self.ends),
        )


@dataclass
class _Rollout:
    """left: of its length; stretches: (version, tokens) of each time in a lane; ending: how it leaves its lane."""

    number: int
    group: int
    member: int
    left: float
    version: int = 0
    lane: int | None = None
    began: float = 0.0
    ends: float = 0.0
    wanted: float = 0.0
    held: float = 0.0
    state: str = "waiting"
    ending: str | None = None
    stretches: list[tuple[int, float]] = field(default_factory=list)

    @property
    def oldest(self) -> int:
        return min((version for version, _ in self.stretches), default=self.version)

    @property
    def tokens(self) -> float:
        return sum(tokens for _, tokens in self.stretches)


@dataclass
class _Group:
    number: int
    members: dict[int, _Rollout] = field(default_factory=dict)
    ready_at: float | None = None
    urgent: bool = False
    restarts: int = 0

    def of(self, *states: str) -> list[_Rollout]:
        return [self.members[m] for m in sorted(self.members) if self.members[m].state in states]


def simulate(case: Case) -> History:
    """Play the case to its end."""
    play = _Play(case)
    while not play.is_over():
        play.decide()
        if play.is_over() and (not play.events or play.events[0][0] > play.now):
            break  # what was released just now was all there was
        assert play.events, f"nothing more can happen: {case}"
        play.jump()
    return play.history.sorted()


class _Play:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.history = History()
        self.now = 0.0
        self.events: list[tuple[float, int, int]] = []  # time, kind, rollout
        self.rollouts: list[_Rollout] = []
        self.groups: dict[int, _Group] = {}  # neither taken nor released
        self.ready: list[_Group] = []
        self.wanting: set[Key] = set()  # would take a lane
        self.idle_lanes = list(range(case.lanes))
        self.trained = self.published = 0
        self.num_started = self.num_released = 0
        self.training = self.syncing = False
        self.came_out: set[str] = set()
        self.newly_ready: list[_Group] = []
        self.late: list[_Rollout] = []
        self.stopped: list[_Rollout] = []

    # ---- what is over, and what stands still

    def data_ended(self) -> bool:
        return self.case.num_groups is not None and self.num_started >= self.case.num_groups

    def is_over(self) -> bool:
        nothing_left = self.data_ended() and not self.groups and not self.training
        return self.published == self.case.steps or nothing_left

    def in_lanes(self) -> list[_Rollout]:
        return [rollout for rollout in self.rollouts if rollout.state == "lane"]

    # ---- everything that is due

    def jump(self) -> None:
        self.came_out, self.newly_ready, self.late = set(), [], []
        self.now = self.events[0][0]
        while self.events and self.events[0][0] == self.now:
            _, kind, number = heapq.heappop(self.events)
            if kind == TRAINED:
                self.trained += 1
                self.came_out.add("trained")
            elif kind == PUBLISHED:
                self.published += 1
                self.training = self.syncing = False
                self.came_out.add("published")
                self.history.published.append(self.now)
                self.wanting |= {(r.group, r.member) for r in self.rollouts if r.state == "paused"}
            else:
                rollout = self.rollouts[number]
                {GENERATED: self.leave_lane, SCORED: self.be_scored, LATE: self.be_late}[kind](rollout)

    def leave_lane(self, rollout: _Rollout) -> None:
        if rollout.state != "lane" or rollout.ends != self.now:
            return  # it has been stopped before this
        heapq.heappush(self.idle_lanes, rollout.lane)
        rollout.held += self.now - rollout.began
        sampled = self.now - rollout.began if rollout.ending else rollout.wanted
        is_whole = not rollout.ending and rollout.wanted == rollout.left
        if sampled:
            rollout.stretches.append((rollout.version, sampled))
            rollout.left -= sampled
        if rollout.ending == "abort":
            rollout.state = "gone"
            self.history.aborts.append((self.now, rollout.number, rollout.lane))
        elif is_whole or rollout.ending == "interrupt":
            rollout.state = "scoring"
            self.history.ends.append((self.now, rollout.number, rollout.tokens))
            at = self.now + self.case.score_time(rollout.group, rollout.member)
            heapq.heappush(self.events, (at, SCORED, rollout.number))
        else:
            rollout.state = "paused"
            self.history.pauses.append((self.now, rollout.number, rollout.tokens))
        rollout.ending = None

    def be_scored(self, rollout: _Rollout) -> None:
        if rollout.state != "scoring":
            return
        rollout.state = "scored" if self.case.is_scored(rollout.group, rollout.member) else "unscored"
        group = self.groups[rollout.group]
        num_scored, num_finished = len(group.of("scored")), len(group.of("scored", "unscored"))
        if group.ready_at is not None or (num_scored < self.case.group_size and num_finished < self.case.num_members):
            return
        if num_scored < min(2, self.case.group_size):
            self.release(group, "failed")
            return
        group.ready_at = self.now
        self.ready.append(group)
        self.newly_ready.append(group)
        if not self.case.keep_redundant:
            self.abort_unfinished(group)
        unstarted = set(range(self.case.num_members)) - set(group.members)
        self.wanting -= {(group.number, member) for member in unstarted}

    def be_late(self, rollout: _Rollout) -> None:
        deadline = self.case.deadline
        if rollout.state == "lane" and rollout.began + max(0.0, deadline - rollout.held) == self.now:
            self.late.append(rollout)

    # ---- decisions

    def decide(self) -> None:
        self.deal_with_stragglers()
        if not self.training and self.published < self.case.steps and (batch := self.next_batch()):
            self.take(batch)
        self.stop_who_is_to_stop()
        if (
            self.trained > self.published
            and not self.syncing
            and not (self.case.in_flight == "drain" and self.in_lanes())
        ):
            self.syncing = True
            heapq.heappush(self.events, (self.now + self.case.sync_time, PUBLISHED, 0))
            if self.events[0][0] == self.now:
                return  # lanes are filled in the pass that follows
        self.fill_lanes()

    def lag(self, group: _Group) -> int:
        members = group.of("scored") if group.ready_at is not None else list(group.members.values())
        return max((self.trained - rollout.oldest for rollout in members), default=0)

    def deal_with_stragglers(self) -> None:
        case = self.case
        if "drop" in case.stragglers:
            for group in [group for group in self.in_order_of_readiness() if self.lag(group) > case.max_lag]:
                self.release(group, "dropped")
        for group in self.newly_ready if case.dynamic_sampling else []:
            if group.number in self.groups and len({case.reward(r.group, r.member) for r in group.of("scored")}) == 1:
                self.release(group, "filtered")
        if "restart" in case.stragglers and "published" in self.came_out:
            for group in self.stale_groups():
                if group.restarts < case.max_restarts:
                    self.restart(group)
                else:
                    self.interrupt(group)
        if "interrupt" in case.stragglers and self.came_out:
            for group in self.stale_groups():
                self.interrupt(group)
        for rollout in self.late:
            if rollout.state == "lane" and rollout.ending is None:
                group = self.groups[rollout.group]
                group.urgent |= group.ready_at is None
                self.stop(rollout, "interrupt")
        if case.in_flight == "restart" and "published" in self.came_out:
            for rollout in self.rollouts:
                in_flight = rollout.state in ("lane", "paused") and rollout.ending is None
                if in_flight and rollout.oldest < self.published:
                    self.begin_again(rollout)

    def stale_groups(self) -> list[_Group]:
        """Unfinished, at max_lag, with a rollout that is older than the newest published weights."""
        return [
            group
            for group in self.groups.values()
            if group.ready_at is None
            and group.of("lane", "paused", "scoring")
            and self.lag(group) >= self.case.max_lag
            and any(rollout.oldest < self.published for rollout in group.members.values())
        ]

    def interrupt(self, group: _Group) -> None:
        group.urgent = True
        for rollout in group.of("lane", "paused"):
            if rollout.state == "lane":
                self.stop(rollout, "interrupt")
            else:
                rollout.ending = "interrupt"
                self.wanting.add((rollout.group, rollout.member))

    def restart(self, group: _Group) -> None:
        group.restarts += 1
        for rollout in group.of("lane", "paused", "scoring", "scored", "unscored"):
            self.begin_again(rollout)

    def begin_again(self, rollout: _Rollout) -> None:
        self.abort(rollout)
        del self.groups[rollout.group].members[rollout.member]
        self.wanting.add((rollout.group, rollout.member))

    def stop(self, rollout: _Rollout, ending: str) -> None:
        rollout.ending = ending
        self.stopped.append(rollout)

    def stop_who_is_to_stop(self) -> None:
        for rollout in self.stopped:
            rollout.ends = self.now
            heapq.heappush(self.events, (self.now, GENERATED, rollout.number))
        self.stopped = []

    def abort(self, rollout: _Rollout) -> None:
        if rollout.state == "lane":
            self.stop(rollout, "abort")
        else:
            rollout.state = "gone"
            self.wanting.discard((rollout.group, rollout.member))
            self.history.aborts.append((self.now, rollout.number, None))

    def abort_unfinished(self, group: _Group) -> None:
        for rollout in group.of("lane", "paused", "scoring"):
            self.abort(rollout)
            del group.members[rollout.member]
        self.wanting -= {(group.number, member) for member in range(self.case.num_members)}

    def release(self, group: _Group, why: str) -> None:
        self.abort_unfinished(group)
        self.leave(group)
        self.num_released += 1
        self.history.released.append((self.now, why, group.number))

    def leave(self, group: _Group) -> None:
        del self.groups[group.number]
        self.ready = [other for other in self.ready if other is not group]

    # ---- the trainer

    def in_order_of_readiness(self) -> list[_Group]:
        return sorted(self.ready, key=lambda group: (not group.urgent, group.ready_at, group.number))

    def next_batch(self) -> list[_Group]:
        size, ready = self.case.groups_per_batch, self.in_order_of_readiness()
        oldest_first = sorted(self.groups.values(), key=lambda group: group.number)
        if len(ready) < size:
            no_more = self.data_ended() and len(ready) == len(self.groups)
            return ready if no_more else []
        if self.case.order == "finished":
            return ready[:size]
        window = 1 if self.case.order == "started" else self.case.window
        batch: list[_Group] = []
        while len(batch) < size:
            anchor = next(group.number for group in oldest_first if group not in batch)
            visible = [group for group in ready if group not in batch and group.number < anchor + window]
            if not visible:
                return []
            batch.append(visible[0])
        return batch

    def take(self, batch: list[_Group]) -> None:
        self.training = True
        for group in batch:
            self.abort_unfinished(group)
            self.leave(group)
        chosen = [rollout for group in batch for rollout in group.of("scored")]
        lags = [self.trained - rollout.oldest for rollout in chosen]
        self.history.batches.append((self.now, [rollout.number for rollout in chosen], lags))
        heapq.heappush(self.events, (self.now + self.case.train_time, TRAINED, 0))
        if not self.case.overlap:
            for rollout in self.in_lanes():
                if rollout.ending is None:
                    self.stop(rollout, "pause")

    # ---- the lanes

    def fill_lanes(self) -> None:
        if not self.case.overlap and self.training:
            return
        if self.case.in_flight == "drain" and self.trained > self.published:
            return
        while self.fill_one_lane():
            pass
        idle = not self.training and not any(rollout.state in ("lane", "scoring") for rollout in self.rollouts)
        paused = {(rollout.group, rollout.member) for rollout in self.rollouts if rollout.state == "paused"}
        if idle and paused:
            self.wanting |= paused
            self.fill_lanes()

    def fill_one_lane(self) -> bool:
        if not self.idle_lanes:
            return False
        if not self.wanting:
            slots = math.floor((self.published + 1 + Fraction(str(self.case.run_ahead))) * self.case.groups_per_batch)
            if self.data_ended() or self.num_started - self.num_released >= slots:
                return False
            self.groups[self.num_started] = _Group(self.num_started)
            self.wanting = {(self.num_started, member) for member in range(self.case.num_members)}
            self.num_started += 1
        key = min(self.wanting)
        self.wanting.remove(key)
        self.hand_over(*key)
        return True

    def hand_over(self, group: int, member: int) -> None:
        case, members = self.case, self.groups[group].members
        starts = member not in members
        if starts:
            members[member] = _Rollout(len(self.rollouts), group, member, case.length(group, member))
            self.rollouts.append(members[member])
        rollout = members[member]
        rollout.state, rollout.lane = "lane", heapq.heappop(self.idle_lanes)
        rollout.version, rollout.began = self.published, self.now
        limit = math.inf if case.iteration_tokens is None else case.iteration_tokens
        rollout.wanted = 0.0 if rollout.ending else min(rollout.left, limit)
        rollout.ends = self.now + rollout.wanted
        heapq.heappush(self.events, (rollout.ends, GENERATED, rollout.number))
        if case.deadline is not None:
            heapq.heappush(self.events, (self.now + max(0.0, case.deadline - rollout.held), LATE, rollout.number))
        entry = (self.now, rollout.number, group, member, rollout.lane, rollout.version)
        (self.history.starts if starts else self.history.resumes).append(entry)
