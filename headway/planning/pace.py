"""How fast a machine has been in a run that is over: what `--calibrate RUN` puts in the place of assumed efficiencies.

The run's `work.jsonl` says what its engine and its trainer computed and how long it took. The first train step is left
out: kernels are made and memory is taken in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from headway.config import Config, resolve
from headway.plan.gpus import Gpu
from headway.plan.here import Pace
from headway.plan.models import find_model
from headway.plan.roofline import Efficiency
from headway.plan.shapes import ModelShape
from headway.reports.metrics import is_number
from headway.reports.record import WORK, RunRecord, read_run
from headway.simulate.recording import Recording, read_recording
from headway.types import UserError

ENOUGH_STEPS = 2
"""Train steps that a run must have beside its first for its pace to be known."""

ENOUGH_ALONE = 4
"""Pieces of work of a kind that had the machine to themselves, to know how long one takes."""

Work = dict[str, Any]
"""A row of `headway.work.WorkLog.take`."""


AMOUNTS = {
    "pass": ("rows", "prefill", "cached"),
    **dict.fromkeys(("train", "forward", "critic train", "critic forward"), ("tokens", "pairs")),
}
"""What a row of work says of its size, by kind; others have none."""


@dataclass(frozen=True)
class Measured:
    """A run that is over, as a plan would describe it.

    config: as it was run; device: as torch calls it; peak_bytes; work: of all train steps but the first of the run and
    the first after each resume; rest_s: of the trainer beside its work, for each token that it trained;
    trainer_s: of its thread, by version.
    """

    run: RunRecord
    config: Config
    device: str
    peak_bytes: float
    shape: ModelShape
    work: Sequence[Work]
    rest_s: float
    trainer_s: Mapping[int, float]

    @property
    def name(self) -> str:
        return str(self.run.folder)

    @cached_property
    def recording(self) -> Recording:
        return read_recording(self.run.folder, self.config.run.seed)


def measured(folder: Path) -> Measured:
    """Raises UserError where the run holds no work, or too little of it."""
    run = read_run(folder)
    if not run.config:
        raise UserError(f"{folder} holds no config.toml that can be read, so what was run there is not known")
    config = resolve(folder / "config.toml").config
    steps = _steps(run)
    if not steps:
        raise UserError(
            f"{folder} holds no {WORK} of train steps: none of them ended, or it is a simulation, or an older Headway "
            "made it; how fast its machine was is not known"
        )
    begun = {event.fields.get("version", 0) + 1 for event in run.events if event.kind == "run"}
    counted = [row for row in steps if row["version"] not in begun]
    if len(counted) < ENOUGH_STEPS:
        raise UserError(
            f"{folder} has {len(counted)} train steps beside the first, and it takes {ENOUGH_STEPS} to know the pace"
        )
    work = [each for row in counted for each in row["work"]]
    tokens = sum(each["tokens"] for each in work if each["kind"] == "train")
    beside_s = sum(row["trainer_s"] - _seconds(row["work"]) for row in counted)
    return Measured(
        run=run,
        config=config,
        device=steps[-1]["device"],
        peak_bytes=max(row["peak_memory_bytes"] for row in steps),
        shape=find_model(config.model.path or ""),
        work=work,
        rest_s=max(0.0, beside_s / tokens) if tokens else 0.0,
        trainer_s={row["version"]: row["trainer_s"] for row in counted},
    )


def _steps(run: RunRecord) -> list[dict[str, Any]]:
    """Rows of work, the last one of each version; lines that say too little are left out."""
    kept = {row["version"]: row for row in run.work if _is_whole(row)}
    return [kept[version] for version in sorted(kept)]


def _is_whole(row: Mapping[str, Any]) -> bool:
    work = row.get("work")
    numbers = all(is_number(row.get(name)) for name in ("peak_memory_bytes", "trainer_s"))
    return numbers and isinstance(row.get("device"), str) and isinstance(work, list) and all(map(_is_work, work))


def _is_work(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return False
    names = ("share", "num", "seconds", *AMOUNTS.get(row["kind"], ()))
    return all(is_number(row.get(name)) for name in names) and row["num"] > 0


SAME_PACE = ("model.path", "adapter.kind", "model.parity", "generate.dtype", "train.compute_dtype", "run.threads")
"""Settings without which a machine goes at another pace."""


def check_same_pace(run: Measured, config: Config, whose: str) -> None:
    """Raises UserError where the run says nothing exact of `config`, which is that of `whose`."""
    for key in SAME_PACE:
        mine, its = run.config.setting(key), config.setting(key)
        if mine != its and not (key == "model.path" and find_model(its or "") == run.shape):
            raise UserError(
                f"--calibrate {run.name} has {key} {mine}, and {whose} has {its}: calibrate on a run with the "
                "same one, a few steps will do"
            )


def pace(runs: Sequence[Measured]) -> Pace:
    """Of runs of one model on one machine. Raises UserError where they are not."""
    first = runs[0]
    for other in runs[1:]:
        check_same_pace(first, other.config, other.name)
        if first.device != other.device:
            raise UserError(f"--calibrate: {first.name} ran on {first.device}, and {other.name} on {other.device}")
    if not first.config.run.share_cores:
        raise UserError(
            f"--calibrate {first.name}: with run.share_cores = false engine and trainer compute on the same cores at "
            "the same time, and what each takes alone can't be told; calibrate on a run that shares them"
        )
    work = [row for run in runs for row in run.work]
    decoding = _decoding(first, [row for row in work if row["kind"] == "pass"])
    rate, trainer_slowdown = _rate(first, [row for row in work if row["kind"] in PASSES])
    return Pace(
        pass_s=decoding.pass_s,
        row_s=decoding.row_s,
        cached_s=decoding.cached_s,
        prefill_s=decoding.prefill_s,
        rate=rate,
        update_s=_mean_s(work, "update") + _mean_s(work, "critic update"),
        rest_s=fmean(run.rest_s for run in runs),
        sync_s=fmean(fmean(run.recording.sync.seen_s.values()) for run in runs),
        lead_s=fmean(_lead_s(run) for run in runs),
        score_s=fmean(_score_s(run) for run in runs),
        engine_slowdown=decoding.slowdown,
        trainer_slowdown=trainer_slowdown,
        device=first.device,
        source=", ".join(run.name for run in runs),
        assumed=_not_seen(work),
    )


def _not_seen(work: Sequence[Work]) -> tuple[str, ...]:
    """Of engine and trainer, whose slowdown is assumed: its work was not seen both alone and beside the other's."""
    found = []
    for who, kinds in (("engine", ("pass",)), ("trainer", tuple(PASSES))):
        rows = [row for row in work if row["kind"] in kinds]
        alone = sum(row["num"] for row in rows if row["share"] == 1.0)
        if alone < ENOUGH_ALONE or all(row["share"] == 1.0 for row in rows):
            found.append(who)
    return tuple(found)


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
        return train_flops(run.shape, row["tokens"], row["pairs"], passes_of(row["kind"], run.config.adapter.kind))

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
    varied = _contexts_vary(rows)
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


def _lead_s(run: Measured) -> float:
    """Of a train step, what its trainer's thread knows nothing of."""
    steps = run.recording.train.seen_s  # by the version that a step begins from
    leads = [took_s - run.trainer_s[version + 1] for version, took_s in steps.items() if version + 1 in run.trainer_s]
    return max(0.0, fmean(leads)) if leads else 0.0


def _seconds(work: Iterable[Work]) -> float:
    return sum(row["seconds"] for row in work if row["kind"] != "pass")


def _score_s(run: Measured) -> float:
    graded = run.recording.rollouts.graded.values()
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
    shape, engine_bytes = runs[0].shape, 2.0 if runs[0].config.generate.dtype == "bfloat16" else 4.0
    shares = {"training": found.rate / gpu.bf16_flops}
    if found.prefill_s:
        shares["prefill"] = 2.0 * shape.num_matrix_params / (gpu.bf16_flops * found.prefill_s)
    if _contexts_vary(runs[0].work) and found.cached_s:
        shares["bandwidth"] = shape.kv_bytes_per_token(engine_bytes) / (gpu.bandwidth * found.cached_s)
    for name, share in shares.items():
        if share > 1:
            raise UserError(
                f"--calibrate {found.source}: by its {name} the GPU reached {share:.0%} of what a {gpu.title} can, so "
                "it is another one, or the run's work was not timed rightly"
            )
    bandwidth = gpu.bandwidth * shares.get("bandwidth", Efficiency().bandwidth)
    reading_s = engine_bytes * shape.num_touched_params(1) / bandwidth
    passes = [row for row in runs[0].work if row["kind"] == "pass"]
    rows = sum(row["rows"] for row in passes) / sum(row["num"] for row in passes)
    return {**shares, "step_overhead_s": max(0.0, found.pass_s + found.row_s * rows - reading_s)}


def _contexts_vary(work: Sequence[Work]) -> bool:
    """Whether what a cached token costs can be told from the rest of a pass."""
    contexts = [row["cached"] / row["rows"] for row in work if row["kind"] == "pass" and row["rows"]]
    return bool(contexts) and max(contexts) >= VARIED * min(contexts)
