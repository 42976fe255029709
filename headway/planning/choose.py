"""Which schedule to choose: a short list by the closed laws, each of it simulated by the real scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from headway.config import Resolved, resolve
from headway.plan.laws import admitted_rate, largest_rate, mean_lag
from headway.plan.proposal import (
    NEAR,
    Candidate,
    Figures,
    Layout,
    OtherBatch,
    Plan,
    Request,
    Times,
    least_lag,
    shown,
)
from headway.plan.states import state_bytes
from headway.planning.candidates import colocated_layouts, curves, layouts, split_layouts, times
from headway.reports.summary import Timeline, timeline
from headway.reports.sweep_table import SweptRun
from headway.simulation import simulate as simulate_one
from headway.sweep import SweepJob, simulate

STEPS, SKIPPED = 30, 4
"""Train steps of a simulation, and the first of them that its figures leave out."""

MOST_ROLLOUTS, MOST_SIMULATED = 6_000, 512
"""Of one simulation, and of one of its batches, so that a sweep ends in seconds: with larger batches it takes fewer
steps, and of very large ones a share.
"""

MOST_RUN_AHEAD = 8

SHORT_LIST = 3
"""Splits that are simulated beside the colocated layout."""

Progress = Callable[[int], AbstractContextManager[Callable[[], object]]]
"""Told how many simulations there will be -> to be called as each ends."""


def plan(request: Request, progress: Progress = lambda num: nullcontext(lambda: None), *, quick: bool = False) -> Plan:
    """quick: no simulations; the closed laws choose."""
    candidates = _candidates(request)
    listed = short_list(candidates)
    simulated = [] if quick else _simulated(request, listed, progress)
    chosen = _fastest_by_law(listed) if quick else _best(simulated)
    rest = [candidate for candidate in candidates if quick or candidate not in listed]
    reasons = _reasons(request, chosen, simulated, candidates)
    batches = _other_batches(request, chosen, progress) if chosen and not quick else ()
    everything = (*simulated, *rest)
    drawn = curves(request, shown(chosen, everything).layout)
    return Plan(request, _states(request), everything, chosen, reasons, drawn, batches)


OTHER_BATCHES = (0.5, 2.0)
"""Times the batch that was asked for: what the recommended layout does with these is simulated too."""


def _other_batches(request: Request, chosen: Candidate, progress: Progress) -> tuple[OtherBatch, ...]:
    """The chosen layout with half and twice the batch, as far as groups allow it."""
    others = [int(factor * request.batch) for factor in OTHER_BATCHES]
    requests = [
        replace(request, batch=batch, lanes=request.lanes if request.lanes_said else batch)
        for batch in others
        if batch and batch % request.group == 0
    ]
    candidates = [_same_layout(each, chosen) for each in requests]
    fitting = [(each, one) for each, one in zip(requests, candidates, strict=True) if one.fits]
    jobs = [_job(each, candidate) for each, candidate in fitting]
    with progress(len(jobs)) as done:
        runs = simulate(jobs, done)
    simulated = {
        each.batch: _with_figures(each, candidate, job, run)
        for (each, candidate), job, run in zip(fitting, jobs, runs, strict=True)
    }
    return tuple(
        OtherBatch(each.batch, each.lanes, simulated.get(each.batch, candidate))
        for each, candidate in zip(requests, candidates, strict=True)
    )


def _same_layout(request: Request, chosen: Candidate) -> Candidate:
    """With the engines that are nearest in size, where fewer rollouts need fewer of them."""
    like = chosen.layout
    same = (
        colocated_layouts(request, like.sleep) if like.sharing == "colocated" else split_layouts(request, like.training)
    )
    tensor = like.placed.job.generation.tensor
    layout = min(same, key=lambda one: abs(one.placed.job.generation.tensor - tensor))
    return _candidate(request, layout, times(request, layout), chosen.run_ahead)


def _simulated(request: Request, listed: Sequence[Candidate], progress: Progress) -> list[Candidate]:
    jobs = [_job(request, candidate) for candidate in listed]
    with progress(len(jobs)) as done:
        runs = simulate(jobs, done)
    return [_with_figures(request, candidate, job, run) for candidate, run, job in zip(listed, runs, jobs, strict=True)]


def _with_figures(request: Request, candidate: Candidate, job: SweepJob, run: SweptRun) -> Candidate:
    share = request.batch / job.resolved.config.schedule.batch_size
    return replace(candidate, figures=_figures(request, run.figures, share))


def _states(request: Request) -> dict[str, float]:
    num_params = request.nominal or request.shape.num_params
    return state_bytes(num_params, request.models, request.precision)


# ---- the short list


def _candidates(request: Request) -> list[Candidate]:
    """Every layout with every run_ahead that may pay, by the closed laws."""
    found = []
    for layout in layouts(request):
        took = times(request, layout)
        found += [_candidate(request, layout, took, run_ahead) for run_ahead in _run_aheads(request, layout, took)]
    return found


def _candidate(request: Request, layout: Layout, took: Times, run_ahead: float) -> Candidate:
    rate = _rate(request, layout, took, run_ahead)
    lag = mean_lag(run_ahead, request.lanes, took.answer_s, request.batch, took.train_s)
    return Candidate(layout, took, run_ahead, rate, lag)


def _run_aheads(request: Request, layout: Layout, took: Times) -> list[float]:
    """Colocated by turns, nothing is gained by running further ahead than the next batch, for which an engine can't
    sleep; disaggregated, up to where admission is no longer the bound, and one more.
    """
    if request.run_ahead is not None:
        return [request.run_ahead]
    if layout.sharing == "colocated":
        return [0] if layout.sleep != "none" else [0, 1] if request.sleep == "none" else [1]
    most = largest_rate(request.lanes, took.answer_s, request.batch, took.train_s + took.sync_s)
    enough = most * _stay_s(request, took, request.group) / request.batch - 1
    return list(range(min(MOST_RUN_AHEAD, math.ceil(enough) + 1) + 1))


def _stay_s(request: Request, took: Times, num_waited_for: int) -> float:
    """From the start of a rollout until the batch that takes it is trained: it waits for the longest of so many."""
    pace_s = took.answer_s / request.answers.mean
    return request.answers.expected_longest(num_waited_for) * pace_s + took.train_s + took.sync_s


def _rate(request: Request, layout: Layout, took: Times, run_ahead: float) -> float:
    """Rollouts a second, at most. By turns both times add up. Else lanes, trainer or admission are the bound: a rollout
    stays until the longest of its group has ended and its batch is trained, without run_ahead the longest of its batch.
    """
    trained_s = took.train_s + took.sync_s
    if layout.sharing == "colocated" and run_ahead > 0:
        return request.batch / (request.batch * took.answer_s / request.lanes + trained_s)
    stay_s = _stay_s(request, took, request.batch if run_ahead == 0 else request.group)
    lanes_or_trainer = largest_rate(request.lanes, took.answer_s, request.batch, trained_s)
    return min(lanes_or_trainer, admitted_rate(run_ahead, request.batch, stay_s))


def short_list(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of those that fit: colocated ones, and the few splits with the highest rate; of all but the first of these the
    synchronous schedule is left out.
    """
    fitting = [candidate for candidate in candidates if candidate.fits]
    found = _best_colocated(fitting)
    by_split: dict[tuple[int, int], list[Candidate]] = {}
    for candidate in fitting:
        if candidate.layout.sharing == "disaggregated":
            tensor = candidate.layout.placed.job.generation.tensor
            by_split.setdefault((candidate.layout.training, tensor), []).append(candidate)
    best = sorted(by_split.values(), key=lambda split: max(one.rate for one in split), reverse=True)[:SHORT_LIST]
    for place, split in enumerate(best):
        found += [one for one in split if place == 0 or one.run_ahead > 0 or len(split) == 1]
    return found


def _best_colocated(fitting: Sequence[Candidate]) -> list[Candidate]:
    """With each run_ahead the size of engine with the highest rate."""
    best: dict[float, Candidate] = {}
    for one in fitting:
        if one.layout.sharing == "colocated" and (
            one.run_ahead not in best or one.rate > best[one.run_ahead].rate * (1 + NEAR)
        ):
            best[one.run_ahead] = one
    return [best[run_ahead] for run_ahead in sorted(best)]


# ---- simulating it


def settings_of(request: Request, candidate: Candidate) -> dict[str, Any]:
    """The settings of a run with these sizes, and of its simulation with these times."""
    took, by_turns = candidate.times, candidate.layout.sharing == "colocated"
    return {
        "run.seed": request.seed,
        "generate.lanes": request.lanes,
        "generate.sleep": candidate.layout.sleep,
        "schedule.batch_size": request.batch,
        "schedule.group_size": request.group,
        "schedule.run_ahead": candidate.run_ahead,
        "schedule.overlap": not by_turns,
        "simulate.engine": "roofline",
        "simulate.lengths": request.lengths,
        "simulate.mean_length": request.mean,
        "simulate.longest": request.longest,
        "simulate.overhead_s": took.overhead_s,
        "simulate.weight_bytes": took.weight_bytes,
        "simulate.kv_bytes_per_token": took.kv_bytes,
        "simulate.bandwidth_bytes_per_s": took.bandwidth,
        "simulate.prompt_tokens": request.answers.prompt,
        "simulate.prefill_tokens_per_s": took.prefill_tokens_per_s,
        "simulate.train_time": took.train_s,
        "simulate.sync_time": took.sync_s,
    }


def _resolved(request: Request, candidate: Candidate) -> Resolved:
    """Of its simulation: with a large batch, a share of batch, lanes and engines, which go at the same pace."""
    share = min(1.0, MOST_SIMULATED / request.batch)
    groups = max(1, round(share * request.batch / request.group))
    share = groups * request.group / request.batch
    steps = max(SKIPPED + 6, min(STEPS, MOST_ROLLOUTS // (groups * request.group)))
    values = settings_of(request, candidate)
    for key in ("simulate.weight_bytes", "simulate.bandwidth_bytes_per_s", "simulate.prefill_tokens_per_s"):
        values[key] *= share
    values |= {
        "schedule.batch_size": groups * request.group,
        "generate.lanes": max(1, round(share * request.lanes)),
        "run.steps": steps,
        "simulate.skip_steps": SKIPPED,
    }
    return resolve(None, [f"--{key}={_word(value)}" for key, value in values.items()])


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _job(request: Request, candidate: Candidate) -> SweepJob:
    choice = {"gpus": candidate.layout.name, "schedule.run_ahead": f"{candidate.run_ahead:g}"}
    return SweepJob(choice, [], _resolved(request, candidate))


def _figures(request: Request, simulated: Any, share: float) -> Figures:
    """share: rollouts of the job for each one of its simulation."""
    rate = simulated["throughput"] * share
    tokens_per_s = rate * (simulated["trained_length"] or 0.0)
    per_second = request.hardware.num * request.price / 3600 if request.price is not None else None
    return Figures(
        step_s=request.batch / rate,
        rollouts_per_s=rate,
        tokens_per_s=tokens_per_s,
        price=None if per_second is None else 1e6 * per_second / tokens_per_s,
        mean_lag=simulated["mean_lag"],
        token_lag=simulated["token_lag"],
        max_lag=simulated["max_lag"],
        trainer_idle=max(0.0, 1 - simulated["trainer_utilization"]),
        lanes_idle=max(0.0, 1 - simulated["lane_utilization"]),
    )


# ---- choosing one


def _best(simulated: Sequence[Candidate]) -> Candidate | None:
    scored = [(candidate, candidate.figures) for candidate in simulated if candidate.figures]
    if not scored:
        return None
    return least_lag(scored, speed=lambda one: one[1].tokens_per_s, lag=lambda one: one[1].token_lag)[0]


def _fastest_by_law(listed: Sequence[Candidate]) -> Candidate | None:
    """And of equals the one with the least lag."""
    return max(listed, key=lambda candidate: (candidate.rate, -candidate.run_ahead), default=None)


def _reasons(
    request: Request, chosen: Candidate | None, simulated: Sequence[Candidate], candidates: Sequence[Candidate]
) -> tuple[str, ...]:
    if chosen is None:
        return _why_nothing_fits(request, candidates)
    took = chosen.times
    if took.arithmetic_bound:
        memory = "decoding is bound by arithmetic: fewer rollouts in flight would be as fast"
    elif took.crossover < 1e9:
        memory = f"decoding waits for the memory: arithmetic is the bound from {took.crossover:,.0f} rollouts on"
    else:
        memory = "decoding waits for the memory, at any number of rollouts of this length"
    return (*_why(request, chosen, simulated), memory)


def _why(request: Request, chosen: Candidate, simulated: Sequence[Candidate]) -> list[str]:
    name, figures = f"{chosen.layout.name}, run_ahead {chosen.run_ahead:g}", chosen.figures
    if figures is None:
        rate = chosen.rate * request.answers.mean
        return [
            f"{name}: about {rate:,.0f} trained tokens/s at a mean lag of about {chosen.expected_lag:.2g}, by closed "
            "laws; without --quick the schedules are simulated"
        ]
    reasons = [
        f"{name}: {figures.tokens_per_s:,.0f} trained tokens/s at a mean lag of {figures.mean_lag:.2g}; of the "
        f"{len(simulated)} schedules that were simulated, none with less lag comes within {NEAR:.0%} of the fastest"
    ]
    synchronous = [one.figures.tokens_per_s for one in simulated if one.run_ahead == 0 and one.figures]
    if chosen.run_ahead > 0 and synchronous:
        reasons.append(f"{figures.tokens_per_s / max(synchronous):.2f} times the fastest synchronous schedule")
    reasons.append(
        f"{_bound(figures)}: the trainer idles {figures.trainer_idle:.0%} of the time, lanes {figures.lanes_idle:.0%}"
    )
    return reasons


BUSY = 0.02
"""Idle for so small a share of the time is always busy."""


def _bound(figures: Figures) -> str:
    if max(figures.trainer_idle, figures.lanes_idle) < BUSY:
        return "trainer and lanes are both always busy"
    if min(figures.trainer_idle, figures.lanes_idle) > 0.5:
        return "each waits for the other"
    return "the trainer is the bound" if figures.trainer_idle < figures.lanes_idle else "generation is the bound"


def _why_nothing_fits(request: Request, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    nearest = min(candidates, key=lambda candidate: candidate.layout.placed.fullest)
    placed, budget = nearest.layout.placed, request.hardware.budget
    pool = max(placed.pools, key=lambda each: each.peak.expected)
    largest = sorted(pool.peak.lines, key=lambda line: line.expected, reverse=True)[:2]
    most = " and ".join(f"{line.name} {line.expected / 1e9:.1f} GB" for line in largest)
    return (
        f"nothing fits: the nearest layout ({nearest.layout.name}) needs {placed.fullest / 1e9:.1f} GB a GPU in phase "
        f"{pool.peak.name!r}, and {budget / 1e9:.1f} GB may be used; most of it is {most}",
        f"more GPUs{'' if request.offload or pool.peak.name == 'train' else ', --offload'}"
        f"{'' if request.models.adapter_params else ', --lora-rank'} or shorter answers would help",
    )


def chosen_timeline(plan: Plan) -> Timeline | None:
    """Of the recommended schedule's simulation, once more."""
    if plan.chosen is None or plan.chosen.figures is None:
        return None
    return timeline(simulate_one(_resolved(plan.request, plan.chosen).config))
