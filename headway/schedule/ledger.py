"""What has been started, finished, scored, taken, trained and published: a state machine of integers.

Stages *report* (generated, scored, trained, published ...) in any order; `settle` applies the reports of an instant in
one fixed order. The loop *decides* (release, take, stop, publish, save, start ...), which applies at once. Every
transition of the schedule emits one trace event; whatever a run counts is derived from what stands here or from those
events.

No asyncio and no tensors: references are carried, never opened.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headway.schedule.groups import Evaluation, Fate, Group, RolloutTicket
from headway.schedule.pass_rates import RIGHT, PassRates
from headway.schedule.waiting import Waiting
from headway.stages import Generated, Reference, Restored, Scored
from headway.trace import Trace
from headway.types import Receipt, UserError

_GENERATED, _LOST, _SCORED, _OVERDUE, _TRAINED, _PUBLISHED, _SAVED = range(7)

Release = Literal["failed", "dropped", "filtered"]
"""Why a group gives its slots back without being trained; the kind of its event."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The sizes of a run.

    num_groups: how many groups the data hold (None: no end); redundant: members of a group beyond group_size, of which
    the last to finish are aborted, or kept as long as the group waits (keep_redundant); max_lost: how often a rollout
    that the engine has lost begins again; max_filtered, max_failed: groups filtered for one batch, and groups that
    failed in a row, after which the run stops; iteration_tokens: what a rollout may sample before it pauses.
    """

    lanes: int
    batch_size: int
    group_size: int = 1
    steps: int = 1
    num_groups: int | None = None
    evaluation_size: int = 0
    evaluate_every: int = 0
    save_every: int = 0
    redundant: int = 0
    keep_redundant: bool = False
    max_lost: int = 3
    max_filtered: int | None = None
    max_failed: int | None = None
    iteration_tokens: float | None = None

    @property
    def groups_per_batch(self) -> int:
        return self.batch_size // self.group_size

    @property
    def num_members(self) -> int:
        """Rollouts that a group starts."""
        return self.group_size + self.redundant


class BoundBroken(RuntimeError):
    """A batch holds a rollout that is older than the schedule's proof allows: a fault of Headway, not of the user."""


class Ledger:
    """The account of one run.

    settings: its sizes; now: the clock; changed: called whenever a report arrives; trace: told of every transition;
    progress, restored: `self.progress()` of a run that this one resumes, and the rollouts that were saved with it;
    pass_rates: given, mastered prompts are left out; lag_bound: the largest lag that the rules allow (None: no bound);
    bound_from: groups that started before this one, in order of start, did so under other rules and are not held to it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        now: Callable[[], float],
        changed: Callable[[], object],
        trace: Trace,
        progress: Mapping[str, Any] | None = None,
        restored: Iterable[Restored] = (),
        pass_rates: PassRates | None = None,
        lag_bound: int | None = None,
        bound_from: int = 0,
    ) -> None:
        self.settings, self.lag_bound, self._bound_from = settings, lag_bound, bound_from
        self._pass_rates = pass_rates
        self._now, self._changed, self._trace = now, changed, trace
        self.trained = self.published = self.saved = 0
        self.groups_started = self.groups_released = 0
        self.rollouts_started = 0
        self.running: dict[int, RolloutTicket] = {}
        self.scoring: dict[int, RolloutTicket] = {}
        self.active: dict[int, Group] = {}
        self.ready: list[tuple[bool, float, int]] = []
        self.ready_orders: list[int] = []  # of the ready groups, the oldest first
        self.waiting = Waiting()
        self.paused: dict[tuple[int, int], RolloutTicket] = {}
        self.idle_lanes = list(range(settings.lanes))
        self.batch: list[Group] | None = None
        self.unpublished: Reference = None
        self.publishing = self.saving = False
        self.evaluation: Evaluation | None = None
        self.aged = False
        self.newly_ready: list[Group] = []
        self.overdue: list[RolloutTicket] = []
        self._stopped: list[RolloutTicket] = []
        self._num_filtered = self._num_failed = 0
        self._next_group = self._next_order = 0
        self._watermark = 0
        self._resolved_above: set[int] = set()
        self._evaluated_version: int | None = None
        self._reports: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        if progress:
            self._resume(progress, restored)
        self._open_due_evaluation()

    # ---- resuming

    def _resume(self, progress: Mapping[str, Any], restored: Iterable[Restored]) -> None:
        """Groups that were in flight go on: what was saved of their rollouts is there, the rest begins again.

        A version is saved before it is evaluated to the end, so an evaluation that is due then is held (again).
        """
        self.trained = self.published = self.saved = progress["version"]
        self._watermark = progress["watermark"]
        self._resolved_above = set(progress["resolved_above"])
        self.groups_started, self.groups_released = progress["groups_started"], progress["groups_released"]
        self.rollouts_started = progress["rollouts_started"]
        self._next_order = progress["next_order"]
        if self._pass_rates:
            self._pass_rates.resume(progress.get("pass_rates", {}))
        rollouts = {(rollout.group, rollout.member): rollout for rollout in restored}
        for saved in progress["active"]:
            self._restore(saved, rollouts)
        for number, index in enumerate(progress["ready"]):
            if self._complete(self.active[index]):
                self._make_ready(number - len(progress["ready"]), self.active[index])
                self._forget_unstarted(self.active[index])
        for group in list(self.active.values()):
            if not group.ready and self._complete(group):  # its last score came while the checkpoint was written
                self._close(self._now(), group)
        self._next_group = self._watermark
        self._skip_ahead()

    def _restore(self, saved: Mapping[str, Any], rollouts: Mapping[tuple[int, int], Restored]) -> None:
        index = saved["group"]
        group = self.active[index] = self._group(index, saved["order"])
        group.urgent, group.num_restarts = saved["urgent"], saved["restarts"]
        for member in range(group.num_members):
            rollout = rollouts.get((index, member))
            if rollout is None or rollout.scored is None:
                self.waiting.add((index, member))
            if rollout is not None:
                self._restore_rollout(group, rollout)
        for member, why in saved["interrupted"]:
            if (index, member) in self.paused:
                self.paused[index, member].fate, self.paused[index, member].why = "interrupt", why

    def _restore_rollout(self, group: Group, rollout: Restored) -> None:
        """A finished one is as it was; one in flight is paused. Its number is that of a rollout that starts now."""
        ticket = RolloutTicket(
            index=self.rollouts_started,
            group=group.index,
            member=rollout.member,
            lane=-1,
            version=rollout.version,
            started_s=0.0,
            ref=rollout.generated.ref,
            receipt=rollout.generated.receipt,
        )
        self.rollouts_started += 1
        group.members[rollout.member] = ticket
        scored = rollout.scored
        if scored is None:
            self.paused[group.index, rollout.member] = ticket
        else:
            ticket.ref, ticket.outcome, ticket.reward = scored.ref, scored.outcome, scored.reward
            group.num_finished += 1
        self._trace.emit(
            "restored",
            self._now(),
            rollout=ticket.index,
            group=group.index,
            member=rollout.member,
            tokens=ticket.num_tokens,
            finish=ticket.receipt.finish if ticket.receipt and scored else None,
            outcome=ticket.outcome,
        )

    # ---- derived

    @property
    def exhausted(self) -> bool:
        """No group is left to start, and no member of one that has started."""
        return not self.waiting and self._data_ended

    @property
    def _data_ended(self) -> bool:
        last = self.settings.num_groups
        mastered = self._pass_rates is not None and self._pass_rates.all_retired
        return mastered or (last is not None and self._next_group >= last)

    @property
    def steps_done(self) -> bool:
        """Every step is published, or the data and all that came of them are used up."""
        nothing_left = not self.active and self.exhausted and not self.trainer_busy
        return nothing_left or self.published >= self.settings.steps

    @property
    def done(self) -> bool:
        """All steps are done, and so are the last checkpoint and the last evaluation."""
        return self.steps_done and self.evaluation is None and not self.save_due and not self.saving

    @property
    def trainer_busy(self) -> bool:
        """From the moment a batch is taken until its weights are published, and while they are written to disk."""
        return self.batch is not None or self.saving

    @property
    def may_open_group(self) -> bool:
        """The data hold another group to start."""
        return not self._data_ended

    def lag(self, ticket: RolloutTicket) -> int:
        """Of a rollout: `trained` minus the version of its oldest token."""
        return self.trained - ticket.oldest_version

    def group_lag(self, group: Group) -> int:
        """That of its oldest rollout, of those that would be trained; 0 while none has started."""
        members = group.scored if group.ready else group.members.values()
        return max(map(self.lag, members), default=0)

    @property
    def save_due(self) -> bool:
        """The newest weights are to be checkpointed: every so often, after the last step, at the end of the data."""
        every = self.settings.save_every
        last = self.trained >= self.settings.steps or (not self.active and self.exhausted)
        return self.trained > self.saved and (last or (every > 0 and self.trained % every == 0))

    def progress(self) -> dict[str, Any]:
        """What a resume needs, as JSON holds it.

        Every group below the watermark, and those listed above it, are trained or released; `active` are the others
        that have started, `ready` those of them that may be taken, first come first.
        """
        return {
            "version": self.trained,
            "batch_size": self.settings.batch_size,
            "group_size": self.settings.group_size,
            "watermark": self._watermark,
            "resolved_above": sorted(self._resolved_above),
            "groups_started": self.groups_started,
            "groups_released": self.groups_released,
            "rollouts_started": self.rollouts_started,
            "next_order": self._next_order,
            "active": [
                {
                    "group": group.index,
                    "order": group.order,
                    "urgent": group.urgent,
                    "restarts": group.num_restarts,
                    "interrupted": _interrupted(group),
                }
                for group in self.active.values()
            ],
            "ready": [index for _, _, index in self.ready],
            **({"pass_rates": self._pass_rates.progress()} if self._pass_rates else {}),
        }

    # ---- reports, in any order within an instant

    def report_generated(self, ticket: RolloutTicket, generated: Generated) -> bool:
        """-> whether the rollout is to be scored: it has ended, or was interrupted for good, and is still wanted."""
        self._report(_GENERATED, ticket.index, self._generated, ticket, generated)
        return _is_whole(ticket, generated)

    def report_lost(self, ticket: RolloutTicket, reason: str) -> None:
        self._report(_LOST, ticket.index, self._lost, ticket, reason)

    def report_scored(self, ticket: RolloutTicket, scored: Scored) -> None:
        self._report(_SCORED, ticket.index, self._scored, ticket, scored)

    def report_overdue(self, ticket: RolloutTicket) -> None:
        self._report(_OVERDUE, ticket.index, self._overdue, ticket)

    def report_trained(self, weights: Reference, metrics: Mapping[str, Any]) -> None:
        self._report(_TRAINED, 0, self._trained, weights, metrics)

    def report_published(self, version: int) -> None:
        self._report(_PUBLISHED, 0, self._published, version)

    def report_saved(self) -> None:
        self._report(_SAVED, 0, self._saved)

    def _report(self, rank: int, index: int, apply: Callable[..., None], *what: Any) -> None:
        self._reports.append((self._now(), rank, index, apply, what))
        self._changed()

    def settle(self) -> None:
        """Apply what was reported: by time, then finishes before train ends, then in order of start.

        `aged` (a version has come out), `newly_ready` and `overdue` say what this instant has brought.
        """
        self.aged, self.newly_ready, self.overdue = False, [], []
        reports, self._reports = self._reports, []
        for at_s, _, _, apply, what in sorted(reports, key=lambda report: report[:3]):
            apply(at_s, *what)
        self._open_due_evaluation()

    def _generated(self, at_s: float, ticket: RolloutTicket, generated: Generated) -> None:
        self._free_lane(at_s, ticket)
        ticket.ref, ticket.receipt = generated.ref, generated.receipt
        if ticket.discarded:
            self._emit_aborted(at_s, ticket, ticket.lane)
        elif _is_whole(ticket, generated):
            self.scoring[ticket.index] = ticket
            self._emit_generated(at_s, ticket, generated.receipt)
        else:
            self._pause(at_s, ticket)

    def _free_lane(self, at_s: float, ticket: RolloutTicket) -> None:
        del self.running[ticket.index]
        ticket.lane_s += at_s - ticket.resumed_s
        heapq.heappush(self.idle_lanes, ticket.lane)

    def _emit_generated(self, at_s: float, ticket: RolloutTicket, receipt: Receipt) -> None:
        self._trace.emit(
            "generated",
            at_s,
            rollout=ticket.index,
            lane=ticket.lane,
            prompt=receipt.prompt_uid,
            tokens=receipt.num_tokens,
            prompt_tokens=receipt.num_prompt_tokens,
            versions=[[run.version, run.num_tokens] for run in receipt.version_runs],
            finish=receipt.finish,
            **({"why": ticket.why} if receipt.finish == "interrupted" else {}),
        )

    def _emit_aborted(self, at_s: float, ticket: RolloutTicket, lane: int | None) -> None:
        self._trace.emit(
            "aborted",
            at_s,
            rollout=ticket.index,
            group=ticket.group,
            lane=lane,
            tokens=ticket.num_tokens,
            reason=ticket.why,
        )

    def _pause(self, at_s: float, ticket: RolloutTicket) -> None:
        self._trace.emit(
            "paused",
            at_s,
            rollout=ticket.index,
            lane=ticket.lane,
            tokens=ticket.num_tokens,
            reason=ticket.why or "iteration_tokens",
        )
        self.paused[ticket.group, ticket.member] = ticket
        if ticket.fate == "pause" and self.batch is None:  # the batch that it paused for was published meanwhile
            self.waiting.add((ticket.group, ticket.member))
        ticket.fate, ticket.why = None, ""

    def _lost(self, at_s: float, ticket: RolloutTicket, reason: str) -> None:
        """The engine has none of it any more: it begins again, or counts as finished without an outcome."""
        self._free_lane(at_s, ticket)
        num = self._count_lost(ticket)
        self._trace.emit(
            "lost", at_s, rollout=ticket.index, group=ticket.group, lane=ticket.lane, num=num, reason=reason
        )
        if ticket.discarded:
            return
        ticket.ref = ticket.receipt = None
        if ticket.evaluation:
            self._lost_answer(at_s, ticket.group)
            return
        group = self.active[ticket.group]
        if num <= self.settings.max_lost:
            self._discard(at_s, ticket, "lost")
            self._begin_again(group, ticket)
        else:
            ticket.outcome = "lost"
            self._count_member(at_s, group)

    def _count_lost(self, ticket: RolloutTicket) -> int:
        """How often the engine has lost this answer; 0 for one that was wanted no more."""
        if ticket.discarded:
            return 0
        if ticket.evaluation:
            assert self.evaluation is not None, "an answer was lost of an evaluation that is over"
            lost, answer = self.evaluation.lost, ticket.group
        else:
            lost, answer = self.active[ticket.group].lost, ticket.member
        lost[answer] = lost.get(answer, 0) + 1
        return lost[answer]

    def _lost_answer(self, at_s: float, number: int) -> None:
        evaluation = self.evaluation
        assert evaluation is not None, "an answer was lost of an evaluation that is over"
        if evaluation.lost[number] <= self.settings.max_lost:
            heapq.heappush(evaluation.waiting, number)
        else:
            self._evaluated(at_s, None)

    def _scored(self, at_s: float, ticket: RolloutTicket, scored: Scored) -> None:
        if ticket.discarded:
            self.scoring.pop(ticket.index, None)  # not there, where it was discarded before its end was settled
            return
        del self.scoring[ticket.index]
        ticket.ref, ticket.outcome, ticket.reward = scored.ref, scored.outcome, scored.reward
        self._trace.emit(
            "scored", at_s, rollout=ticket.index, group=ticket.group, outcome=scored.outcome, reward=scored.reward
        )
        if ticket.evaluation:
            self._evaluated(at_s, scored.reward)
        else:
            self._count_member(at_s, self.active[ticket.group])

    def _count_member(self, at_s: float, group: Group) -> None:
        group.num_finished += 1
        if group.ready and group not in self.newly_ready:
            self.newly_ready.append(group)  # with one more member, it may be too old now
        elif not group.ready and self._complete(group):
            self._close(at_s, group)

    def _close(self, at_s: float, group: Group) -> None:
        """Nothing more has to come of it: it is ready, or has failed."""
        if len(group.scored) >= min(2, group.size):
            self._make_ready(at_s, group)
            self._leave_off(at_s, group)
        else:
            num = len(group.scored)
            self._give_back(at_s, group, "failed", reason=f"{num} of its {group.num_members} rollouts were scored")
            self._refuse_to_fail_for_ever(group)

    def _refuse_to_fail_for_ever(self, group: Group) -> None:
        """Data without an end would be used up by an engine or a grader that is broken for good."""
        self._num_failed += 1
        limit = self.settings.max_failed
        if limit is not None and self._num_failed >= limit:
            outcomes = ", ".join(sorted({str(ticket.outcome) for ticket in group.members.values()}))
            raise UserError(
                f"{self._num_failed} groups in a row could not be trained, as too few of their rollouts were scored "
                f"(of the last one: {outcomes}): look at the engine, the grader and schedule.deadline_s, "
                "or raise schedule.max_failed"
            )

    def _complete(self, group: Group) -> bool:
        """Enough members are scored, or none is left that could be."""
        if group.num_finished < group.size:
            return False
        return len(group.scored) >= group.size or group.num_finished >= group.num_members

    def _make_ready(self, at_s: float, group: Group) -> None:
        group.ready = True
        self._num_failed = 0
        insort(self.ready, (not group.urgent, at_s, group.index))
        insort(self.ready_orders, group.order)
        self.newly_ready.append(group)

    def _leave_off(self, at_s: float, group: Group) -> None:
        """Enough redundant members are done: no other starts, and those in flight go, unless they may come in later."""
        if not self.settings.keep_redundant:
            self._discard_unfinished(at_s, group, "redundant")
        self._forget_unstarted(group)

    def _discard_unfinished(self, at_s: float, group: Group, why: str) -> None:
        if group.num_finished == group.num_members:
            return
        for ticket in list(group.members.values()):
            if ticket.outcome is None:
                self._discard(at_s, ticket, why)
                del group.members[ticket.member]
        self._forget_unstarted(group)

    def _forget_unstarted(self, group: Group) -> None:
        """Members that have never had a lane will not get one."""
        for member in range(group.num_members):
            if (group.index, member) not in self.paused:
                self.waiting.discard((group.index, member))

    def _give_back(self, at_s: float, group: Group, kind: Release, **fields: Any) -> None:
        """A group that isn't trained gives its slots back: otherwise throughput would decay with every one."""
        self._discard_unfinished(at_s, group, kind)
        del self.active[group.index]
        self.groups_released += 1
        self._resolve(group.index)
        tokens = sum(ticket.num_tokens for ticket in group.members.values())
        rollouts = [ticket.index for ticket in group.members.values()]
        self._trace.emit(
            kind, at_s, group=group.index, prompt=group.prompt_uid, rollouts=rollouts, tokens=tokens, **fields
        )

    def _count_right_answers(self, at_s: float, group: Group) -> None:
        if self._pass_rates is None:
            return
        rewards = [ticket.reward for ticket in group.scored if ticket.reward is not None]
        if self._pass_rates.count(group.index, rewards):
            self._trace.emit("retired", at_s, group=group.index, prompt=self._pass_rates.prompt_of(group.index))

    def _resolve(self, group: int) -> None:
        self._resolved_above.add(group)
        while self._watermark in self._resolved_above:
            self._resolved_above.remove(self._watermark)
            self._watermark += 1

    def _overdue(self, at_s: float, ticket: RolloutTicket) -> None:
        if ticket.index in self.running and ticket.fate is None:
            self.overdue.append(ticket)

    def _trained(self, at_s: float, weights: Reference, metrics: Mapping[str, Any]) -> None:
        assert self.batch is not None, "a train step ended that had taken no batch"
        for group in self.batch:
            self._resolve(group.index)
            self._count_right_answers(at_s, group)
        self._skip_ahead()
        self.trained += 1
        self.aged = True
        self.unpublished = weights
        self._trace.emit("trained", at_s, version=self.trained, metrics=dict(metrics))

    def _published(self, at_s: float, version: int) -> None:
        """A second acknowledgement, or a late one of older weights, says nothing new."""
        if version != self.trained or version == self.published:
            return
        self.published = version
        self.aged = True
        self.publishing, self.batch = False, None
        self._trace.emit("published", at_s, version=self.published)
        self.next_iteration()

    def _saved(self, at_s: float) -> None:
        self.saving = False
        self._trace.emit("saved", at_s, version=self.saved)

    def _evaluated(self, at_s: float, reward: float | None) -> None:
        evaluation = self.evaluation
        assert evaluation is not None, "an answer arrived for an evaluation that is over"
        evaluation.rewards.append(reward)
        if evaluation.complete:
            rewards = [reward for reward in evaluation.rewards if reward is not None]
            self.evaluation = None
            self._trace.emit(
                "evaluated",
                at_s,
                version=evaluation.version,
                num=len(rewards),
                num_unscored=evaluation.size - len(rewards),
                mean_reward=sum(rewards) / len(rewards) if rewards else None,
                num_correct=sum(reward >= RIGHT for reward in rewards),
            )

    def _open_due_evaluation(self) -> None:
        """Before the first step, after the last, and every so often between."""
        every = self.settings.evaluate_every
        due = self.published == 0 or self.steps_done or (every and self.published % every == 0)
        if self.settings.evaluation_size and due and self.published != self._evaluated_version:
            assert self.evaluation is None, "an evaluation is due while another is open"
            size = self.settings.evaluation_size
            self._evaluated_version = self.published
            self.evaluation = Evaluation(self.published, size, waiting=list(range(size)))

    # ---- decisions, in the order the loop takes them

    def drop(self, group: Group) -> None:
        """A finished group that is too old is not trained; its prompt is reported."""
        lag = self.group_lag(group)
        self._release(group, "dropped", reason=f"its lag of {lag} is above max_lag", lag=lag)

    def filter(self, group: Group) -> None:
        """A group whose rewards are all the same teaches nothing; another may start in its place."""
        now, reward = self._now(), group.scored[0].reward
        self._count_right_answers(now, group)
        self._release(group, "filtered", reason=f"all its rewards are {reward:g}", reward=reward)
        self._skip_ahead()  # its prompt may be mastered by now, and be that of the next group
        self._num_filtered += 1
        limit = self.settings.max_filtered
        if limit is not None and self._num_filtered >= limit:
            raise UserError(
                f"{self._num_filtered} groups since the last train step had equal rewards (the last one: all "
                f"{reward:g}), so there is too little to learn from: take prompts that are neither too hard nor too "
                "easy, raise schedule.group_size or schedule.max_filtered, or set schedule.dynamic_sampling = false"
            )

    def _release(self, group: Group, kind: Release, **fields: Any) -> None:
        self._no_longer_ready([group])
        self._give_back(self._now(), group, kind, **fields)
        self._changed()  # it may have been the last one, and then nobody else reports anything

    def _no_longer_ready(self, groups: list[Group]) -> None:
        gone = {group.index for group in groups}
        if all(index in gone for _, _, index in self.ready[: len(groups)]):
            del self.ready[: len(groups)]  # as in order finished, however many others there are
        else:
            self.ready = [entry for entry in self.ready if entry[2] not in gone]
        for group in groups:
            del self.ready_orders[bisect_left(self.ready_orders, group.order)]

    def take(self, groups: list[Group]) -> list[Group]:
        """The idle trainer takes these groups as a batch; their lag is fixed here."""
        now = self._now()
        self._no_longer_ready(groups)
        for group in groups:
            self._discard_unfinished(now, group, "redundant")
            del self.active[group.index]
        self.batch = groups
        self.groups_started += self.settings.groups_per_batch - len(groups)  # places of a short batch are slots used up
        self._num_filtered = 0
        rollouts = [ticket for group in groups for ticket in group.scored]
        lags = [self.lag(ticket) for ticket in rollouts]
        self._trace.emit(
            "taken",
            now,
            version=self.trained,
            groups=[group.index for group in groups],
            rollouts=[ticket.index for ticket in rollouts],
            lags=lags,
            token_lag=self._token_lag(rollouts),
        )
        self._hold_bound(groups)
        return groups

    def _hold_bound(self, groups: Iterable[Group]) -> None:
        held = [group for group in groups if group.order >= self._bound_from]
        lags = [self.lag(ticket) for group in held for ticket in group.scored]
        if self.lag_bound is not None and max(lags, default=0) > self.lag_bound:
            raise BoundBroken(
                f"train step {self.trained + 1} took a rollout of lag {max(lags)}, and the schedule's bound is "
                f"{self.lag_bound}; please report this, with the run's trace"
            )

    def _token_lag(self, rollouts: list[RolloutTicket]) -> float:
        runs = [run for ticket in rollouts if ticket.receipt for run in ticket.receipt.version_runs]
        num_tokens = sum(run.num_tokens for run in runs)
        return sum((self.trained - run.version) * run.num_tokens for run in runs) / num_tokens if num_tokens else 0.0

    def restart(self, group: Group, why: str) -> None:
        """All members of the group begin again, under the newest weights."""
        now = self._now()
        group.num_restarts += 1
        group.num_finished = 0
        self._trace.emit("restarted", now, group=group.index, num=group.num_restarts, reason=why)
        for ticket in list(group.members.values()):
            self._discard(now, ticket, why)
            self._begin_again(group, ticket)

    def begin_again(self, ticket: RolloutTicket, why: str) -> None:
        """One rollout in flight begins again, under the newest weights."""
        self._discard(self._now(), ticket, why)
        self._begin_again(self.active[ticket.group], ticket)

    def _begin_again(self, group: Group, ticket: RolloutTicket) -> None:
        del group.members[ticket.member]
        self.waiting.add((ticket.group, ticket.member))

    def _discard(self, at_s: float, ticket: RolloutTicket, why: str) -> None:
        """What becomes of it is of no interest: one in flight is stopped, one that is whole or paused goes at once."""
        ticket.discarded, ticket.why = True, why
        if ticket.index in self.running:
            self._stop(ticket, "discard", why)
        else:
            self.paused.pop((ticket.group, ticket.member), None)
            if "lost" not in (why, ticket.outcome):
                self._emit_aborted(at_s, ticket, None)

    def interrupt(self, ticket: RolloutTicket, why: str) -> None:
        """What there is of it is scored; its group is taken first. A paused one ends when it next gets a lane."""
        if not ticket.evaluation and not self.active[ticket.group].ready:
            self.active[ticket.group].urgent = True
        if ticket.index in self.running:
            self._stop(ticket, "interrupt", why)
        elif (ticket.group, ticket.member) in self.paused:
            ticket.fate, ticket.why = "interrupt", why
            self.waiting.add((ticket.group, ticket.member))

    def abandon(self, ticket: RolloutTicket, why: str) -> None:
        """Nothing more is wanted of it, nor of its like."""
        self._discard(self._now(), ticket, why)
        del self.active[ticket.group].members[ticket.member]

    def pause(self, ticket: RolloutTicket, why: str) -> None:
        """It goes on in a later iteration."""
        self._stop(ticket, "pause", why)

    def _stop(self, ticket: RolloutTicket, fate: Fate, why: str) -> None:
        if ticket.fate is None:
            self._stopped.append(ticket)
        ticket.fate, ticket.why = fate, why

    def stopped(self) -> list[RolloutTicket]:
        """The rollouts in flight whose stage is to be told that they end now; each is given out once."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def publish(self) -> tuple[Reference, int]:
        """The newest weights leave the trainer -> they, and their version."""
        weights, self.unpublished = self.unpublished, None
        self.publishing = True
        self._trace.emit("publishing", self._now(), version=self.trained)
        return weights, self.trained

    def save(self) -> tuple[dict[str, Any], list[RolloutTicket]]:
        """The published weights go to disk, with this account of the run; no batch is taken meanwhile.

        -> the account, and every ticket whose rollout is to be kept with it.
        """
        self.saved, self.saving = self.published, True
        self._trace.emit("saving", self._now(), version=self.saved)
        return self.progress(), [ticket for group in self.active.values() for ticket in group.members.values()]

    def evaluate(self) -> RolloutTicket:
        """Lend the first free lane to the open evaluation. It takes no slot and is outside every count."""
        assert self.evaluation is not None, "no evaluation is open"
        number = heapq.heappop(self.evaluation.waiting)
        index = -1 - number  # rollouts that are trained count from 0 up
        ticket = RolloutTicket(index, group=number, member=0, lane=-1, version=0, started_s=0.0, evaluation=True)
        return self._hand_over(ticket, "started")

    def next_iteration(self) -> None:
        """Whoever has paused may go on."""
        for key in self.paused:
            self.waiting.add(key)

    def start(self) -> RolloutTicket:
        """Hand the first free lane the oldest rollout that waits for one, or the first one of a new group."""
        if not self.waiting:
            self._open_group()
        index, member = self.waiting.pop()
        paused = self.paused.pop((index, member), None)
        if paused:
            return self._hand_over(paused, "resumed")
        ticket = RolloutTicket(self.rollouts_started, index, member, lane=-1, version=0, started_s=0.0)
        self.rollouts_started += 1
        self.active[index].members[member] = ticket
        return self._hand_over(ticket, "started")

    def _open_group(self) -> None:
        index = self._next_group
        group = self.active[index] = self._group(index, self._next_order)
        for member in range(group.num_members):
            self.waiting.add((index, member))
        self.groups_started += 1
        self._next_order += 1
        self._next_group += 1
        self._skip_ahead()

    def _group(self, index: int, order: int) -> Group:
        return Group(index, order, size=self.settings.group_size, num_members=self.settings.num_members)

    def _skip_ahead(self) -> None:
        """To the next group that has to be trained: past those that are resolved or active, and retired prompts."""
        while not self._data_ended:
            if self._next_group not in self._resolved_above and self._next_group not in self.active:
                if self._pass_rates is None or not self._pass_rates.retired(self._next_group):
                    return
                self._leave_out(self._next_group)
            self._next_group += 1

    def _leave_out(self, group: int) -> None:
        """Started and released at once, so that it holds no slot."""
        self.groups_started += 1
        self.groups_released += 1
        self._resolve(group)

    def _hand_over(self, ticket: RolloutTicket, kind: Literal["started", "resumed"]) -> RolloutTicket:
        now = self._now()
        ticket.lane = heapq.heappop(self.idle_lanes)
        ticket.version, ticket.resumed_s = self.published, now
        if kind == "started":
            ticket.started_s = now
        if not ticket.evaluation:
            ticket.max_tokens = 0 if ticket.fate == "interrupt" else self.settings.iteration_tokens
        self.running[ticket.index] = ticket
        self._trace.emit(
            kind,
            now,
            rollout=ticket.index,
            group=ticket.group,
            member=ticket.member,
            lane=ticket.lane,
            version=ticket.version,
            evaluation=ticket.evaluation,
        )
        return ticket


def _interrupted(group: Group) -> list[tuple[int, str]]:
    """Members that are to be scored as far as they have come, and why."""
    tickets = sorted(group.members.values(), key=lambda ticket: ticket.member)
    return [(ticket.member, ticket.why) for ticket in tickets if ticket.fate == "interrupt" and ticket.outcome is None]


def _is_whole(ticket: RolloutTicket, generated: Generated) -> bool:
    """It has ended, or nothing more is wanted of it; and it is wanted at all."""
    ended = generated.receipt.finish != "interrupted" or ticket.fate == "interrupt"
    return ended and not ticket.discarded
