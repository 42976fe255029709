"""One row of figures per train step, joined from the events of the trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, TypeGuard

from headway.trace import Event, open_lines


class StepMetrics:
    """A listener that hands `write` one flat row for every train step (and one for every evaluation).

    Rows of steps: version (the new one), at_s, step_s (since the batch before was trained), lag_mean, lag_max,
    token_lag, reached_max_lag (rollouts whose lag reaches schedule.max_lag, when that is set), generated_tokens_per_s
    and trained_tokens_per_s (since the step before), and whatever the train step reported by name.
    Rows of evaluations: version, at_s, evaluated (prompts scored), greedy_reward, greedy_accuracy.
    """

    def __init__(self, write: Callable[[dict[str, Any]], object]) -> None:
        self._write = write
        self._max_lag: int | None = None
        self._last_s = 0.0
        self._generated_tokens = 0.0
        self._taken: Event | None = None

    def __call__(self, event: Event) -> None:
        if event.kind == "run":
            self._max_lag, self._last_s = event["max_lag"], event.at_s
            self._generated_tokens, self._taken = 0.0, None  # a resume loses what was in flight
        elif event.kind == "generated":
            self._generated_tokens += event["tokens"]
        elif event.kind == "taken":
            self._taken = event
        elif event.kind == "trained":
            self._write(self._step_row(event))
            self._last_s, self._generated_tokens = event.at_s, 0.0
        elif event.kind == "evaluated":
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
        }
        if self._max_lag is not None:
            row["reached_max_lag"] = sum(lag >= self._max_lag for lag in lags)
        if "trained_tokens" in metrics and step_s:
            row["trained_tokens_per_s"] = metrics["trained_tokens"] / step_s
        return {**row, **metrics}


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
