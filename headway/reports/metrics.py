"""One row of figures per train step, joined from the events of the trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, TypeGuard

from headway.trace import Event, open_lines

COUNTED = {
    "dropped": "dropped_groups",
    "filtered": "filtered_groups",
    "failed": "failed_groups",
    "restarted": "restarted_groups",
    "paused": "paused_rollouts",
    "aborted": "aborted_rollouts",
    "lost": "lost_rollouts",
}
"""Events that a step's row counts, since the step before: kind -> name. Beside them, interrupted_rollouts."""


class StepMetrics:
    """A listener that hands `write` one flat row for every train step (and one for every evaluation).

    Rows of steps: version (the new one), at_s, step_s (since the batch before was trained), lag_mean, lag_max,
    token_lag, over_max_lag (rollouts whose lag is above schedule.max_lag, when that is set), generated_tokens_per_s and
    trained_tokens_per_s (since the step before), the mean lengths of `_Lengths`, counts of what befell other rollouts
    and groups (COUNTED; absent where it is nothing), and whatever the train step reported by name.
    Rows of evaluations: version, at_s, evaluated (prompts scored), greedy_reward, greedy_accuracy.
    """

    def __init__(self, write: Callable[[dict[str, Any]], object]) -> None:
        self._write = write
        self._max_lag: int | None = None
        self._forget(0.0)

    def _forget(self, at_s: float) -> None:
        """A resume loses what was in flight."""
        self._last_s = at_s
        self._generated_tokens = 0.0
        self._taken: Event | None = None
        self._tokens: dict[int, float] = {}
        self._answers: set[int] = set()
        self._counts: dict[str, int] = {}
        self._lengths = _Lengths()

    def __call__(self, event: Event) -> None:
        if event.kind in COUNTED:
            self._count(COUNTED[event.kind])
        act = getattr(self, f"_on_{event.kind}", None)
        if act:
            act(event)

    def _count(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1

    def _on_run(self, event: Event) -> None:
        self._max_lag = event["max_lag"]
        self._forget(event.at_s)

    def _on_started(self, event: Event) -> None:
        if event["evaluation"]:
            self._answers.add(event["rollout"])

    def _on_restored(self, event: Event) -> None:
        self._tokens[event["rollout"]] = event["tokens"]

    def _on_paused(self, event: Event) -> None:
        self._sampled(event)

    def _on_generated(self, event: Event) -> None:
        rollout = event["rollout"]
        self._sampled(event)
        if rollout in self._answers:
            self._answers.discard(rollout)
            del self._tokens[rollout]
            return
        self._lengths.add("generated", event["tokens"])
        if event.fields.get("finish") == "interrupted":
            self._count("interrupted_rollouts")
            self._lengths.add("interrupted", event["tokens"])

    def _on_aborted(self, event: Event) -> None:
        self._sampled(event)
        del self._tokens[event["rollout"]]

    def _on_lost(self, event: Event) -> None:
        self._tokens.pop(event["rollout"], None)

    def _sampled(self, event: Event) -> None:
        """All that the rollout has come to; what is new of it was sampled since it was last heard of."""
        rollout = event["rollout"]
        self._generated_tokens += event["tokens"] - self._tokens.get(rollout, 0.0)
        self._tokens[rollout] = event["tokens"]

    def _on_failed(self, event: Event) -> None:
        self._known(event)

    def _on_filtered(self, event: Event) -> None:
        self._known(event)

    def _on_dropped(self, event: Event) -> None:
        for tokens in self._known(event):
            self._lengths.add("dropped", tokens)

    def _on_taken(self, event: Event) -> None:
        self._taken = event
        for tokens in self._known(event):
            self._lengths.add("trained", tokens)

    def _known(self, event: Event) -> list[float]:
        """The lengths of the event's rollouts, which are now forgotten."""
        lengths = [self._tokens.pop(rollout, None) for rollout in event.fields.get("rollouts", ())]
        return [tokens for tokens in lengths if tokens is not None]

    def _on_trained(self, event: Event) -> None:
        self._write(self._step_row(event))
        self._last_s, self._generated_tokens = event.at_s, 0.0
        self._counts.clear()
        self._lengths.next_step()

    def _on_evaluated(self, event: Event) -> None:
        self._write(_evaluation_row(event))

    def _step_row(self, trained: Event) -> dict[str, Any]:
        assert self._taken is not None, "a step was trained that had taken no batch"
        lags, metrics = self._taken["lags"], trained["metrics"]
        step_s = trained.at_s - self._last_s
        row = {
            "version": trained["version"],
            "at_s": trained.at_s,
            "step_s": step_s,
            "lag_mean": fmean(lags) if lags else 0.0,
            "lag_max": max(lags, default=0),
            "token_lag": self._taken["token_lag"],
            "generated_tokens_per_s": self._generated_tokens / step_s if step_s else 0.0,
            **self._lengths.row(),
            **self._counts,
        }
        if self._max_lag is not None:
            row["over_max_lag"] = sum(lag > self._max_lag for lag in lags)
        if "trained_tokens" in metrics and step_s:
            row["trained_tokens_per_s"] = metrics["trained_tokens"] / step_s
        return {**row, **metrics}


class _Lengths:
    """Mean lengths in tokens of the rollouts that were generated (are whole), trained, dropped and interrupted.

    length_KIND is of those since the step before, length_KIND_so_far of all since the run began or was resumed; absent
    where there is none.
    """

    def __init__(self) -> None:
        self._of_step: dict[str, tuple[int, float]] = {}
        self._so_far: dict[str, tuple[int, float]] = {}

    def add(self, kind: str, tokens: float) -> None:
        for sums in (self._of_step, self._so_far):
            num, total = sums.get(kind, (0, 0.0))
            sums[kind] = num + 1, total + tokens

    def next_step(self) -> None:
        self._of_step.clear()

    def row(self) -> dict[str, float]:
        of_step = {f"length_{kind}": total / num for kind, (num, total) in self._of_step.items()}
        return of_step | {f"length_{kind}_so_far": total / num for kind, (num, total) in self._so_far.items()}


def _evaluation_row(event: Event) -> dict[str, Any]:
    return {
        "version": event["version"],
        "at_s": event.at_s,
        "evaluated": event["num"],
        "greedy_reward": event["mean_reward"],
        "greedy_accuracy": event["num_correct"] / event["num"] if event["num"] else None,
    }


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a figure of a row is one: finite, and no flag."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class JsonLines:
    """Appends each row to a file as one JSON object a line, flushed at once."""

    def __init__(self, path: Path) -> None:
        self._file = open_lines(path)

    def __call__(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
