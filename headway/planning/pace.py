"""How fast a machine has been in a run that is over: what `--calibrate RUN` puts in the place of assumed efficiencies.

The run's `work.jsonl` says what its engine and its trainer computed and how long it took. The first train step is left
out: kernels are made and memory is taken in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from headway.plan.gpus import Gpu
from headway.plan.here import Pace
from headway.plan.models import find_model
from headway.plan.roofline import Efficiency
from headway.plan.shapes import ModelShape
from headway.reports.record import WORK, RunRecord, read_run
from headway.simulate.recording import read_recording
from headway.types import UserError

ENOUGH_STEPS = 3
"""Train steps that a run must have for its pace to be known: one of them is left out."""

ENOUGH_ALONE = 4
"""Pieces of work of a kind that had the machine to themselves, to know how long one takes."""

Work = dict[str, Any]
"""A row of `headway.work.WorkLog.take`."""


@dataclass(frozen=True)
class Measured:
    """A run that is over, as a plan would describe it.

    model, adapter: as its configuration names them; work: of all train steps but the first.
    """

    run: RunRecord
    model: str
    adapter: str
    device: str
    shape: ModelShape
    work: Sequence[Work]

    @property
    def name(self) -> str:
        return str(self.run.folder)


def measured(folder: Path) -> Measured:
    """Raises UserError where the run holds no work, or too little of it."""
    run = read_run(folder)
    rows = [row for row in run.work if isinstance(row.get("work"), list)]
    if not rows:
        raise UserError(
            f"{folder} holds no {WORK}: it is a simulation, or an older Headway made it, and how fast its machine was "
            "is not known"
        )
    if len(rows) < ENOUGH_STEPS:
        raise UserError(
            f"{folder} has {len(rows)} train steps, and it takes {ENOUGH_STEPS} to know the pace: the first is left out"
        )
    model = run.setting("model.path", "")
    first = min(row["version"] for row in rows)
    return Measured(
        run=run,
        model=model,
        adapter=run.setting("adapter.kind", "none"),
        device=rows[-1].get("device", "cpu"),
        shape=find_model(model),
        work=[work for row in rows if row["version"] > first for work in row["work"]],
    )


def pace(runs: Sequence[Measured]) -> Pace:
    """Of runs of one model on one machine. Raises UserError where they are not."""
    first = runs[0]
    for other in runs[1:]:
        for what, mine, its in (
            ("model", first.model, other.model),
            ("adapter", first.adapter, other.adapter),
            ("device", first.device, other.device),
        ):
            if mine != its:
                raise UserError(f"--calibrate: {first.name} has the {what} {mine}, and {other.name} has {its}")
    work = [row for run in runs for row in run.work]
    pass_s, row_s, cached_s, prefill_s = _decoding(first, [row for row in work if row["kind"] == "pass"])
    alone = Pace(
        pass_s=pass_s,
        row_s=row_s,
        cached_s=cached_s,
        prefill_s=prefill_s,
        rate=_rate(first, [row for row in work if row["kind"] in PASSES]),
        update_s=_mean_s(work, "update"),
        rest_s=fmean(_rest_s(run) for run in runs),
        sync_s=fmean(fmean(_recording(run).sync.seen_s.values()) for run in runs),
        score_s=fmean(_score_s(run) for run in runs),
        engine_slowdown=1.0,
        trainer_slowdown=1.0,
        device=first.device,
        source=", ".join(run.name for run in runs),
    )
    return _with_slowdowns(alone, first, work)


PASSES = {"train": 3.0, "forward": 1.0, "critic train": 3.0, "critic forward": 1.0}
"""Kinds of a trainer's passes, and how many forward passes' worth of arithmetic each has."""


def train_flops(shape: ModelShape, tokens: float, pairs: float, passes: float) -> float:
    """Of so many tokens, whose rows see so many rows together."""
    return passes * (2.0 * shape.num_matrix_params * tokens + shape.attention_flops(1) * pairs)


def passes_of(kind: str, adapter: str) -> float:
    """Gradients of weights that are frozen are not computed."""
    return PASSES[kind] - (1.0 if kind == "train" and adapter != "none" else 0.0)


def _rate(run: Measured, rows: Sequence[Work]) -> float:
    """Operations a second, alone."""
    alone = _alone(rows)
    flops = sum(
        train_flops(run.shape, row["tokens"], row["pairs"], passes_of(row["kind"], run.adapter)) for row in alone
    )
    seconds = sum(row["seconds"] for row in alone)
    if not seconds:
        raise UserError(f"--calibrate {run.name}: its trainer made no pass that was measured")
    return flops / seconds


def _alone(rows: Sequence[Work]) -> list[Work]:
    """What was done alone; if there is too little of that, all, as if two that share take twice as long."""
    alone = [row for row in rows if row["share"] == 1.0]
    if sum(row["num"] for row in alone) >= max(ENOUGH_ALONE, 0.05 * sum(row["num"] for row in rows)):
        return alone
    return [{**row, "seconds": row["seconds"] * row["share"]} for row in rows]


VARIED = 3.0
"""Where some rollouts have so many times the context of others, what a cached token costs can be told from the rest."""


def _decoding(run: Measured, rows: Sequence[Work]) -> tuple[float, float, float, float]:
    """-> seconds of a pass, and of these of a row, a cached token and a token of a prompt.

    Where all contexts are of like length, a cached token is taken to cost what reading as many bytes of weights does.
    """
    alone = _alone(rows)
    contexts = [row["cached"] / row["rows"] for row in alone if row["rows"]]
    if contexts and max(contexts) >= VARIED * min(contexts):
        pass_s, row_s, cached_s, prefill_s = _fitted(alone, lambda row: row["num"], ("rows", "cached", "prefill"))
        return pass_s, row_s, cached_s, prefill_s
    of_pass = run.shape.kv_bytes_per_token(1) / run.shape.num_touched_params(1)
    pass_s, row_s, prefill_s = _fitted(alone, lambda row: row["num"] + of_pass * row["cached"], ("rows", "prefill"))
    return pass_s, row_s, of_pass * pass_s, prefill_s


def _fitted(rows: Sequence[Work], first: Callable[[Work], float], amounts: Sequence[str]) -> list[float]:
    """Seconds of one of `first`, and of one of each amount: least squares, none below nought."""
    if not rows:
        raise UserError("--calibrate: the engine made no pass that was measured")
    import numpy as np  # takes longer to import than a plan takes to make
    from scipy.optimize import nnls

    weights = np.array([1 / row["num"] ** 0.5 for row in rows])
    columns = [[float(first(row)) for row in rows], *([float(row[name]) for row in rows] for name in amounts)]
    matrix = np.array(columns).T * weights[:, None]
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(matrix / scale, np.array([row["seconds"] for row in rows]) * weights)
    return [float(value) for value in solution / scale]


def _mean_s(rows: Iterable[Work], kind: str) -> float:
    """Of one piece of work of a kind, 0 where there was none."""
    found = _alone([row for row in rows if row["kind"] == kind])
    num = sum(row["num"] for row in found)
    return sum(row["seconds"] for row in found) / num if num else 0.0


def _rest_s(run: Measured) -> float:
    """Of a train step, from the batch that was taken to the new weights, what is no measured work."""
    spent = {row["version"]: _seconds(row["work"]) for row in run.run.work}
    steps = _recording(run).train.seen_s  # by the version that a step begins from
    rests = [took_s - spent[version + 1] for version, took_s in steps.items() if version + 1 in spent]
    return max(0.0, median(rests[1:])) if len(rests) > 1 else 0.0


def _seconds(work: Iterable[Work]) -> float:
    return sum(row["seconds"] for row in work if row["kind"] != "pass")


def _recording(run: Measured) -> Any:
    return read_recording(run.run.folder, run.run.setting("run.seed", 0))


def _score_s(run: Measured) -> float:
    graded = _recording(run).rollouts.graded.values()
    return fmean(each.score_s for each in graded) if graded else 0.0


def _with_slowdowns(pace: Pace, run: Measured, work: Sequence[Work]) -> Pace:
    """How much longer than alone what was done beside the other took; twice as long where nothing was."""
    took, expected = {"engine": 0.0, "trainer": 0.0}, {"engine": 0.0, "trainer": 0.0}
    for row in work:
        if row["share"] == 1.0 or row["kind"] not in (*PASSES, "pass"):
            continue
        who = "engine" if row["kind"] == "pass" else "trainer"
        took[who] += row["seconds"]
        expected[who] += _alone_s(pace, run, row)
    engine, trainer = (max(1.0, took[who] / expected[who]) if expected[who] else 2.0 for who in took)
    return replace(pace, engine_slowdown=engine, trainer_slowdown=trainer)


def _alone_s(pace: Pace, run: Measured, row: Work) -> float:
    if row["kind"] == "pass":
        decode_s = pace.pass_s * row["num"] + pace.row_s * row["rows"]
        return decode_s + pace.cached_s * row["cached"] + pace.prefill_s * row["prefill"]
    passes = passes_of(row["kind"], run.adapter)
    return train_flops(run.shape, row["tokens"], row["pairs"], passes) / pace.rate


def efficiency(runs: Sequence[Measured], gpu: Gpu) -> dict[str, float]:
    """Shares of a GPU's nominal figures that runs on one of it have reached, by the names of `Efficiency`.

    What the runs can't tell is left out. Raises UserError where they ran on something else.
    """
    found = pace(runs)
    if not gpu.is_device(found.device):
        raise UserError(
            f"--calibrate {found.source} ran on {found.device}, which says nothing of a {gpu.title}: "
            + ("leave out --gpu to plan a run on this machine" if found.device == "cpu" else "plan for what it ran on")
        )
    shape, engine_bytes = runs[0].shape, 2.0 if runs[0].run.setting("generate.dtype") == "bfloat16" else 4.0
    shares = {"training": found.rate / gpu.bf16_flops}
    if found.cached_s:
        shares["bandwidth"] = shape.kv_bytes_per_token(engine_bytes) / (gpu.bandwidth * found.cached_s)
    if found.prefill_s:
        shares["prefill"] = 2.0 * shape.num_matrix_params / (gpu.bf16_flops * found.prefill_s)
    shares = {name: min(1.0, share) for name, share in shares.items()}
    bandwidth = gpu.bandwidth * shares.get("bandwidth", Efficiency().bandwidth)
    reading_s = engine_bytes * shape.num_touched_params(1) / bandwidth
    return {**shares, "step_overhead_s": max(0.0, found.pass_s - reading_s)}
