"""The plan of a run in one process, in the terminal and as JSON: memory, pace, and what was measured beside it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TextIO

from headway.plan.here import HerePlan, Pace, Schedule
from headway.plan.proposal import NEAR
from headway.reports import plan_table
from headway.reports.plan_table import Titled, columns, gigabytes
from headway.reports.wording import percent

COLUMNS = ("run_ahead", "tokens/s", "step s", "mean lag", "token lag", "trainer idle", "lanes idle", "")

SAID = (
    "tokens/s: trained answer tokens; token lag: mean lag over trained tokens; simulated by the real scheduler on "
    "virtual time, at the measured pace"
)


def show(plan: HerePlan, stream: TextIO) -> None:
    """Print it for people; into a file without colours and at a fixed width."""
    console = plan_table.console_of(stream)
    console.print(headline(plan), style="bold")
    console.print(plan_table.where_from(plan.assumptions, plan.job.answers), style="dim")
    console.print()
    tables = [plan_table.memory(plan.pool, plan.budget)]
    if plan.pace:
        tables += [_pace(plan, plan.pace), _schedules(plan)]
    if plan.beside:
        tables.append(_beside(plan))
    for title, table in tables:
        console.print(title, style="bold")
        console.print(table)
        console.print()
    for line in verdict(plan):
        console.print(f"- {line}")


def headline(plan: HerePlan) -> str:
    shape, adapter = plan.job.shape, plan.job.models.adapter_params
    what = f"an adapter of {adapter:,} trained numbers" if adapter is not None else "all of them trained"
    return (
        f"{plan.name}: {shape.name}, {plan_table.billions(shape.num_params)} parameters, {what}; generated and trained "
        "in one process on this machine"
    )


def verdict(plan: HerePlan) -> list[str]:
    """In sentences."""
    peak = gigabytes(plan.pool.peak.expected)
    said = [f"{peak} GB at the peak {'fit' if plan.fits else 'do not fit'} into {gigabytes(plan.budget)} GB"]
    if plan.assumed:
        said.append(f"that is for {' and '.join(plan.assumed)}, which nobody said: --prompt-tokens, --mean-tokens")
    if not plan.fits:
        largest = sorted(plan.pool.peak.lines, key=lambda line: line.expected, reverse=True)[:2]
        most = " and ".join(f"{line.name} {gigabytes(line.expected)}" for line in largest)
        said.append(f"most of it is {most} GB: fewer micro_batch_tokens, an adapter or fewer lanes would help")
    if plan.pace is None:
        said.append(
            "how fast it will be is known once a run of the same model is measured on this machine; a few steps will "
            "do: headway plan RECIPE --calibrate RUN"
        )
    elif plan.own and plan.chosen:
        said.append(f"a train step takes {plan.own.step_s:.3g} s with the recipe's run_ahead {plan.own.run_ahead:g}")
        said.append(_advice(plan.own, plan.chosen))
    return said


def _advice(own: Schedule, chosen: Schedule) -> str:
    if chosen.run_ahead == own.run_ahead:
        return f"recommended: run_ahead {own.run_ahead:g}; none with less lag comes within {NEAR:.0%} of the fastest"
    gain = chosen.tokens_per_s / own.tokens_per_s
    return (
        f"recommended: run_ahead {chosen.run_ahead:g}, {gain:.2f} times as many tokens a second, token lag "
        f"{chosen.token_lag:.2f} instead of {own.token_lag:.2f}"
    )


def pace_rows(plan: HerePlan, pace: Pace) -> list[tuple[str, str, str]]:
    """What takes how long, and why."""
    job = plan.job
    context = job.answers.prompt + job.answers.steady[0]
    step_s = pace.decode_s(job.lanes, job.lanes * context)
    return [
        (
            "a decode step",
            f"{step_s * 1e3:.1f} ms",
            f"{job.lanes} rollouts at {context:,.0f} tokens: {pace.pass_s * 1e3:.1f} ms + {job.lanes} x "
            f"{pace.row_s * 1e3:.2f} ms + {job.lanes * context:,.0f} x {pace.cached_s * 1e6:.2f} us",
        ),
        ("prefill", _rate(pace.prefill_s), "of prompts, each once for its group"),
        ("training", f"{pace.rate / 1e9:,.0f} GFLOP/s", "of passes over a micro-batch, alone"),
        ("an optimizer step", f"{pace.update_s:.3g} s", ""),
        ("the rest of a train step", f"{pace.rest_s * 1e6:,.0f} us a token", "advantages, packing, diagnostics"),
        ("new weights", f"{pace.sync_s:.3g} s", "from trained to published"),
        ("the trainer begins", f"{pace.lead_s:.3g} s", "after a batch is taken, when the canaries are sampled"),
        (
            "while both work",
            f"{pace.engine_slowdown:.2f}, {pace.trainer_slowdown:.2f}",
            "times as long take engine and trainer, which share this machine"
            + (f"; of the {' and the '.join(pace.assumed)} assumed: no run has shown it" if pace.assumed else ""),
        ),
    ]


def _rate(seconds_each: float) -> str:
    return f"{1 / seconds_each:,.0f} tokens/s" if seconds_each else "no time"


def _pace(plan: HerePlan, pace: Pace) -> Titled:
    table = columns("what", "", "")
    for row in pace_rows(plan, pace):
        table.add_row(*row)
    return f"Pace on {pace.device}, measured in {pace.source}", table


def row(schedule: Schedule) -> list[str]:
    """By COLUMNS."""
    return [
        f"{schedule.run_ahead:g}",
        f"{schedule.tokens_per_s:,.1f}",
        f"{schedule.step_s:.3g}",
        f"{schedule.mean_lag:.2f}",
        f"{schedule.token_lag:.2f}",
        percent(schedule.trainer_idle),
        percent(schedule.lanes_idle),
        "the recipe's" if schedule.own else "",
    ]


def _schedules(plan: HerePlan) -> Titled:
    table = columns(*COLUMNS)
    for schedule in plan.schedules:
        table.add_row(*row(schedule), style="bold green" if schedule is plan.chosen else None)
    return f"Schedules ({SAID})", table


def compared(plan: HerePlan) -> list[tuple[str, str, str, str]]:
    """What was predicted, measured, and the ratio of the two."""
    beside = plan.beside
    assert beside is not None
    peak = plan.pool.peak.expected
    rows = [
        (
            "peak memory",
            f"{gigabytes(peak)} GB",
            f"{gigabytes(beside.peak_bytes)} GB",
            f"{peak / beside.peak_bytes:.2f}",
        )
    ]
    if plan.own:
        ratio = plan.own.step_s / beside.step_s
        measured = f"{beside.step_s:.3g} s, mean of {beside.num_steps}"
        rows.append(("a train step", f"{plan.own.step_s:.3g} s", measured, f"{ratio:.2f}"))
    return rows


def _beside(plan: HerePlan) -> Titled:
    table = columns("", "predicted", "measured", "ratio")
    for cells in compared(plan):
        table.add_row(*cells)
    return "What the run took", table


def to_json(plan: HerePlan) -> dict[str, Any]:
    """All figures, in bytes and seconds."""
    own, chosen = plan.own, plan.chosen
    return {
        "name": plan.name,
        "model": {"name": plan.job.shape.name, "params": plan.job.shape.num_params},
        "adapter_params": plan.job.models.adapter_params,
        "assumptions": [asdict(item) for item in plan.assumptions],
        "memory": {phase.name: plan_table.phase_figures(phase) for phase in plan.pool.phases},
        "budget_bytes": plan.budget,
        "assumed": list(plan.assumed),
        "fits": plan.fits,
        "pace": asdict(plan.pace) if plan.pace else None,
        "schedules": [asdict(schedule) for schedule in plan.schedules],
        "predicted_step_s": own.step_s if own else None,
        "recommended_run_ahead": chosen.run_ahead if chosen else None,
        "measured": asdict(plan.beside) if plan.beside else None,
    }
