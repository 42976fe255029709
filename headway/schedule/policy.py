"""Pure rules: what may happen now. They read the ledger and change nothing."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice

from headway.schedule.groups import Group, RolloutTicket
from headway.schedule.ledger import Ledger
from headway.types import InFlight, Order, Straggler


@dataclass(frozen=True)
class Rules:
    """What may start, in which order it is trained, and what becomes of what is late. The rules compose.

    run_ahead: how many batches generation may run ahead of training; may be fractional.
    order: `finished` (first finished, first trained), `started` (in order of start) or `window` (first finished among
    the `window` oldest groups).
    stragglers: what is done about groups whose lag reaches max_lag; nothing: they are accepted. max_restarts: how often
    `restart` begins a group again before it interrupts.
    in_flight: what becomes of rollouts in flight when new weights come; keep, recompute and pinned are their stage's
    affair, and alike for the schedule.
    overlap: rollouts go on while a batch is trained; False: they pause until its weights are published.
    by_turns: the engine sleeps while a batch is trained, so that an evaluation ends before one is taken.
    dynamic_sampling: groups whose rewards are all the same are replaced.
    deadline_s: time in lanes after which a rollout is interrupted; after as long again its engine has lost it.
    resend_s: after this without an acknowledgement weights are sent again, `max_sends` times in all; then the run ends.
    """

    run_ahead: float
    order: Order = "finished"
    window: int | None = None
    max_lag: int | None = None
    stragglers: tuple[Straggler, ...] = ()
    max_restarts: int = 1
    in_flight: InFlight = "keep"
    overlap: bool = True
    by_turns: bool = False
    dynamic_sampling: bool = False
    deadline_s: float | None = None
    resend_s: float | None = None
    max_sends: int = 3

    # ---- (3) what is late, or teaches nothing

    def dropped(self, ledger: Ledger) -> list[Group]:
        """Finished groups that are too old to be trained."""
        if "drop" not in self.stragglers or self.max_lag is None:
            return []
        candidates = [ledger.active[index] for _, _, index in ledger.ready] if ledger.aged else ledger.newly_ready
        return [group for group in candidates if ledger.group_lag(group) > self.max_lag]

    def filtered(self, ledger: Ledger) -> list[Group]:
        """Groups that have just finished with the same reward everywhere."""
        if not self.dynamic_sampling:
            return []
        return [group for group in ledger.newly_ready if group.index in ledger.active and _same_reward(group)]

    def restarted(self, ledger: Ledger) -> list[Group]:
        """Unfinished groups that have come to max_lag, and have restarts left."""
        if "restart" not in self.stragglers:
            return []
        return [group for group in self._stale(ledger) if group.num_restarts < self.max_restarts]

    def interrupted(self, ledger: Ledger) -> Iterator[tuple[RolloutTicket, str]]:
        """Rollouts in flight that end now, and why: over their deadline, or of a group that has come to max_lag."""
        late = (ticket for ticket in ledger.overdue if ticket.index in ledger.running)  # the others are gone since
        yield from ((ticket, "deadline") for ticket in late if not ticket.discarded)
        if "interrupt" in self.stragglers or "restart" in self.stragglers:
            for group in self._stale(ledger):
                yield from ((ticket, "max_lag") for ticket in _unfinished(group) if ticket.fate is None)

    def _stale(self, ledger: Ledger) -> list[Group]:
        """Unfinished groups whose lag has reached max_lag. A rollout under the newest weights waits for none."""
        to_come = "restart" in self.stragglers and ledger.trained > ledger.published  # the weights to begin again under
        if not ledger.aged or self.max_lag is None or to_come:
            return []
        return [
            group
            for group in ledger.active.values()
            if not group.ready
            and ledger.group_lag(group) >= self.max_lag
            and any(ticket.oldest_version < ledger.published for ticket in group.members.values())
            and any(True for _ in _unfinished(group))
        ]

    def begun_again(self, ledger: Ledger) -> list[RolloutTicket]:
        """Rollouts in flight under older weights, where new weights let none go on; but those that end now do."""
        if self.in_flight != "restart" or not ledger.aged:
            return []
        unfinished = [*ledger.running.values(), *ledger.paused.values()]
        return [
            ticket
            for ticket in unfinished
            if not (ticket.evaluation or ticket.discarded or ticket.fate == "interrupt")
            and ticket.oldest_version < ledger.published
        ]

    # ---- (4) the trainer

    def batch(self, ledger: Ledger) -> list[Group] | None:
        """Groups for the idle trainer, once there are enough in its order; the rest when the data end."""
        if ledger.trainer_busy or ledger.steps_done or ledger.save_due:
            return None
        if self.by_turns and ledger.evaluation is not None:
            return None
        size = ledger.settings.groups_per_batch
        if len(ledger.ready) < size:
            data_ended = len(ledger.active) == len(ledger.ready) and not ledger.may_open_group
            rest = [ledger.active[index] for _, _, index in ledger.ready] if data_ended else []
            return rest or None
        if self.order == "started":
            oldest = list(islice(ledger.active.values(), size))
            return oldest if all(group.ready for group in oldest) else None
        if self.order == "window":
            return self._in_window(ledger, size)
        return [ledger.active[index] for _, _, index in ledger.ready[:size]]

    def _in_window(self, ledger: Ledger, size: int) -> list[Group] | None:
        """First finished, first chosen, among the `window` groups from the oldest unchosen one on."""
        assert self.window is not None, "order window has a window"
        if self._num_in_window(ledger) < size:
            return None
        place = {index: number for number, (_, _, index) in enumerate(ledger.ready)}
        oldest_first, to_enter = iter(ledger.active.values()), deque(ledger.active.values())
        oldest, inside, chosen = next(oldest_first), list[tuple[int, int]](), dict[int, Group]()
        while True:
            while to_enter and to_enter[0].order < oldest.order + self.window:
                group = to_enter.popleft()
                if group.ready:
                    heapq.heappush(inside, (place[group.index], group.index))
            if not inside:
                return None
            _, index = heapq.heappop(inside)
            chosen[index] = ledger.active[index]
            if len(chosen) == size:
                return list(chosen.values())
            while oldest.index in chosen:
                oldest = next(oldest_first)

    def _num_in_window(self, ledger: Ledger) -> int:
        """Finished groups that may be chosen: choosing moves the window on until it begins at an unfinished group.

        Known at once, so that a rollout that finishes meanwhile doesn't cost a look at all others.
        """
        unfinished = next((group for group in ledger.active.values() if not group.ready), None)
        if unfinished is None:
            return len(ledger.ready)
        assert self.window is not None, "order window has a window"
        return bisect_left(ledger.ready_orders, unfinished.order + self.window)

    def may_publish(self, ledger: Ledger) -> bool:
        """New weights are there; nobody is being evaluated under the old ones, nor has to finish under them."""
        waits = ledger.evaluation is not None or (self.in_flight == "drain" and bool(ledger.running))
        return ledger.trained > ledger.published and not ledger.publishing and not waits

    def may_save(self, ledger: Ledger) -> bool:
        """A checkpoint is due, and the trainer holds what was published."""
        return ledger.save_due and not ledger.trainer_busy

    # ---- (5) the lanes

    def paused(self, ledger: Ledger) -> list[RolloutTicket]:
        """Rollouts in flight that wait until the batch that was just taken has been trained and published."""
        if self.overlap or ledger.batch is None:
            return []
        return [ticket for ticket in ledger.running.values() if ticket.fate is None and not ticket.evaluation]

    def unwanted(self, ledger: Ledger) -> list[RolloutTicket]:
        """Rollouts in flight when all steps are done and saved: the last evaluation needs their lanes."""
        if not ledger.steps_done or ledger.save_due or ledger.saving:
            return []
        return [ticket for ticket in ledger.running.values() if not (ticket.evaluation or ticket.discarded)]

    def may_evaluate(self, ledger: Ledger) -> bool:
        """A lane is free and the open evaluation has an unasked prompt."""
        return bool(ledger.idle_lanes) and ledger.evaluation is not None and bool(ledger.evaluation.waiting)

    def may_start(self, ledger: Ledger) -> bool:
        """A lane is free, and a rollout waits for it or the admission rule lets a new group start."""
        if not ledger.idle_lanes or ledger.steps_done or self._lanes_stand_still(ledger):
            return False
        return bool(ledger.waiting) or (ledger.may_open_group and self.admits(ledger))

    def _lanes_stand_still(self, ledger: Ledger) -> bool:
        """Training has the machine, or lanes run dry before new weights come."""
        if not self.overlap and ledger.batch is not None:
            return True
        return self.in_flight == "drain" and ledger.trained > ledger.published

    def admits(self, ledger: Ledger) -> bool:
        """A new group may take its slots (AReaL, arXiv 2505.24298, section 5.1)."""
        return ledger.groups_started - ledger.groups_released < self.num_admitted(ledger)

    def num_admitted(self, ledger: Ledger) -> int:
        """(published + run_ahead + 1) batches, in whole groups, rounded down."""
        size = ledger.settings.groups_per_batch
        return (ledger.published + 1) * size + self.groups_ahead(size)

    def groups_ahead(self, groups_per_batch: int) -> int:
        """run_ahead in whole groups, rounded down."""
        return _whole(self.run_ahead * groups_per_batch)

    def may_begin_iteration(self, ledger: Ledger) -> bool:
        """Rollouts have paused for the next weights, and no others are left that could bring them about."""
        if not ledger.paused or ledger.running or ledger.trainer_busy or ledger.save_due or self.may_start(ledger):
            return False
        return all(ticket.discarded for ticket in ledger.scoring.values())


@cache
def _whole(number: float) -> int:
    """Rounded down: 0.29 x 100 is 29, and 28.99 in binary."""
    return math.floor(round(number, 6))


def _unfinished(group: Group) -> Iterator[RolloutTicket]:
    return (ticket for ticket in group.members.values() if ticket.outcome is None and not ticket.discarded)


def _same_reward(group: Group) -> bool:
    rewards = {ticket.reward for ticket in group.scored}
    return len(rewards) == 1 and None not in rewards
