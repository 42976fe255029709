"""How fast a machine has been in a run that is over: what `--calibrate RUN` puts in the place of assumed efficiencies.

The run's `work.jsonl` says what its engine and its trainer computed and how long it took. The first train step is left
out: kernels are made and memory is taken in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    decoding = _decoding(first, [row for row in work if row["kind"] == "pass"])
    rate, trainer_slowdown = _rate(first, [row for row in work if row["kind"] in PASSES])
    return Pace(
        pass_s=decoding.pass_s,
        row_s=decoding.row_s,
        cached_s=decoding.cached_s,
        prefill_s=decoding.prefill_s,
        rate=rate,
        update_s=_mean_s(work, "update"),
        rest_s=fmean(_rest_s(run) for run in runs),
        sync_s=fmean(fmean(_recording(run).sync.seen_s.values()) for run in runs),
        score_s=fmean(_score_s(run) for run in runs),
        engine_slowdown=decoding.slowdown,
        trainer_slowdown=trainer_slowdown,
        device=first.device,
        source=", ".join(run.name for run in runs),
    )


PASSES = {"train": 3.0, "forward": 1.0, "critic train": 3.0, "critic forward": 1.0}
"""Kinds of a trainer's passes, and how many forward passes' worth of arithmetic each has."""


def train_flops(shape: ModelShape, tokens: float, pairs: float, passes: float) -> float:
    """Of so many tokens, whose rows see so many rows together."""
    return passes * (2.0 * shape.num_matrix_params * tokens + shape.attention_flops(1) * pairs)


def passes_of(kind: str, adapter: str) -> float:
    """Gradients of weights that are frozen are not computed."""
    return PASSES[kind] - (1.0 if kind == "train" and adapter != "none" else 0.0)


def _rate(run: Measured, rows: Sequence[Work]) -> tuple[float, float]:
    """-> operations a second alone, and how many times as long passes take beside the engine."""
    if not rows:
        raise UserError(f"--calibrate {run.name}: its trainer made no pass that was measured")

    def flops(row: Work) -> float:
        return train_flops(run.shape, row["tokens"], row["pairs"], passes_of(row["kind"], run.adapter))

    alone, shared = _alone(rows), [row for row in rows if row["share"] < 1]
    rate = sum(map(flops, alone)) / sum(row["seconds"] for row in alone)
    if not shared:
        return rate, TWICE
    took_s, expected_s = sum(row["seconds"] for row in shared), sum(map(flops, shared)) / rate
    return rate, min(TWICE, max(1.0, took_s / expected_s))


def _alone(rows: Sequence[Work]) -> list[Work]:
    """What was done alone; if there is too little of that, all, as if two that share take twice as long."""
    alone = [row for row in rows if row["share"] == 1.0]
    if sum(row["num"] for row in alone) >= max(ENOUGH_ALONE, 0.05 * sum(row["num"] for row in rows)):
        return alone
    return [{**row, "seconds": row["seconds"] / (1.0 if row["share"] == 1.0 else TWICE)} for row in rows]


VARIED = 3.0
"""Where some rollouts have so many times the context of others, what a cached token costs can be told from the rest."""

ROUNDS = 30
"""Of fitting passes and how much slower shared ones are, in turn; far more than it takes."""


@dataclass(frozen=True)
class _Decoding:
    """Seconds of a pass alone: constant, and of a row, a cached token and a token of a prompt in it; slowdown: beside
    the trainer.
    """

    pass_s: float
    row_s: float
    cached_s: float
    prefill_s: float
    slowdown: float


def _decoding(run: Measured, rows: Sequence[Work]) -> _Decoding:
    """Least squares over all passes, those beside the trainer too, whose slowdown is fitted in turn with the rest.

    Where all contexts are of like length, a cached token is taken to cost what reading as many bytes of weights does.
    On a CPU a row of a prompt takes as long as one of a rollout: both are arithmetic, which doesn't hide behind
    reading.
    """
    if not rows:
        raise UserError(f"--calibrate {run.name}: its engine made no pass that was measured")
    contexts = [row["cached"] / row["rows"] for row in rows if row["rows"]]
    varied = bool(contexts) and max(contexts) >= VARIED * min(contexts)
    of_pass = 0.0 if varied else run.shape.kv_bytes_per_token(1) / run.shape.num_touched_params(1)
    columns: list[Callable[[Work], float]] = [lambda row: row["num"] + of_pass * row["cached"]]
    if run.device == "cpu":
        columns.append(lambda row: row["rows"] + row["prefill"])
    else:
        columns += [lambda row: row["rows"], lambda row: row["prefill"]]
    if varied:
        columns.append(lambda row: row["cached"])
    solution, slowdown = _fitted(rows, columns)
    row_s, prefill_s = (solution[1], solution[1]) if run.device == "cpu" else (solution[1], solution[2])
    return _Decoding(solution[0], row_s, solution[-1] if varied else of_pass * solution[0], prefill_s, slowdown)


def _fitted(rows: Sequence[Work], columns: Sequence[Callable[[Work], float]]) -> tuple[list[float], float]:
    """-> seconds of one of each column, none below nought, and how many times as long shared work takes."""
    import numpy as np  # takes longer to import than a plan takes to make
    from scipy.optimize import nnls

    matrix = np.array([[float(column(row)) for column in columns] for row in rows])
    took_s, shared = np.array([row["seconds"] for row in rows]), np.array([row["share"] < 1 for row in rows])
    weights = np.array([row["num"] for row in rows]) ** -0.5
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    slowdown, solution = TWICE, scale
    for _ in range(ROUNDS if shared.any() and not shared.all() else 1):
        alone_s = took_s / np.where(shared, slowdown, 1.0)
        solution, _ = nnls(matrix / scale * weights[:, None], alone_s * weights)
        foretold_s = (matrix @ (solution / scale))[shared].sum()
        if foretold_s and not shared.all():
            slowdown = float(np.clip(took_s[shared].sum() / foretold_s, 1.0, TWICE))
    return [float(value) for value in solution / scale], slowdown


TWICE = 2.0
"""How many times as long work takes beside other work where that is not known: what the other does is missing to it."""


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
