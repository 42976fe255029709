"""How a run came out, in a few lines and as `run.json`: reward, greedy accuracy with its interval, and format alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from headway.reports import alarms, goodput_table
from headway.reports.interval import wilson
from headway.reports.record import RunRecord
from headway.reports.wording import duration, percent
from headway.trace import Event

REWARD_STEPS = 5
"""The last reward is the mean of so many steps, or of half of the steps of a short run; the first is of one step."""

TRUST = ("mismatch_kl_k3", "canary_kl_k3", "ess_share", "entropy")
"""Metrics of a train step that say whether its update can be trusted."""


def outcome(run: RunRecord) -> dict[str, Any]:
    """Figures of a run, by name.

    reward_first: mean reward of the first train step; reward_last: of the last `last_steps`; greedy: one entry per
    evaluation (version, correct, num, accuracy, low and high of the 95 % interval, format_alone: the accuracy if every
    right result counted wherever the answer holds it, None where the scorer can't say); trust: of the last `last_steps`
    what was measured of mismatch KL (k3), canary KL (k3), effective sample size and entropy, and the entropy of the
    first step; alarms: in words; unsound: what objective.unsound overrode; lags, lengths and goodput: as
    `summary.summarise`; peak_memory_bytes: beside libraries, absent where it was not measured.
    """
    figures: dict[str, Any] = {
        "ended": run.ended,
        "steps": len(run.steps),
        "time": round(run.timeline.total_s, 3),
        "trained_tokens": sum(row.get("trained_tokens") or 0 for row in run.steps),
        "mean_lag": run.figures["mean_lag"],
        "max_lag": run.figures["max_lag"],
        "token_lag": run.figures["token_lag"],
        "lag_bound": run.figures["lag_bound"],
        "over_run_ahead": run.figures["over_run_ahead"],
        "trained_length": run.figures["trained_length"],
        "started_length": run.figures["started_length"],
        "goodput": run.figures["goodput"],
        "greedy": [_evaluated(event, run.answers) for event in run.evaluations if event["num"]],
        "last_steps": last_steps(run),
        "trust": _trust(run),
        "alarms": [alarms.in_words(alarm, len(run.steps)) for alarm in run.alarms],
        "unsound": run.unsound,
    }
    if memory := [row["peak_memory_bytes"] for row in run.steps if row.get("peak_memory_bytes")]:
        figures["peak_memory_bytes"] = max(memory)
    ends = reward_ends(run)
    if ends:
        figures |= {"reward_first": ends[0], "reward_last": ends[1]}
    return figures


def _trust(run: RunRecord) -> dict[str, float]:
    last = run.steps[-last_steps(run) :]
    known = {name: [row[name] for row in last if row.get(name) is not None] for name in TRUST}
    figures = {name: fmean(values) for name, values in known.items() if values}
    if run.steps and run.steps[0].get("entropy") is not None:
        figures["entropy_first"] = run.steps[0]["entropy"]
    return figures


def reward_ends(run: RunRecord) -> tuple[float, float] | None:
    """Mean sampled reward (of the first step alone, so that it is honest; of the last steps)."""
    rewards = [row["reward_mean"] for row in run.steps if row.get("reward_mean") is not None]
    return (rewards[0], fmean(rewards[-last_steps(run) :])) if rewards else None


def last_steps(run: RunRecord) -> int:
    """Over how many steps the last reward is the mean."""
    return min(REWARD_STEPS, max(1, len(run.steps) // 2))


def _evaluated(event: Event, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    correct, num = event["num_correct"], event["num"]
    low, high = wilson(correct, num)
    misplaced = num_misplaced(event, answers)
    return {
        "version": event["version"],
        "correct": correct,
        "num": num,
        "accuracy": correct / num,
        "low": low,
        "high": high,
        "format_alone": None if misplaced is None else (correct + misplaced) / num,
    }


def num_misplaced(event: Event, answers: Sequence[dict[str, Any]]) -> int | None:
    """Wrong answers of an evaluation that hold the right result where it doesn't count; None: the scorer can't say."""
    marks = {row.get("uid"): row.get("misplaced") for row in answers if row["version"] == event["version"]}
    known = [mark for mark in marks.values() if mark is not None]  # by uid: a resumed run may have asked twice
    return sum(known) if known else None


def describe(figures: dict[str, Any]) -> str:
    """The outcome in lines for a terminal."""
    lines = [f"{figures['steps']} steps in {duration(figures['time'])}"]
    if "reward_first" in figures:
        lines.append(
            f"sampled reward   {figures['reward_first']:.3f} (first step) -> {figures['reward_last']:.3f} "
            f"(mean of the last {figures['last_steps']})"
        )
    lines += _describe_greedy(figures["greedy"])
    lines += _describe_trust(figures["trust"], figures["last_steps"])
    lines += goodput_table.lines(figures["goodput"], (figures["trained_length"], figures["started_length"]))
    if "peak_memory_bytes" in figures:
        lines.append(f"peak memory      {figures['peak_memory_bytes'] / 1e9:.2f} GB, beside libraries")
    lines += [f"warning: {alarm}" for alarm in figures["alarms"]]
    lines += [f"warning: unsound, and trained all the same: {reason}" for reason in figures["unsound"]]
    return "\n".join(lines)


def _describe_greedy(evaluations: Sequence[dict[str, Any]]) -> list[str]:
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    lines = [f"greedy accuracy  {_with_interval(first)}" + (f" -> {_with_interval(last)}" if last is not first else "")]
    if first["format_alone"] is not None:
        shown = f"{first['format_alone']:.3f}"
        lines.append(f"format alone     {shown} (the first answers, right results counted wherever they stand)")
    return [*lines, f"                 ({first['num']} held-out prompts, 95 % intervals)"]


def _describe_trust(trust: dict[str, float], num_steps: int) -> list[str]:
    """Where the mismatch and the entropy ended, in a line each."""
    lines: list[str] = []
    if "mismatch_kl_k3" in trust:
        numerics = f", numerics alone {trust['canary_kl_k3']:.2g}" if "canary_kl_k3" in trust else ""
        size = f"; effective sample size {percent(trust['ess_share'])}" if "ess_share" in trust else ""
        over = "last step" if num_steps == 1 else f"mean of the last {num_steps}"
        lines.append(f"mismatch KL      {trust['mismatch_kl_k3']:.2g}{numerics}{size} ({over})")
    if "entropy" in trust and "entropy_first" in trust:
        lines.append(f"entropy          {trust['entropy_first']:.3g} (first step) -> {trust['entropy']:.3g}")
    return lines


def _with_interval(evaluation: dict[str, Any]) -> str:
    return f"{evaluation['accuracy']:.3f} [{evaluation['low']:.3f}, {evaluation['high']:.3f}]"
