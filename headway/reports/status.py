"""What a run is doing now, and what it waits for: derived from the events of its trace alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from headway.reports.alarms import Alarm, Watch
from headway.reports.metrics import StepMetrics
from headway.reports.wording import duration
from headway.trace import Event

MAX_GROUPS_NAMED = 2
"""When no more groups than this are missing, the nearest to completion are named."""


class Status:
    """A listener that can say at any moment where the run stands.

    alarms: those that the newest train step raised; unsound: what objective.unsound overrides in this run.

    evaluation_size: how many answers an evaluation asks for, which no event says; None leaves it unsaid.
    now: the clock of `elapsed_s` and of "since", in seconds; only differences count.
    """

    def __init__(self, evaluation_size: int | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._evaluation_size, self._now = evaluation_size, now
        self._began_s = now()
        self._metrics = StepMetrics(self._keep_row)
        self._batch_size, self._group_size, self.num_steps = 1, 1, 0
        self._order = "finished"
        self.version = 0
        self.row: dict[str, Any] = {}
        self.unsound: list[str] = []
        self.alarms: list[Alarm] = []
        self._watch = Watch()
        self._forget_in_flight()

    def _forget_in_flight(self) -> None:
        self._generating: set[int] = set()
        self._paused: set[int] = set()
        self._scoring: set[int] = set()
        self._evaluated: set[int] = set()
        self._num_evaluated = 0
        self._answers: dict[int, int] = {}
        self._stage, self._since_s = "generating", self._now()

    def _keep_row(self, row: dict[str, Any]) -> None:
        if "step_s" in row:
            self.row = row
            self.alarms = self._watch.add(row, self._group_size)

    def __call__(self, event: Event) -> None:
        self._metrics(event)
        act = getattr(self, f"_on_{event.kind}", None)
        if act:
            act(event)

    def _on_run(self, event: Event) -> None:
        self._batch_size, self._group_size = event["batch_size"], event["group_size"]
        self.num_steps, self.version = event["steps"], event["version"]
        self._order = event.fields.get("order", "finished")
        self.unsound, self._watch = list(event.fields.get("unsound", ())), Watch()
        self._began_s = self._now()
        self._forget_in_flight()

    def _on_started(self, event: Event) -> None:
        self._generating.add(event["rollout"])
        if event["evaluation"]:
            self._evaluated.add(event["rollout"])
        else:
            self._answers.setdefault(event["group"], 0)

    def _on_resumed(self, event: Event) -> None:
        self._paused.discard(event["rollout"])
        self._on_started(event)

    def _on_restored(self, event: Event) -> None:
        if event["outcome"] is None:
            self._paused.add(event["rollout"])
        self._answers[event["group"]] = self._answers.get(event["group"], 0) + (event["outcome"] == "scored")

    def _on_generated(self, event: Event) -> None:
        self._generating.discard(event["rollout"])
        self._scoring.add(event["rollout"])

    def _on_paused(self, event: Event) -> None:
        self._generating.discard(event["rollout"])
        self._paused.add(event["rollout"])

    def _on_aborted(self, event: Event) -> None:
        for rollouts in (self._generating, self._paused, self._scoring):
            rollouts.discard(event["rollout"])

    def _on_lost(self, event: Event) -> None:
        self._generating.discard(event["rollout"])

    def _on_scored(self, event: Event) -> None:
        self._scoring.discard(event["rollout"])
        if event["rollout"] in self._evaluated:
            self._evaluated.discard(event["rollout"])
            self._num_evaluated += 1
        elif event["group"] in self._answers:
            self._answers[event["group"]] += 1

    def _on_evaluated(self, _: Event) -> None:
        self._num_evaluated = 0

    def _on_restarted(self, event: Event) -> None:
        self._answers[event["group"]] = 0

    def _on_failed(self, event: Event) -> None:
        self._answers.pop(event["group"], None)

    _on_dropped = _on_filtered = _on_failed

    def _on_taken(self, event: Event) -> None:
        for group in event["groups"]:
            self._answers.pop(group, None)
        self._enter("training")

    def _on_trained(self, event: Event) -> None:
        self.version = event["version"]
        self._enter("trained")

    def _on_publishing(self, _: Event) -> None:
        self._enter("publishing")

    def _on_published(self, _: Event) -> None:
        self._enter("generating")

    def _on_saving(self, _: Event) -> None:
        self._enter("saving")

    def _on_saved(self, _: Event) -> None:
        self._enter("generating")

    def _on_ended(self, event: Event) -> None:
        self._forget_in_flight()
        self._enter(f"ended: {event['reason']}")

    def _enter(self, stage: str) -> None:
        self._stage, self._since_s = stage, self._now()

    # ---- in words

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began (before it does: since this object was made)."""
        return self._now() - self._began_s

    def figures(self) -> str:
        """The newest step in numbers; what it did not report is left out."""
        return "  ".join([f"step {self.version}/{self.num_steps}", *_shown(self.row)])

    def details(self) -> str:
        """More of the newest step, where a line may be long."""
        return "  ".join(_detailed(self.row))

    def waiting(self) -> str:
        """What must happen for the next version to come out, and what is in flight meanwhile."""
        if self._stage.startswith("ended"):
            return self._stage
        return "; ".join(part for part in (self._evaluation(), self._trainer(), self._in_flight()) if part)

    def _trainer(self) -> str:
        since = duration(self._now() - self._since_s)
        if self._stage == "training":
            return f"training step {self.version + 1} for {since}"
        if self._stage == "publishing":
            return f"publishing version {self.version} for {since}"
        if self._stage == "saving":
            return f"saving version {self.version} for {since}"
        steps_done = self.version >= self.num_steps
        return "" if self._stage == "trained" or steps_done else self._missing()

    def _missing(self) -> str:
        """How much of the next batch is still to come. A group is there when all of its rollouts have been scored."""
        size = self._group_size
        needed = self._batch_size // size
        awaited = self._awaited(needed)
        missing = needed - sum(num >= size for num in awaited.values())
        if missing <= 0:
            return "taking a batch" if self._order != "window" else "waiting for the oldest groups"
        oldest = "oldest " if self._order == "started" else ""
        if size == 1:
            return f"waiting for {missing} of {needed} {oldest}rollouts"
        return f"waiting for {missing} of {needed} {oldest}groups{self._nearest(awaited, missing)}"

    def _awaited(self, needed: int) -> dict[int, int]:
        """Group -> its answers, of those that the next batch may be made of."""
        if self._order != "started":
            return self._answers
        return dict(islice(self._answers.items(), needed))

    def _nearest(self, awaited: dict[int, int], missing: int) -> str:
        if missing > MAX_GROUPS_NAMED:
            return ""
        open_groups = [(group, num) for group, num in awaited.items() if num < self._group_size]
        nearest = sorted(open_groups, key=lambda entry: (-entry[1], entry[0]))[:missing]
        named = ", ".join(f"group {group} has {num} of {self._group_size} answers" for group, num in nearest)
        return f" ({named})" if named else ""

    def _evaluation(self) -> str:
        if not self._evaluated and not self._num_evaluated:
            return ""
        who = f"version {self.version} waits for the evaluation" if self._stage == "trained" else "evaluation"
        size = f" of {self._evaluation_size}" if self._evaluation_size else ""
        return f"{who}: {self._num_evaluated}{size} answers"

    def _in_flight(self) -> str:
        num = len(self._generating - self._evaluated)
        num_scoring = len(self._scoring - self._evaluated)
        parts = [f"{num} rollout{'s' * (num != 1)} in flight"] if num else []
        parts += [f"{len(self._paused)} paused"] if self._paused else []
        return ", ".join(parts + ([f"{num_scoring} being scored"] if num_scoring else []))


def _shown(row: dict[str, Any]) -> list[str]:
    """A step's row as the progress line shows it."""
    parts: list[str] = []
    if row.get("reward_mean") is not None:
        parts.append(f"reward {row['reward_mean']:.3g}")
    if row.get("generated_tokens_per_s"):
        parts.append(f"{row['generated_tokens_per_s']:.0f} tok/s")
    if row.get("lag_mean") is not None:
        parts.append(f"lag {row['lag_mean']:.2g} (max {row['lag_max']})")
    if row.get("mismatch_kl_k3") is not None:
        parts.append(f"mismatch KL {row['mismatch_kl_k3']:.2g}")
    return parts


def _detailed(row: dict[str, Any]) -> list[str]:
    """What the mismatch costs, and what is left to explore."""
    parts: list[str] = []
    if row.get("canary_kl_k3") is not None:
        parts.append(f"numerics {row['canary_kl_k3']:.2g}")
    if row.get("ess_share") is not None:
        parts.append(f"ESS {100 * row['ess_share']:.0f} %")
    if row.get("entropy") is not None:
        parts.append(f"entropy {row['entropy']:.2g}")
    return parts
