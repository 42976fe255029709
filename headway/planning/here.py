"""The plan of a run in one process on this machine: its memory, and with a measured run beside it its pace.

A recipe is planned before it runs; a run that is over is planned again from its recipe and its lengths, and what was
measured stands beside what would have been said.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

from headway import config as settings
from headway.config import Config, Resolved
from headway.plan.here import Beside, HerePlan, Pace, Schedule
from headway.plan.in_process import InProcessJob, in_process
from headway.plan.models import find_model
from headway.plan.shapes import ModelShape
from headway.plan.states import Models
from headway.planning.choose import SKIPPED, STEPS, Progress
from headway.planning.pace import Measured, check_same_pace, measured, pace, train_flops
from headway.planning.request import ASSUMED, Options, Workload, adapter_params, said
from headway.reports.metrics import is_number
from headway.run import named_objective
from headway.sweep import SweepJob, simulate
from headway.types import UserError

USABLE = 0.9
"""Of the memory that is free, so much may be planned with."""

MOST_ROLLOUTS = 20_000
"""Of one simulation, so that it ends in seconds: with larger batches it takes fewer steps."""

RUN_AHEADS = (0.0, 1.0, 2.0)
"""That are simulated beside the recipe's own."""

LOOKED_AT = (
    *("run.seed", "run.threads", "model.path", "model.device", "model.parity", "adapter", "objective", "schedule"),
    *("generate.lanes", "generate.max_new_tokens", "generate.dtype", "generate.cache_bytes"),
    *("prepare.micro_batch_tokens", "train.optimizer_steps", "train.passes", "train.compute_dtype"),
    *("simulate.lengths", "simulate.mean_length", "simulate.prompt_tokens"),
)
"""Settings that such a plan looks at."""


def plan(
    source: Path | None,
    options: Options,
    model: str | None,
    overrides: Sequence[str],
    calibrate: Sequence[Path],
    progress: Progress = lambda num: nullcontext(lambda: None),
) -> HerePlan:
    """source: a recipe, or the folder of a run. Raises UserError for whatever the user can mend."""
    run = measured(source) if source and source.is_dir() else None
    runs = [measured(folder) for folder in calibrate]
    known = run or (runs[0] if runs else None)
    recipe = run.run.folder / "config.toml" if run else source
    words = [*([f"--model.path={model}"] if model else []), *overrides]
    resolved = settings.resolve(recipe, words)
    settings.only(resolved.origins, LOOKED_AT, "headway plan")
    if resolved.config.model.path is None:
        raise UserError("which model? headway plan RECIPE, or headway plan --model MODEL --gpu GPU --num-gpus N")
    _check_device(resolved.config, known)
    shape = find_model(resolved.config.model.path)
    workload = _workload(resolved, options, known, over=run is not None)
    job = _job(resolved.config, shape, workload)
    found = pace(runs) if runs else None
    for each in runs[:1]:
        check_same_pace(each, resolved.config, "what is planned")
    simulation = times(resolved.config, job, workload, found) if found else {}
    return HerePlan(
        name=run.name if run else str(source or resolved.config.model.path),
        job=job,
        pool=in_process(job),
        budget=USABLE * free_bytes(),
        assumptions=tuple(workload.assumptions),
        assumed=_assumed(workload, known),
        pace=found,
        decode=_decode_points(runs, found),
        schedules=_simulated(recipe, words, resolved.config, job, simulation, progress) if found else (),
        recipe=recipe,
        settings=said(resolved),
        simulation=simulation,
        beside=_beside(run) if run else None,
    )


def _check_device(config: Config, known: Measured | None) -> None:
    """A GPU's memory is another one, and what is taken of it is taken at once."""
    device = known.device if known else config.model.device
    has_gpu = config.model.device is None and any(Path("/dev").glob("nvidia[0-9]*"))
    if device not in (None, "cpu") or has_gpu:
        raise UserError(
            "a run in one process is planned on a CPU so far: for GPUs name them, headway plan --gpu GPU, or plan for "
            "this machine's CPU with --model.device cpu"
        )


def _workload(resolved: Resolved, options: Options, known: Measured | None, *, over: bool) -> Workload:
    """Lengths of prompts and answers are those of a run that is known, unless somebody says others. over: it is the
    run itself that is planned, whatever its configuration says of simulations.
    """
    assumed = {key: ASSUMED[key] for key in ("simulate.lengths", "simulate.prompt_tokens")}
    assumed["generate.lanes"] = resolved.config.generate.lanes
    if known is None:
        return Workload(resolved, options, assumed)
    rollouts = (event for event in known.run.events if event.kind == "generated" and event["rollout"] >= 0)
    prompts = [tokens for event in rollouts if is_number(tokens := event.fields.get("prompt_tokens"))]
    if prompts:
        assumed["simulate.prompt_tokens"] = fmean(prompts)
    if options.mean_tokens is None:
        assumed["simulate.lengths"] = f"run:{known.name}"
    return Workload(resolved, options, assumed, f"as in {known.name}", known=over)


def _assumed(workload: Workload, known: Measured | None) -> tuple[str, ...]:
    """What nobody said and no run has shown."""
    if known is not None:
        return ()
    names = {"simulate.prompt_tokens": "prompts of {:g} tokens", "simulate.mean_length": "answers of {:g} on average"}
    guessed = {item.name: item.value for item in workload.assumptions if item.origin == "assumed"}
    return tuple(words.format(guessed[name]) for name, words in names.items() if name in guessed)


def _job(config: Config, shape: ModelShape, workload: Workload) -> InProcessJob:
    chosen = named_objective(config)
    adapter = adapter_params(config, shape)
    return InProcessJob(
        shape=shape,
        models=Models(critic=chosen.needs_critic, reference=chosen.needs_reference, adapter_params=adapter),
        answers=workload.answers(),
        lanes=workload.lanes,
        batch=workload.batch,
        group=workload.group,
        micro_batch_tokens=workload.micro_batch_tokens,
        memory=free_bytes(),
        engine_bytes=2.0 if config.generate.dtype == "bfloat16" else 4.0,
        packs=config.generate.dtype == "float32",
        cache_bytes=config.generate.cache_bytes,
        half_products=config.train.compute_dtype == "bfloat16",
    )


def free_bytes() -> float:
    """Memory of this machine that a new process can have."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


# ---- time


def _simulated(
    recipe: Path | None,
    words: Sequence[str],
    config: Config,
    job: InProcessJob,
    simulation: Mapping[str, Any],
    progress: Progress,
) -> tuple[Schedule, ...]:
    """The recipe's schedule by the real scheduler, with its run_ahead and with others."""
    own = config.schedule.run_ahead
    run_aheads = sorted({*RUN_AHEADS, own})
    steps = max(SKIPPED + 6, min(STEPS, MOST_ROLLOUTS // job.batch))
    length = {"run.steps": steps, "simulate.skip_steps": SKIPPED}
    all_words = [*words, *(f"--{key}={value}" for key, value in {**simulation, **length}.items())]
    jobs = [
        SweepJob(
            {"schedule.run_ahead": f"{run_ahead:g}"}, [], settings.resolve(recipe, [*all_words, _ahead(run_ahead)])
        )
        for run_ahead in run_aheads
    ]
    with progress(len(jobs)) as done:
        runs = simulate(jobs, done)
    return tuple(
        _schedule(run_ahead, run.figures, job, own=run_ahead == own)
        for run_ahead, run in zip(run_aheads, runs, strict=True)
    )


def _ahead(run_ahead: float) -> str:
    return f"--schedule.run-ahead={run_ahead:g}"


def _schedule(run_ahead: float, figures: Mapping[str, Any], job: InProcessJob, *, own: bool) -> Schedule:
    rate = figures["throughput"]
    return Schedule(
        run_ahead=run_ahead,
        own=own,
        step_s=job.batch / rate,
        tokens_per_s=rate * job.answers.mean,
        mean_lag=figures["mean_lag"],
        token_lag=figures["token_lag"],
        trainer_idle=max(0.0, 1 - figures["trainer_utilization"]),
        lanes_idle=max(0.0, 1 - figures["lane_utilization"]),
    )


def times(config: Config, job: InProcessJob, workload: Workload, found: Pace) -> dict[str, Any]:
    """Settings of the simulation of a recipe at a measured pace.

    The first token of an answer comes out of its prompt's pass, which is a pass all the same. A prompt is computed once
    for its group, so each of its rollouts has a share of it to compute, and all of it to read.
    """
    answers, kv_bytes = job.answers, job.shape.kv_bytes_per_token(job.engine_bytes)
    later = max(0.0, answers.mean - 1) / answers.mean
    shared = answers.prompt * (1 - 1 / job.group)
    values = {
        "run.seed": config.run.seed,
        "generate.lanes": job.lanes,
        "schedule.batch_size": job.batch,
        "schedule.group_size": job.group,
        "simulate.engine": "roofline",
        "simulate.lengths": workload.lengths,
        "simulate.mean_length": workload.mean,
        "simulate.longest": workload.longest,
        "simulate.overhead_s": found.pass_s,
        "simulate.rollout_s": later * (found.row_s + found.cached_s * shared),
        "simulate.weight_bytes": 1.0,  # read in pass_s
        "simulate.kv_bytes_per_token": kv_bytes,
        "simulate.bandwidth_bytes_per_s": kv_bytes / (later * found.cached_s) if later * found.cached_s else 1e18,
        "simulate.prompt_tokens": answers.prompt / job.group,
        "simulate.train_time": train_step_s(config, job, found),
        "simulate.sync_time": found.sync_s + found.lead_s,
        "simulate.score_time": found.score_s,
        "simulate.engine_slowdown": found.engine_slowdown,
        "simulate.trainer_slowdown": found.trainer_slowdown,
        "simulate.micro_batches": math.ceil(batch_tokens(job) / job.micro_batch_tokens) * config.train.passes,
    }
    if found.prefill_s:
        values["simulate.prefill_tokens_per_s"] = 1 / found.prefill_s
    return values


def batch_tokens(job: InProcessJob) -> float:
    """The prompt of a group is computed once."""
    return job.batch * job.answers.mean + job.batch / job.group * job.answers.prompt


def train_step_s(config: Config, job: InProcessJob, found: Pace) -> float:
    """Of a batch, alone: passes over its tokens, optimizer steps, and what the trainer does beside them."""
    answers = job.answers
    prompts = job.batch / job.group
    tokens = batch_tokens(job)
    square = fmean(length * length for length in answers.lengths)
    pairs = job.batch * (answers.mean * answers.prompt + square / 2) + prompts * answers.prompt**2 / 2
    updates = config.train.optimizer_steps * config.train.passes
    trained = 2.0 if job.models.adapter_params is not None else 3.0
    passes = config.train.passes * trained + job.models.reference + named_objective(config).needs_proximal(updates)
    if job.models.critic:
        passes += 3.0 * config.train.passes + 1.0
    arithmetic_s = train_flops(job.shape, tokens, pairs, passes) / found.rate
    return arithmetic_s + updates * found.update_s + tokens * found.rest_s


# ---- measured


def _decode_points(runs: Sequence[Measured], found: Pace | None) -> tuple[tuple[float, float, float], ...]:
    """Of passes of like size without a prompt: rollouts, tokens in their caches, and seconds, as if alone."""
    if found is None:
        return ()
    passes = [row for run in runs for row in run.work if row["kind"] == "pass" and not row["prefill"]]
    slowness = [1.0 if row["share"] == 1.0 else found.engine_slowdown for row in passes]
    return tuple(
        (row["rows"] / row["num"], row["cached"] / row["num"], row["seconds"] / row["num"] / slow)
        for row, slow in zip(passes, slowness, strict=True)
    )


def _beside(run: Measured) -> Beside:
    evaluated = [
        event.at_s
        for event in run.run.events
        if event.kind == "evaluated" or (event.kind == "started" and event.fields.get("evaluation"))
    ]
    steps = [
        row["step_s"]
        for row in run.run.steps[1:]
        if not any(row["at_s"] - row["step_s"] <= at_s <= row["at_s"] for at_s in evaluated)
    ]
    if not steps:
        raise UserError(f"{run.name}: every train step of it shares its time with an evaluation; give a longer run")
    return Beside(run.name, run.peak_bytes, fmean(steps), len(steps))
