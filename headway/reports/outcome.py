"""How a run came out, in a few lines and as `run.json`: reward, greedy accuracy with its interval, and format alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from headway.reports.interval import wilson
from headway.reports.record import RunRecord, read_run
from headway.types import MISPLACED

REWARD_STEPS = 5
"""The last reward is the mean of so many steps; the first is that of the first step alone."""


def outcome(folder: Path) -> dict[str, Any]:
    """Figures of a run, by name.

    reward_first: mean reward of the first train step; reward_last: of the last `REWARD_STEPS`; greedy: one entry per
    examination (version, correct, num, accuracy, low and high of the 95 % interval, format_alone: the accuracy if every
    right result counted wherever the answer holds it).
    """
    record = read_run(folder)
    rewards = [row["reward_mean"] for row in record.steps if row.get("reward_mean") is not None]
    figures: dict[str, Any] = {
        "ended": record.ended,
        "steps": len(record.steps),
        "seconds": round(record.timeline.total_s, 3),
        "trained_tokens": sum(row.get("trained_tokens") or 0 for row in record.steps),
        "lag_mean": fmean(row["lag_mean"] for row in record.steps) if record.steps else None,
        "lag_max": max((row["lag_max"] for row in record.steps), default=None),
        "greedy": _examinations(record, folder / "examinations.jsonl"),
    }
    if rewards:
        figures |= {"reward_first": rewards[0], "reward_last": fmean(rewards[-REWARD_STEPS:])}
    return figures


def _examinations(record: RunRecord, answers: Path) -> list[dict[str, Any]]:
    lines = answers.read_text(encoding="utf-8").splitlines() if answers.is_file() else []
    rows = [json.loads(line) for line in lines]
    examinations = []
    for event in record.examinations:
        correct, num = event["num_correct"], event["num"]
        low, high = wilson(correct, num)
        misplaced = sum(row["version"] == event["version"] and row["detail"] == MISPLACED for row in rows)
        examinations.append(
            {
                "version": event["version"],
                "correct": correct,
                "num": num,
                "accuracy": correct / num if num else None,
                "low": low,
                "high": high,
                "format_alone": (correct + misplaced) / num if num else None,
            }
        )
    return examinations


def describe(figures: dict[str, Any]) -> str:
    """The outcome in lines for a terminal."""
    lines = [f"{figures['steps']} steps in {figures['seconds']:.1f} s"]
    if "reward_first" in figures:
        lines.append(
            f"sampled reward   {figures['reward_first']:.3f} (first step) -> {figures['reward_last']:.3f} "
            f"(mean of the last {min(REWARD_STEPS, figures['steps'])})"
        )
    lines += _describe_greedy(figures["greedy"])
    return "\n".join(lines)


def _describe_greedy(examinations: Sequence[dict[str, Any]]) -> list[str]:
    if not examinations or examinations[0]["accuracy"] is None:
        return []
    first, last = examinations[0], examinations[-1]
    lines = [f"greedy accuracy  {_with_interval(first)}" + (f" -> {_with_interval(last)}" if last is not first else "")]
    if first["format_alone"] > first["accuracy"]:
        lines.append(f"                 {first['format_alone']:.3f} would have come from format alone")
    return [*lines, f"                 ({first['num']} held-out prompts, 95 % intervals)"]


def _with_interval(examination: dict[str, Any]) -> str:
    return f"{examination['accuracy']:.3f} [{examination['low']:.3f}, {examination['high']:.3f}]"
