"""What has been started, finished, scored, taken, trained and published: a state machine of integers.

Stages *report* (generated, scored, trained, published) in any order; `settle` applies the reports of an instant in
one fixed order. The loop *decides* (take, publish, save, evaluate, start), which applies at once. Every transition of
the schedule emits one trace event; whatever a run counts is derived from what stands here or from those events.

No asyncio and no tensors: references are carried, never opened.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.schedule.pass_rates import RIGHT, PassRates
from headway.stages import Generated, Reference, Scored
from headway.trace import Trace
from headway.types import Outcome, Receipt

_GENERATED, _SCORED, _TRAINED, _PUBLISHED, _SAVED = range(5)


@dataclass(slots=True, eq=False)
class RolloutTicket:
    """One rollout's place in the schedule (the `Ticket` of `headway.stages`)."""

    index: int
    group: int
    member: int
    lane: int
    version: int
    started_s: float
    evaluation: bool = False
    ref: Reference = None
    receipt: Receipt | None = None
    outcome: Outcome | None = None
    reward: float | None = None

    @property
    def oldest_version(self) -> int:
        """The version of the rollout's oldest token (of its start, while nothing is known of its tokens)."""
        runs = self.receipt.version_runs if self.receipt else ()
        return min((run.version for run in runs), default=self.version)


@dataclass(slots=True, eq=False)
class Group:
    """The rollouts of one prompt, alive from the start of its first member until it is taken or failed."""

    index: int
    size: int
    members: list[RolloutTicket] = field(default_factory=list)
    num_finished: int = 0

    @property
    def scored(self) -> list[RolloutTicket]:
        return [ticket for ticket in self.members if ticket.outcome == "scored"]


@dataclass(slots=True)
class Evaluation:
    """Held-out prompts answered greedily under one version; publishing waits until the last is scored."""

    version: int
    size: int
    num_started: int = 0
    rewards: list[float | None] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.rewards) == self.size


@dataclass(frozen=True, slots=True)
class Settings:
    """The sizes of a run. `num_groups`: how many groups the data hold (None: no end)."""

    lanes: int
    batch_size: int
    group_size: int = 1
    steps: int = 1
    num_groups: int | None = None
    evaluation_size: int = 0
    evaluate_every: int = 0
    save_every: int = 0

    @property
    def groups_per_batch(self) -> int:
        return self.batch_size // self.group_size


class Ledger:
    """The account of one run.

    settings: its sizes; now: the clock; changed: called whenever a report arrives; trace: told of every transition;
    progress: `self.progress()` of a run that this one resumes; pass_rates: given, mastered prompts are left out.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        now: Callable[[], float],
        changed: Callable[[], object],
        trace: Trace,
        progress: Mapping[str, Any] | None = None,
        pass_rates: PassRates | None = None,
    ) -> None:
        self.settings = settings
        self._pass_rates = pass_rates
        self._now, self._changed, self._trace = now, changed, trace
        self.trained = self.published = self.saved = 0
        self.groups_started = self.groups_released = 0
        self.rollouts_started = 0
        self.running: dict[int, RolloutTicket] = {}
        self.scoring: dict[int, RolloutTicket] = {}
        self.active: dict[int, Group] = {}
        self.ready: list[tuple[float, int]] = []
        self.idle_lanes = list(range(settings.lanes))
        self.batch: list[Group] | None = None
        self.unpublished: Reference = None
        self.publishing = self.saving = False
        self.evaluation: Evaluation | None = None
        self._open_group: Group | None = None
        self._next_group = 0
        self._watermark = 0
        self._resolved_above: set[int] = set()
        self._evaluated_version: int | None = None
        self._reports: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        if progress:
            self._resume(progress)
        self._open_due_evaluation()

    def _resume(self, progress: Mapping[str, Any]) -> None:
        """Groups that were started but not resolved are started again: counters begin where the resolved ones end.

        A version is saved before it is evaluated to the end, so an evaluation that is due then is held (again).
        """
        self.trained = self.published = self.saved = progress["version"]
        self._watermark = self._next_group = progress["watermark"]
        self._resolved_above = set(progress["resolved_above"])
        self.groups_started = self._watermark + len(self._resolved_above)
        self.groups_released = progress["groups_released"]
        self.rollouts_started = self.groups_started * self.settings.group_size
        if self._pass_rates:
            self._pass_rates.resume(progress.get("pass_rates", {}))
        self._skip_ahead()

    # ---- derived

    @property
    def exhausted(self) -> bool:
        """No group is left to start."""
        return self._open_group is None and self._data_ended

    @property
    def _data_ended(self) -> bool:
        last = self.settings.num_groups
        mastered = self._pass_rates is not None and self._pass_rates.all_retired
        return mastered or (last is not None and self._next_group >= last)

    @property
    def steps_done(self) -> bool:
        """Every step is published, or the data and all that came of them are used up."""
        nothing_left = self.exhausted and not self.active and not self.trainer_busy
        return self.published >= self.settings.steps or nothing_left

    @property
    def done(self) -> bool:
        """All steps are done, and so are the last checkpoint and the last evaluation."""
        return self.steps_done and self.evaluation is None and not self.save_due and not self.saving

    @property
    def trainer_busy(self) -> bool:
        """From the moment a batch is taken until its weights are published, and while they are written to disk."""
        return self.batch is not None or self.saving

    @property
    def group_open(self) -> bool:
        """A group has started whose other members still wait for a lane."""
        return self._open_group is not None

    def lag(self, ticket: RolloutTicket) -> int:
        """Of a rollout: `trained` minus the version of its oldest token."""
        return self.trained - ticket.oldest_version

    @property
    def save_due(self) -> bool:
        """The newest weights are to be checkpointed: every so often, after the last step, at the end of the data."""
        every = self.settings.save_every
        last = self.trained >= self.settings.steps or (self.exhausted and not self.active)
        return self.trained > self.saved and (last or (every > 0 and self.trained % every == 0))

    def progress(self) -> dict[str, Any]:
        """What a resume needs: every group below the watermark, and those listed above it, are trained or released."""
        return {
            "version": self.trained,
            "batch_size": self.settings.batch_size,
            "group_size": self.settings.group_size,
            "watermark": self._watermark,
            "resolved_above": sorted(self._resolved_above),
            "groups_released": self.groups_released,
            **({"pass_rates": self._pass_rates.progress()} if self._pass_rates else {}),
        }

    # ---- reports, in any order within an instant

    def report_generated(self, ticket: RolloutTicket, generated: Generated) -> None:
        self._report(_GENERATED, ticket.index, self._generated, ticket, generated)

    def report_scored(self, ticket: RolloutTicket, scored: Scored) -> None:
        self._report(_SCORED, ticket.index, self._scored, ticket, scored)

    def report_trained(self, weights: Reference, metrics: Mapping[str, Any]) -> None:
        self._report(_TRAINED, 0, self._trained, weights, metrics)

    def report_published(self) -> None:
        self._report(_PUBLISHED, 0, self._published)

    def report_saved(self) -> None:
        self._report(_SAVED, 0, self._saved)

    def _report(self, rank: int, index: int, apply: Callable[..., None], *what: Any) -> None:
        self._reports.append((self._now(), rank, index, apply, what))
        self._changed()

    def settle(self) -> None:
        """Apply what was reported: by time, then finishes before train ends, then in order of start."""
        reports, self._reports = self._reports, []
        for at_s, _, _, apply, what in sorted(reports, key=lambda report: report[:3]):
            apply(at_s, *what)
        self._open_due_evaluation()

    def _generated(self, at_s: float, ticket: RolloutTicket, generated: Generated) -> None:
        del self.running[ticket.index]
        self.scoring[ticket.index] = ticket
        heapq.heappush(self.idle_lanes, ticket.lane)
        ticket.ref, receipt = generated.ref, generated.receipt
        ticket.receipt = receipt
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
        )

    def _scored(self, at_s: float, ticket: RolloutTicket, scored: Scored) -> None:
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
        if group.num_finished < group.size:
            return
        if len(group.scored) >= min(2, group.size):
            insort(self.ready, (at_s, group.index))
        else:
            self._fail(at_s, group, f"{len(group.scored)} of its {group.size} rollouts were scored")

    def _fail(self, at_s: float, group: Group, reason: str) -> None:
        """A group that can't be trained gives its slots back: otherwise throughput would decay with every failure."""
        del self.active[group.index]
        self.groups_released += 1
        self._resolve(group.index)
        receipt = group.members[0].receipt
        self._trace.emit("failed", at_s, group=group.index, prompt=receipt and receipt.prompt_uid, reason=reason)

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

    def _trained(self, at_s: float, weights: Reference, metrics: Mapping[str, Any]) -> None:
        assert self.batch is not None, "a train step ended that had taken no batch"
        for group in self.batch:
            self._resolve(group.index)
            self._count_right_answers(at_s, group)
        self._skip_ahead()
        self.trained += 1
        self.unpublished = weights
        self._trace.emit("trained", at_s, version=self.trained, metrics=dict(metrics))

    def _published(self, at_s: float) -> None:
        self.published = self.trained
        self.publishing, self.batch = False, None
        self._trace.emit("published", at_s, version=self.published)

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
            self._evaluated_version = self.published
            self.evaluation = Evaluation(self.published, self.settings.evaluation_size)

    # ---- decisions, in the order the loop takes them

    def take(self, groups: list[Group]) -> list[Group]:
        """The idle trainer takes these groups as a batch; their lag is fixed here."""
        taken = {group.index for group in groups}
        self.ready = [entry for entry in self.ready if entry[1] not in taken]
        for group in groups:
            del self.active[group.index]
        self.batch = groups
        rollouts = [ticket for group in groups for ticket in group.scored]
        self._trace.emit(
            "taken",
            self._now(),
            version=self.trained,
            groups=[group.index for group in groups],
            rollouts=[ticket.index for ticket in rollouts],
            lags=[self.lag(ticket) for ticket in rollouts],
            token_lag=self._token_lag(rollouts),
        )
        return groups

    def _token_lag(self, rollouts: list[RolloutTicket]) -> float:
        runs = [run for ticket in rollouts if ticket.receipt for run in ticket.receipt.version_runs]
        num_tokens = sum(run.num_tokens for run in runs)
        return sum((self.trained - run.version) * run.num_tokens for run in runs) / num_tokens if num_tokens else 0.0

    def publish(self) -> Reference:
        """The newest weights leave the trainer."""
        weights, self.unpublished = self.unpublished, None
        self.publishing = True
        self._trace.emit("publishing", self._now(), version=self.trained)
        return weights

    def save(self) -> dict[str, Any]:
        """The published weights go to disk, with this account of the run; no batch is taken meanwhile."""
        self.saved, self.saving = self.published, True
        self._trace.emit("saving", self._now(), version=self.saved)
        return self.progress()

    def evaluate(self) -> RolloutTicket:
        """Lend the first free lane to the open evaluation. It takes no slot and is outside every count."""
        assert self.evaluation is not None, "no evaluation is open"
        member = self.evaluation.num_started
        self.evaluation.num_started += 1
        index = -1 - member  # rollouts that are trained count from 0 up
        return self._hand_over(index, group=member, member=0, evaluation=True)

    def start(self) -> RolloutTicket:
        """Hand the first free lane the next member of the open group, or the first one of a new group."""
        group = self._open_group or self._new_group()
        ticket = self._hand_over(self.rollouts_started, group=group.index, member=len(group.members))
        self.rollouts_started += 1
        group.members.append(ticket)
        self._open_group = group if len(group.members) < group.size else None
        return ticket

    def _new_group(self) -> Group:
        group = self.active[self._next_group] = Group(self._next_group, self.settings.group_size)
        self.groups_started += 1
        self._next_group += 1
        self._skip_ahead()
        return group

    def _skip_ahead(self) -> None:
        """To the next group that has to be trained: past those that are resolved, and those whose prompt is retired."""
        while not self._data_ended:
            if self._next_group not in self._resolved_above:
                if self._pass_rates is None or not self._pass_rates.retired(self._next_group):
                    return
                self._leave_out(self._next_group)
            self._next_group += 1

    def _leave_out(self, group: int) -> None:
        """Started and released at once, so that it holds no slot."""
        self.groups_started += 1
        self.groups_released += 1
        self._resolve(group)

    def _hand_over(self, index: int, *, group: int, member: int, evaluation: bool = False) -> RolloutTicket:
        ticket = RolloutTicket(
            index=index,
            group=group,
            member=member,
            lane=heapq.heappop(self.idle_lanes),
            version=self.published,
            started_s=self._now(),
            evaluation=evaluation,
        )
        self.running[index] = ticket
        self._trace.emit(
            "started",
            ticket.started_s,
            rollout=ticket.index,
            group=ticket.group,
            member=ticket.member,
            lane=ticket.lane,
            version=ticket.version,
            evaluation=ticket.evaluation,
        )
        return ticket
