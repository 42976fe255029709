"""Was a scenario played by the rules? The account of its run, kept again from its trace and its checkpoints alone.

Nothing of `headway.schedule` is used here: what must hold is said a second time, so that a mistake there is seen.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from headway.simulate.faults import Scenario
from headway.simulate.lives import History, Life, Saved
from headway.trace import Event

Runs = tuple[tuple[int, float], ...]
"""(version, tokens) in order of sampling."""

_ALMOST = 1e-6
"""Lengths in units of 0.1 do not add up exactly."""

_AT_REST = ("paused", "whole", "finished", "thrown away")
"""States of an answer that holds no lane."""

MAX_PROBLEMS = 20


@dataclass(slots=True, eq=False)
class Answer:
    """A member of a group that has begun.

    since_s: when it was last handed to a lane; began: the tokens it had then; may_go_on: it has paused, and new weights
    are out, or it comes from a checkpoint; doomed: under older weights where none may go on, so it begins again unless
    it was interrupted at the same moment.
    """

    index: int
    group: int
    member: int
    state: Literal["in lane", "paused", "whole", "finished", "thrown away"]
    version: int
    since_s: float = 0.0
    runs: Runs = ()
    began: float = 0.0
    outcome: str | None = None
    reward: float | None = None
    may_go_on: bool = False
    doomed: bool = False

    @property
    def tokens(self) -> float:
        return sum(tokens for _, tokens in self.runs)

    @property
    def oldest(self) -> int:
        return min((self.version if version < 0 else version for version, _ in self.runs), default=self.version)


@dataclass
class Lineage:
    """What stands in the line of checkpoints that leads to the newest weights.

    opened: group -> its number in order of start; answers: of the groups that are neither trained nor released, the
    members that have begun; fates: what became of the others.
    """

    opened: dict[int, int] = field(default_factory=dict)
    answers: dict[int, dict[int, Answer]] = field(default_factory=dict)
    fates: dict[int, str] = field(default_factory=dict)
    trained: int = 0
    published: int = 0
    evaluated: set[int] = field(default_factory=set)
    saved_s: float = 0.0

    @property
    def num_released(self) -> int:
        return sum(fate != "trained" for fate in self.fates.values())


def problems(scenario: Scenario, history: History) -> list[str]:
    """All that the run did and must not, or did not and must; each says in which life and at which event."""
    audit = _read(scenario, history)
    if len(audit.found) < MAX_PROBLEMS:
        audit.sum_up()
    return audit.found[:MAX_PROBLEMS]


def kept_fates(scenario: Scenario, history: History) -> dict[int, str]:
    """Group -> `trained`, `failed`, `dropped` or `filtered`, of all that the newest weights stem from."""
    return _read(scenario, history).lineage.fates


def _read(scenario: Scenario, history: History) -> _Audit:
    """All lives, or those up to the one in which MAX_PROBLEMS are found."""
    audit = _Audit(scenario, history)
    for number, life in enumerate(history.lives):
        if len(audit.found) < MAX_PROBLEMS:
            audit.read(number, life)
    return audit


class _Audit:
    """The account as far as it has been read. found: what was wrong, in words."""

    def __init__(self, scenario: Scenario, history: History) -> None:
        self.scenario, self.history = scenario, history
        self.schedule = scenario.config.schedule
        self.size = scenario.groups_per_batch
        self.ahead = math.floor(round(self.schedule.run_ahead * self.size, 6))
        self.found: list[str] = []
        self.lineage = Lineage()
        self.saved: dict[tuple[int, int], Lineage] = {}
        self._whole = {(saved.life, saved.num_events) for saved in history.disk}
        self._where = ""

    def wrong(self, what: str) -> None:
        self.found.append(f"{self._where}: {what}")

    # ---- lives

    def read(self, number: int, life: Life) -> None:
        self._where = f"life {number}"
        self.lineage = self._inherited(life)
        self.lanes: dict[int, int] = {}
        self.live: dict[int, Answer] = {}
        self.lost: dict[tuple[int, int], int] = {}
        self.asked: dict[int, int] = {}
        self.answered: set[int] = set()  # versions whose evaluation has ended in this life
        self.batch: list[int] | None = None
        self.publishing = self.saving = self.ended = False
        self._begin(life.began_from)
        for position, event in enumerate(life.events, 1):
            if position > 1 and event.at_s != life.events[position - 2].at_s:
                self._end_of_instant(life.events[position - 2])
            self._where = f"life {number}, event {position} ({event.kind} at {event.at_s:g})"
            getattr(self, f"_on_{event.kind}")(event)
            if (number, position) in self._whole:
                self.saved[number, position] = copy.deepcopy(self.lineage)
            if len(self.found) >= MAX_PROBLEMS:
                return
        self._end_of_life(number, life)

    def _inherited(self, life: Life) -> Lineage:
        saved = life.began_from
        return copy.deepcopy(self.saved[saved.life, saved.num_events]) if saved else Lineage()

    def _begin(self, saved: Saved | None) -> None:
        """What was in flight is in the checkpoint, as far as it had come."""
        restored = {(r.group, r.member): r for r in saved.restored} if saved else {}
        self.restored = {
            key: tuple((run.version, run.num_tokens) for run in rollout.generated.receipt.version_runs)
            for key, rollout in restored.items()
        }
        for answers in self.lineage.answers.values():
            for answer in list(answers.values()):
                key = (answer.group, answer.member)
                if key not in restored:
                    self._not_kept(answer)
                    del answers[answer.member]
                elif not (_goes_on(answer.runs, self.restored[key]) or self.scenario.reads_late):
                    self.wrong(f"{_name(answer)} was saved as {self.restored[key]}, and had come to {answer.runs}")

    def _not_kept(self, answer: Answer) -> None:
        """A rollout in a lane may have had no token yet; one that is read late may have been lost meanwhile."""
        kinds = {fault.kind for fault in self.scenario.faults}
        lost_meanwhile = self.scenario.reads_late and kinds & {"engine crash", "lost rollout"}
        if answer.doomed or answer.outcome == "lost" or lost_meanwhile:
            return
        hangs = "hung rollout" in kinds
        sampled = answer.state == "in lane" and answer.since_s < self.lineage.saved_s
        if (answer.tokens or sampled) and not hangs:
            self.wrong(f"the tokens of {_name(answer)} are not in the checkpoint")

    def _end_of_life(self, number: int, life: Life) -> None:
        self._where = f"life {number}"
        if life.error:
            self.wrong(f"it broke off: {life.error}")
        elif life.died_of is None and not self.ended:
            self.wrong("it is over, and no event says so")
        if life.most_in_flight > self.scenario.config.generate.lanes:
            self.wrong(f"{life.most_in_flight} rollouts were in flight at once")

    # ---- rollouts

    def _on_run(self, event: Event) -> None:
        if event["version"] != self.lineage.trained:
            self.wrong(f"it begins with version {event['version']}, and the checkpoint had {self.lineage.trained}")

    def _on_restored(self, event: Event) -> None:
        group, member = event["group"], event["member"]
        runs = self.restored.pop((group, member), None)
        if runs is None or group not in self.lineage.answers:
            self.wrong(f"rollout ({group}, {member}) stands in no checkpoint, or its group is over")
            return
        before = self.lineage.answers[group].get(member)
        answer = Answer(event["rollout"], group, member, "paused", before.version if before else 0, event.at_s, runs)
        answer.outcome, answer.may_go_on = event["outcome"], True
        if answer.outcome is not None:
            answer.state = "finished"
            answer.reward = self._said(group, member) if answer.outcome == "scored" else None
        if before and before.state == "finished" and (before.outcome, before.reward) != (answer.outcome, answer.reward):
            self.wrong(f"{_name(answer)} had the outcome {before.outcome}, {before.reward}")
        self.lineage.answers[group][member] = self.live[answer.index] = answer

    def _said(self, group: int, member: int) -> float | None:
        return self.scenario.reward(group, member)

    def _on_started(self, event: Event) -> None:
        self._hold_lane(event)
        if event["evaluation"]:
            self.asked[event["rollout"]] = event["group"]
            return
        self._may_run_now()
        group, member = event["group"], event["member"]
        if group not in self.lineage.opened:
            self._open(group)
        if group not in self.lineage.answers:
            self.wrong(f"group {group} was {self.lineage.fates.get(group)} before")
            return
        before = self.lineage.answers[group].get(member)
        if before and before.doomed:
            self._throw_away(before)
        elif before:
            self.wrong(f"{_name(before)} ({before.state}) is generated again")
        answer = Answer(event["rollout"], group, member, "in lane", event["version"], event.at_s)
        if answer.index in self.live:
            self.wrong(f"the number {answer.index} is given twice")
        self.lineage.answers[group][member] = self.live[answer.index] = answer

    def _open(self, group: int) -> None:
        line = self.lineage
        held, admitted = len(line.opened) - line.num_released, (line.published + 1) * self.size + self.ahead
        if held >= admitted:
            self.wrong(f"group {group} starts while {held} groups hold slots, and {admitted} are admitted")
        next_group = next(number for number in range(len(line.opened) + 1) if number not in line.opened)
        if group != next_group or (self.scenario.num_groups is not None and group >= self.scenario.num_groups):
            self.wrong(f"group {group} starts, and {next_group} is the next")
        line.opened[group] = max(line.opened.values(), default=-1) + 1
        line.answers[group] = {}

    def _on_resumed(self, event: Event) -> None:
        self._hold_lane(event)
        self._may_run_now()
        answer = self.live.get(event["rollout"])
        if answer is None or answer.state != "paused":
            self.wrong(f"rollout {event['rollout']} goes on, and had not paused")
            return
        answer.state, answer.began = "in lane", answer.tokens
        answer.version, answer.since_s = event["version"], event.at_s

    def _hold_lane(self, event: Event) -> None:
        lane = event["lane"]
        if lane in self.lanes or not 0 <= lane < self.scenario.config.generate.lanes:
            self.wrong(f"lane {lane} is not free")
        if event["version"] != self.lineage.published:
            self.wrong(f"it starts under version {event['version']}, and {self.lineage.published} is published")
        self.lanes[lane] = event["rollout"]

    def _may_run_now(self) -> None:
        if not self.schedule.overlap and self.batch is not None:
            self.wrong("a rollout starts beside a train step")
        if self.schedule.in_flight == "drain" and self.lineage.trained > self.lineage.published:
            self.wrong("a rollout starts while lanes run dry")

    def _free_lane(self, event: Event) -> None:
        if self.lanes.pop(event["lane"], None) != event["rollout"]:
            self.wrong(f"lane {event['lane']} was not held by rollout {event['rollout']}")

    def _on_generated(self, event: Event) -> None:
        self._free_lane(event)
        runs = tuple((version, tokens) for version, tokens in event["versions"])
        if event["rollout"] < 0:
            if any(version != self.lineage.published for version, _ in runs):
                self.wrong(f"an answer under evaluation was sampled by versions {runs}")
            return
        answer = self._ends(event, "in lane")
        if answer is None:
            return
        self._sampled(answer, runs, event["tokens"])
        answer.state = "whole"
        whole = self.scenario.length(answer.group * self.scenario.num_members + answer.member)
        if event["finish"] == "stop" and abs(answer.tokens - whole) > _ALMOST:
            self.wrong(f"{_name(answer)} has {answer.tokens:g} tokens of {whole:g}")
        if event["finish"] == "interrupted" and event.fields.get("why") not in ("max_lag", "deadline"):
            self.wrong(f"{_name(answer)} was interrupted without a reason")
        kinds = {fault.kind for fault in self.scenario.faults}
        early = kinds & {"lost sync", "silent engine"}  # weights arrive, their word does not
        if self.schedule.in_flight == "restart" and sum(num > _ALMOST for _, num in runs) > 1 and not early:
            self.wrong(f"{_name(answer)} outlived new weights: {runs}")

    def _ends(self, event: Event, *states: str) -> Answer | None:
        """The rollout that was in one of these states."""
        answer = self.live.get(event["rollout"])
        if answer is None or answer.state not in states:
            self.wrong(f"rollout {event['rollout']} was {answer.state if answer else 'never there'}")
            return None
        return answer

    def _sampled(self, answer: Answer, runs: Runs, tokens: float) -> None:
        """What is there goes on from what was there, under versions that only rise."""
        versions = [version for version, _ in runs]
        newest = self.lineage.trained if self.publishing else self.lineage.published
        if versions != sorted(set(versions)) or (versions and versions[-1] > newest):
            self.wrong(f"{_name(answer)} was sampled by versions {versions} at version {newest}")
        if not _goes_on(answer.runs, runs):
            self.wrong(f"{_name(answer)} came to {answer.runs}, and then to {runs}")
        if abs(sum(length for _, length in runs) - tokens) > _ALMOST:
            self.wrong(f"{_name(answer)} has {tokens:g} tokens, and its versions are {runs}")
        answer.runs = runs
        self._in_budget(answer, tokens)

    def _in_budget(self, answer: Answer, tokens: float) -> None:
        budget = self.schedule.iteration_tokens
        if budget is not None and tokens - answer.began > budget + _ALMOST:
            self.wrong(f"{_name(answer)} sampled {tokens - answer.began:g} tokens at a stretch")

    def _on_paused(self, event: Event) -> None:
        self._free_lane(event)
        answer = self._ends(event, "in lane")
        if answer is None:
            return
        if event["tokens"] < answer.tokens - _ALMOST:
            self.wrong(f"{_name(answer)} had {answer.tokens:g} tokens and has {event['tokens']:g}")
        self._in_budget(answer, event["tokens"])
        answer.state, answer.may_go_on = "paused", False
        more = event["tokens"] - answer.tokens
        if more > 0:
            answer.runs = (*answer.runs, (-1, more))  # the trace does not say of which version

    def _on_aborted(self, event: Event) -> None:
        if event["lane"] is not None:
            self._free_lane(event)
        answer = self._ends(event, *(("in lane", "thrown away") if event["lane"] is not None else _AT_REST))
        if answer is None:
            return
        if answer.state != "thrown away" and not self._may_abort(answer, event["reason"]):
            self.wrong(f"{_name(answer)} was thrown away: {event['reason']}")
        self._forget(answer)

    def _may_abort(self, answer: Answer, reason: str) -> bool:
        if reason == "steps done":
            return self.lineage.published >= self.scenario.config.run.steps
        if reason == "new weights":
            return answer.doomed
        if reason in ("redundant", "dropped", "filtered", "failed"):
            return answer.state != "finished" and self._complete(answer.group)
        return False

    def _forget(self, answer: Answer) -> None:
        del self.live[answer.index]
        answers = self.lineage.answers.get(answer.group, {})
        if answers.get(answer.member) is answer:
            del answers[answer.member]

    def _throw_away(self, answer: Answer) -> None:
        """It is wanted no more; one in a lane is still to end. Those at rest say so by an event of their own."""
        if answer.state == "in lane":
            answer.state = "thrown away"
            answers = self.lineage.answers.get(answer.group, {})
            if answers.get(answer.member) is answer:
                del answers[answer.member]

    def _on_lost(self, event: Event) -> None:
        self._free_lane(event)
        if event["rollout"] < 0:
            return
        answer = self._ends(event, "in lane", "thrown away")
        if answer is None:
            return
        self._forget(answer)
        unwanted = answer.doomed or self.lineage.published >= self.scenario.config.run.steps
        if answer.state == "thrown away" or (unwanted and not event["num"]):
            return
        key = (answer.group, answer.member)
        self.lost[key] = self.lost.get(key, 0) + 1
        if event["num"] != self.lost[key]:
            self.wrong(f"{_name(answer)} was lost for time {self.lost[key]}, and not {event['num']}")
        if self.lost[key] > self.schedule.max_lost:
            answer.state, answer.outcome, answer.runs = "finished", "lost", ()
            self.lineage.answers[answer.group][answer.member] = answer
            self._is_complete(answer.group)

    def _on_scored(self, event: Event) -> None:
        if event["rollout"] < 0:
            del self.asked[event["rollout"]]
            return
        answer = self._ends(event, "whole")
        if answer is None:
            return
        answer.state, answer.outcome, answer.reward = "finished", event["outcome"], event["reward"]
        if answer.reward is not None and answer.reward != self._said(answer.group, answer.member):
            self.wrong(f"{_name(answer)} has the reward {answer.reward:g} of another")
        self._is_complete(answer.group)

    def _is_complete(self, group: int) -> None:
        if self._complete(group) and self.schedule.surplus != "keep":
            for answer in list(self.lineage.answers[group].values()):
                self._throw_away(answer)

    # ---- groups

    def _finished(self, group: int) -> list[Answer]:
        return [answer for answer in self.lineage.answers[group].values() if answer.state == "finished"]

    def _trainable(self, group: int) -> list[Answer]:
        scored = [answer for answer in self._finished(group) if answer.outcome == "scored"]
        return sorted(scored, key=lambda answer: answer.member)

    def _complete(self, group: int) -> bool:
        enough = len(self._trainable(group)) >= self.schedule.group_size
        return enough or len(self._finished(group)) >= self.scenario.num_members

    def _ready(self, group: int) -> bool:
        return self._complete(group) and len(self._trainable(group)) >= min(2, self.schedule.group_size)

    def _on_restarted(self, event: Event) -> None:
        group = event["group"]
        if event["num"] > (self.schedule.max_restarts or 1) or "restart" not in self.schedule.stragglers:
            self.wrong(f"group {group} begins again for the {event['num']}th time")
        if self._complete(group):
            self.wrong(f"group {group} was finished, and begins again")
        for answer in list(self.lineage.answers[group].values()):
            self._throw_away(answer)
            if answer.state != "thrown away":
                answer.state = "thrown away"
                del self.lineage.answers[group][answer.member]

    def _on_failed(self, event: Event) -> None:
        group = event["group"]
        if self._is_active(group) and (not self._complete(group) or self._ready(group)):
            self.wrong(f"group {group} failed, and could be trained")
        self._released(event)

    def _on_dropped(self, event: Event) -> None:
        group = event["group"]
        if self._is_active(group) and not self._ready(group):
            self.wrong(f"group {group} was dropped, and is not ready")
        elif self._is_active(group):
            lag = self.lineage.trained - min(answer.oldest for answer in self._trainable(group))
            if lag != event["lag"] or self.schedule.max_lag is None or lag <= self.schedule.max_lag:
                self.wrong(f"group {group} was dropped at lag {event['lag']}; its lag is {lag}")
        self._released(event)

    def _on_filtered(self, event: Event) -> None:
        group = event["group"]
        if self._is_active(group) and not (self.schedule.dynamic_sampling and self._same_rewards(group)):
            self.wrong(f"group {group} was filtered, and its rewards differ")
        self._released(event)

    def _same_rewards(self, group: int) -> bool:
        return self._ready(group) and len({answer.reward for answer in self._trainable(group)}) == 1

    def _is_active(self, group: int) -> bool:
        return group in self.lineage.answers

    def _released(self, event: Event) -> None:
        if not event["reason"]:
            self.wrong(f"group {event['group']} is {event.kind} without a reason")
        self._resolve(event["group"], event.kind)

    def _resolve(self, group: int, fate: str) -> None:
        answers = self.lineage.answers.pop(group, None)
        if answers is None:
            self.wrong(f"group {group} is {fate}, and was {self.lineage.fates.get(group, 'never started')}")
            return
        self.lineage.fates[group] = fate
        for answer in answers.values():
            self._throw_away(answer)
            if answer.state == "finished":
                self.live.pop(answer.index, None)

    # ---- the trainer

    def _on_taken(self, event: Event) -> None:
        groups = event["groups"]
        if self.batch is not None or self.saving:
            self.wrong("the trainer takes a batch and is busy")
        if self._engine_is_needed():
            self.wrong("the trainer takes a batch during an evaluation, and the engine would sleep")
        if event["version"] != self.lineage.trained:
            self.wrong(f"it is taken at version {event['version']}, and {self.lineage.trained} is trained")
        unfit = [group for group in groups if not self._is_active(group) or not self._ready(group)]
        if unfit or len(set(groups)) < len(groups):
            self.wrong(f"groups {unfit or groups} are taken and not ready, or twice")
            groups = [group for group in dict.fromkeys(groups) if group not in unfit]
        else:
            self._batch_is_right(event)
        for group in groups:
            self._resolve(group, "trained")
        self.batch = groups

    def _batch_is_right(self, event: Event) -> None:
        groups = event["groups"]
        answers = [answer for group in groups for answer in self._trainable(group)]
        if [answer.index for answer in answers] != event["rollouts"]:
            self.wrong(f"it holds rollouts {event['rollouts']}, and not {[answer.index for answer in answers]}")
        lags = [self.lineage.trained - answer.oldest for answer in answers]
        if lags != event["lags"]:
            self.wrong(f"its lags are said to be {event['lags']}, and are {lags}")
        if abs(self._token_lag(answers) - event["token_lag"]) > _ALMOST:
            self.wrong(f"its lag by tokens is said to be {event['token_lag']}, and is {self._token_lag(answers)}")
        bound = self._bound()
        if bound is not None and max(lags, default=0) > bound:
            self.wrong(f"a rollout of lag {max(lags)} is trained, and the bound is {bound}")
        if self.schedule.dynamic_sampling:
            for group in filter(self._same_rewards, groups):
                self.wrong(f"group {group} is trained, and all its rewards are the same")
        self._size_is_right(groups)
        self._order_is_right(groups)

    def _token_lag(self, answers: list[Answer]) -> float:
        tokens = sum(answer.tokens for answer in answers)
        late = sum((self.lineage.trained - version) * num for answer in answers for version, num in answer.runs)
        return late / tokens if tokens else 0.0

    def _bound(self) -> int | None:
        """The smallest that is stated: of the order, and of dropping."""
        bounds = [self.schedule.max_lag] if "drop" in self.schedule.stragglers else []
        if self.ahead == 0:
            bounds.append(0)
        elif self.schedule.order != "finished":
            bounds.append(math.ceil((self.ahead + (self.schedule.window or 1) - 1) / self.size))
        return min((bound for bound in bounds if bound is not None), default=None)

    def _size_is_right(self, groups: list[int]) -> None:
        rest = len(self.lineage.opened) == self.scenario.num_groups and len(self.lineage.answers) == len(groups)
        if len(groups) != self.size and not (len(groups) < self.size and rest):
            self.wrong(f"a batch has {len(groups)} groups")

    def _order_is_right(self, groups: list[int]) -> None:
        if self.schedule.order == "finished":
            return
        window = self.schedule.window or 1  # that of one group is the order of start
        waiting = sorted(self.lineage.opened[group] for group in self.lineage.answers)
        orders = [self.lineage.opened[group] for group in groups]
        for order in sorted(orders) if window == 1 else orders:
            if order >= waiting[0] + window and len(groups) == self.size:
                self.wrong(f"start number {order} is trained while {waiting[0]} waits, and the window is {window}")
            waiting.remove(order)

    def _on_trained(self, event: Event) -> None:
        if self.batch is None or self.lineage.trained > self.lineage.published:
            self.wrong("a train step ends that had taken no batch")
        self.lineage.trained += 1
        if event["version"] != self.lineage.trained:
            self.wrong(f"version {event['version']} is trained after version {self.lineage.trained - 1}")

    def _on_publishing(self, event: Event) -> None:
        if event["version"] != self.lineage.trained or self.publishing:
            self.wrong(f"version {event['version']} is sent while version {self.lineage.trained} is the newest")
        if self.asked:
            self.wrong("new weights are sent during an evaluation")
        if self.schedule.in_flight == "drain" and self.lanes:
            self.wrong(f"new weights are sent while lanes {sorted(self.lanes)} are busy")
        self.publishing = True

    def _on_published(self, event: Event) -> None:
        self.lineage.published += 1
        if not self.publishing or not event["version"] == self.lineage.published == self.lineage.trained:
            self.wrong(f"version {event['version']} is published after version {self.lineage.published - 1}")
        self.batch, self.publishing = None, False
        for answer in list(self.live.values()):
            answer.may_go_on = True
            unfinished = answer.state in ("in lane", "paused")
            answer.doomed = unfinished and self.schedule.in_flight == "restart" and answer.oldest < event["version"]

    def _on_saving(self, event: Event) -> None:
        if self.batch is not None or self.saving or event["version"] != self.lineage.published:
            self.wrong(f"version {event['version']} is saved while the trainer is busy")
        self.saving, self.lineage.saved_s = True, event.at_s

    def _on_saved(self, event: Event) -> None:
        self.saving = False

    def _on_evaluated(self, event: Event) -> None:
        size = self.scenario.config.evaluate.size
        if event["version"] != self.lineage.published or event["num"] + event["num_unscored"] != size:
            self.wrong(f"an evaluation of version {event['version']} had {event['num']} answers of {size}")
        self.lineage.evaluated.add(event["version"])
        self.answered.add(event["version"])
        self.asked.clear()

    def _engine_is_needed(self) -> bool:
        """An evaluation is under way, and the engine would sleep while a batch is trained."""
        config, version = self.scenario.config, self.lineage.published
        every = config.evaluate.every
        due = bool(config.evaluate.size) and (version == 0 or (every > 0 and version % every == 0))
        return config.generate.sleep != "none" and due and version not in self.answered

    def _on_ended(self, event: Event) -> None:
        self.ended = True

    # ---- nothing stands idle

    def _end_of_instant(self, last: Event) -> None:
        """Nothing more happens now: whoever may work does."""
        line = self.lineage
        if line.published >= self.scenario.config.run.steps:
            return
        busy = self.batch is not None or self.saving or line.trained > line.published or self._engine_is_needed()
        num_ready = sum(map(self._ready, line.answers))
        if self.schedule.order == "finished" and num_ready >= self.size and not busy:
            self.wrong(f"afterwards the trainer is idle, and {num_ready} groups are ready")
        if len(self.lanes) < self.scenario.config.generate.lanes and not self._lanes_stand_still():
            for what in self._could_start():
                self.wrong(f"afterwards a lane is idle, and {what} could start")
                return

    def _lanes_stand_still(self) -> bool:
        if not self.schedule.overlap and self.batch is not None:
            return True
        return self.schedule.in_flight == "drain" and self.lineage.trained > self.lineage.published

    def _could_start(self) -> Iterator[str]:
        line = self.lineage
        for group, answers in line.answers.items():
            if not self._complete(group):
                for member in range(self.scenario.num_members):
                    if member not in answers:
                        yield f"member {member} of group {group}"
            yield from (_name(a) for a in answers.values() if a.state == "paused" and a.may_go_on)
        data_left = self.scenario.num_groups is None or len(line.opened) < self.scenario.num_groups
        if data_left and len(line.opened) - line.num_released < (line.published + 1) * self.size + self.ahead:
            yield "a new group"

    # ---- the whole run

    def sum_up(self) -> None:
        self._where = "in all"
        line, last = self.lineage, self.history.lives[-1]
        if last.error or not self.ended:
            return
        if self.scenario.drains:
            self._nothing_is_left()
        elif line.trained < self.scenario.config.run.steps and line.answers:
            self.wrong(f"{line.trained} steps were trained of {self.scenario.config.run.steps}")
        if line.trained and (not self.history.disk or self.history.disk[-1].progress["version"] != line.trained):
            self.wrong(f"version {line.trained} is the last one, and is in no checkpoint")
        if self.scenario.config.evaluate.size and line.published not in line.evaluated:
            self.wrong(f"version {line.published} is the last one, and was not evaluated")

    def _nothing_is_left(self) -> None:
        """Every prompt was trained or reported, once: a second time was said when it happened."""
        line, num_groups = self.lineage, self.scenario.num_groups or 0
        if missing := [group for group in range(num_groups) if group not in line.fates]:
            self.wrong(f"groups {missing} were neither trained nor reported")
        if self.scenario.decided_by_identity:
            for group, fate in line.fates.items():
                if fate != (due := _due_fate(self.scenario, group)):
                    self.wrong(f"group {group} is {fate}, and without faults it is {due}")


def _name(answer: Answer) -> str:
    return f"rollout {answer.index} (member {answer.member} of group {answer.group})"


def _goes_on(before: Runs, after: Runs) -> bool:
    """The tokens that were there are the first of those that are there. A version of -1 is not known."""
    position = 0.0
    spans = [(start, start + num, version) for version, num, start in _starts(after)]
    for version, num in before:
        position += num
        if version < 0 or num < 3 * _ALMOST:
            continue
        inside = [v for start, end, v in spans if start + _ALMOST < position and end > position - num + _ALMOST]
        if inside != [version]:
            return False
    return position <= sum(num for _, num in after) + _ALMOST


def _starts(runs: Runs) -> Iterator[tuple[int, float, float]]:
    start = 0.0
    for version, num in runs:
        yield version, num, start
        start += num


def _due_fate(scenario: Scenario, group: int) -> str:
    """What becomes of a group that depends on its own answers alone."""
    rewards = [scenario.reward(group, member) for member in range(scenario.config.schedule.group_size)]
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < min(2, len(rewards)):
        return "failed"
    return "filtered" if scenario.config.schedule.dynamic_sampling and len(set(scored)) == 1 else "trained"
