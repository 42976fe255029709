"""A plan in the terminal and as JSON: memory line by line, times, schedules side by side, and what to choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from headway.plan.lengths import Answers
from headway.plan.memory import Generation, Phase, Pool
from headway.plan.proposal import Assumption, Candidate, Plan
from headway.reports.wording import percent

WIDTH_OF_A_FILE = 120


def show(plan: Plan, stream: TextIO) -> None:
    """Print it for people; into a file without colours and at a fixed width."""
    console = console_of(stream)
    console.print(headline(plan), style="bold")
    console.print(assumed(plan), style="dim")
    console.print()
    tables = [
        _states(plan),
        *(memory(pool, plan.request.hardware.budget) for pool in plan.shown.layout.placed.pools),
        _times(plan),
    ]
    for title, table in [*tables, *([_schedules(plan)] if plan.simulated else [])]:
        console.print(title, style="bold")
        console.print(table)
        console.print()
    if plan.batches:
        title, table = _batches(plan)
        console.print(title, style="bold")
        console.print(table)
        console.print()
    if plan.simulated:
        console.print(SAID, style="dim")
        console.print()
    for reason in verdict(plan):
        console.print(f"- {reason}")


def console_of(stream: TextIO) -> Console:
    return Console(file=stream, highlight=False, width=None if stream.isatty() else WIDTH_OF_A_FILE)


def headline(plan: Plan) -> str:
    request = plan.request
    gpu = request.hardware.gpu
    doubt = f" ({gpu.doubt})" if gpu.doubt else ""
    return (
        f"{request.shape.name}, {billions(request.shape.num_params)} parameters{_active(plan)}; "
        f"{request.hardware.num} x {gpu.title}{doubt}; {_what(plan)}"
    )


def _active(plan: Plan) -> str:
    shape = plan.request.shape
    return f", {billions(shape.num_active_params)} active" if shape.num_active_params != shape.num_params else ""


def _what(plan: Plan) -> str:
    models = plan.request.models
    adapter = f" with an adapter of {models.adapter_params:,}" if models.adapter_params is not None else ""
    kl = " with KL" if models.reference and plan.request.algorithm == "grpo" else ""
    return f"{plan.request.algorithm.upper()}{kl}{adapter}"


def billions(number: float) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"


def assumed(plan: Plan) -> str:
    """The workload, and of each value where it is from."""
    return where_from(plan.request.assumptions, plan.request.answers)


def where_from(assumptions: Sequence[Assumption], answers: Answers) -> str:
    words = [f"{item.name} {_plain(item.value)} ({item.origin})" for item in assumptions]
    return f"{'; '.join(words)}; an answer has {answers.mean:,.0f} tokens on average"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def gigabytes(num_bytes: float) -> str:
    """
    >>> gigabytes(31.5e9), gigabytes(5.0e6)
    ('31.50', '0.005')
    """
    return f"{num_bytes / 1e9:.2f}" if num_bytes >= 0.1e9 else f"{num_bytes / 1e9:.3f}"


Titled = tuple[str, Table]


def _states(plan: Plan) -> Titled:
    nominal = plan.request.nominal
    of = f"a nominal {nominal:.3g}" if nominal else f"{plan.request.shape.num_params:,}"
    table = columns("model", "GB")
    for name, num_bytes in plan.states.items():
        table.add_row(name, gigabytes(num_bytes))
    table.add_row("total", gigabytes(sum(plan.states.values())), style="bold")
    return f"States of all models together, {of} parameters each", table


def memory(pool: Pool, budget: float) -> Titled:
    """Of its fullest phase, line by line."""
    phase = pool.peak
    others = ", ".join(f"{other.name} {gigabytes(other.expected)}" for other in pool.phases if other is not phase)
    fits = "fits" if phase.expected <= budget else "does not fit"
    title = (
        f"Memory of {of_pool(pool)}: {gigabytes(phase.expected)} of {gigabytes(budget)} GB, {fits}. "
        f"Fullest while in phase {phase.name} ({others})"
    )
    table = columns(phase.name, "at least", "expected", "why")
    for line in phase.lines:
        table.add_row(line.name, gigabytes(line.floor), gigabytes(line.expected), line.why)
    table.add_row("total", gigabytes(phase.floor), gigabytes(phase.expected), "", style="bold")
    return title, table


def of_pool(pool: Pool) -> str:
    """Which GPUs, in words."""
    if pool.name in ("every GPU", "this process"):
        return pool.name
    return f"each of {pool.num_gpus} {pool.name}" if pool.num_gpus > 1 else f"the {pool.name.removesuffix('s')}"


def _times(plan: Plan) -> Titled:
    table = columns("what", "", "")
    for name, value, why in times(plan):
        table.add_row(name, value, why)
    return f"Times of {plan.shown.layout.name}, {_efficiencies(plan)}", table


def times(plan: Plan) -> list[tuple[str, str, str]]:
    """What takes how long, and why."""
    took, request = plan.shown.times, plan.request
    generation = plan.shown.layout.placed.job.generation
    bound = "arithmetic" if took.arithmetic_bound else "the memory"
    where = f"from {took.crossover:,.0f} rollouts on" if math.isfinite(took.crossover) else "at no number of rollouts"
    return [
        (
            "a decode step",
            f"{took.decode_step_s * 1e3:.2f} ms",
            f"{_engines(generation)}, up to {generation.lanes_each} rollouts each at "
            f"{took.context:,.0f} tokens; {bound} is the bound, arithmetic {where}",
        ),
        (
            "decoding",
            f"{took.decode_tokens_per_s:,.0f} tokens/s",
            f"all engines, all lanes busy; there is room for {took.room:,} rollouts at their longest",
        ),
        ("prefill", f"{took.prefill_tokens_per_s:,.0f} tokens/s", f"prompts of {request.answers.prompt:g} tokens"),
        ("an answer", f"{took.answer_s:.3g} s", f"of {request.answers.mean:,.0f} tokens, while others are prefilled"),
        ("a train step", f"{took.train_s:.3g} s", _train_step(plan)),
        *((f"new weights by {way.name}", milliseconds(way.seconds), way.why) for way in took.sync_ways),
    ]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _train_step(plan: Plan) -> str:
    """Its parts, and which of them hides behind which."""
    took, request = plan.shown.times, plan.request
    job = plan.shown.layout.placed.job
    words = (
        f"{request.batch} answers in micro-batches of {job.micro_batch_tokens:,.0f} tokens, {request.passes.number:g} "
        f"forward passes' worth of arithmetic: {took.train_arithmetic_s:.3g} s"
    )
    if took.train_hidden_s:
        sharding = job.training.sharding
        which = "hidden behind it" if took.train_hidden_s <= took.train_arithmetic_s else "which is longer"
        words += f"; ZeRO {sharding.zero} sends for {took.train_hidden_s:.3g} s, {which}"
    if took.train_shown_s:
        words += f"; tensor parallelism for {took.train_shown_s:.3g} s more"
    return words


def _engines(generation: Generation) -> str:
    """
    >>> _engines(Generation(replicas=4, tensor=1, lanes=8)), _engines(Generation(replicas=1, tensor=2, lanes=8))
    ('4 engines of 1 GPU', '1 engine of 2 GPUs')
    """
    replicas, tensor = generation.replicas, generation.tensor
    return f"{replicas} engine{'s' * (replicas > 1)} of {tensor} GPU{'s' * (tensor > 1)}"


def _efficiencies(plan: Plan) -> str:
    e = plan.request.efficiency
    return (
        f"at {e.bandwidth:.0%} of memory bandwidth, {e.prefill:.0%} (prefill) and {e.training:.0%} (training) of "
        f"arithmetic, {e.link:.0%} of links, {e.step_overhead_s * 1e3:g} ms overhead a decode step"
    )


COLUMNS = ("GPUs", "run_ahead", "tokens/s", "step s", "mean lag", "token lag", "max lag", "trainer idle", "lanes idle")

SAID = (
    "tokens/s: trained answer tokens; price: of a million of them; token lag: mean lag over trained tokens; idle: "
    "share of the time (by turns, one idles while the other works); simulated by the real scheduler on virtual time"
)


def _schedules(plan: Plan) -> Titled:
    price = plan.request.price is not None
    table = columns(*COLUMNS, *(["price"] if price else []))
    for candidate in plan.simulated:
        table.add_row(*row(candidate, price=price), style="bold green" if candidate is plan.chosen else None)
    return "Schedules", table


def row(candidate: Candidate, *, price: bool) -> list[str]:
    """Of a simulated candidate, by COLUMNS."""
    figures = candidate.figures
    assert figures is not None
    cells = [
        candidate.layout.name,
        f"{candidate.run_ahead:g}",
        f"{figures.tokens_per_s:,.0f}",
        f"{figures.step_s:.3g}",
        f"{figures.mean_lag:.2f}",
        f"{figures.token_lag:.2f}",
        f"{figures.max_lag:g}",
        percent(figures.trainer_idle),
        percent(figures.lanes_idle),
    ]
    return [*cells, f"{figures.price:.3g}"] if price else cells


BATCH_COLUMNS = ("batch", "lanes", "tokens/s", "step s", "mean lag", "token lag", "GB a GPU")


def batch_row(batch: int, lanes: int, candidate: Candidate, *, price: bool) -> list[str]:
    """By BATCH_COLUMNS."""
    figures, memory = candidate.figures, gigabytes(candidate.layout.placed.fullest)
    if figures is None:
        return [str(batch), str(lanes), "does not fit", *[""] * 3, memory, *[""] * price]
    cells = [
        str(batch),
        str(lanes),
        f"{figures.tokens_per_s:,.0f}",
        f"{figures.step_s:.3g}",
        f"{figures.mean_lag:.2f}",
        f"{figures.token_lag:.2f}",
        memory,
    ]
    return [*cells, f"{figures.price:.3g}"] if price else cells


def batch_rows(plan: Plan) -> list[list[str]]:
    """Of the recommended layout with each batch, the smallest first."""
    request, chosen = plan.request, plan.chosen
    assert chosen is not None
    found = [(other.batch, other.lanes, other.candidate) for other in plan.batches]
    found.append((request.batch, request.lanes, chosen))
    price = request.price is not None
    return [batch_row(*one, price=price) for one in sorted(found, key=lambda one: one[0])]


def _batches(plan: Plan) -> Titled:
    table = columns(*BATCH_COLUMNS, *(["price"] if plan.request.price is not None else []))
    for cells in batch_rows(plan):
        table.add_row(*cells, style="bold green" if cells[0] == str(plan.request.batch) else None)
    return "The recommended layout with other batches", table


def columns(*names: str) -> Table:
    """An empty table, for words on the left and numbers on the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for place, column in enumerate(names):
        words = column in ("why", "") or place == 0
        table.add_column(column, justify="left" if words else "right", no_wrap=column != "why" and place < 2)
    return table


def verdict(plan: Plan) -> Sequence[str]:
    words = "recommended: " if plan.chosen else ""
    return [f"{words}{plan.reasons[0]}", *plan.reasons[1:]]


def to_json(plan: Plan) -> dict[str, Any]:
    """All figures, in bytes and seconds; what is infinite is null."""
    request = plan.request
    return {
        "model": {
            "name": request.shape.name,
            "source": request.shape.source,
            "params": request.shape.num_params,
            "active_params": request.shape.num_active_params,
            "kv_bytes_per_token": request.shape.kv_bytes_per_token(),
        },
        "gpu": {**asdict(request.hardware.gpu), "num": request.hardware.num, "budget_bytes": request.hardware.budget},
        "algorithm": request.algorithm,
        "settings": {
            "nominal_params": request.nominal,
            "bytes_per_parameter": asdict(request.precision),
            "price": request.price,
            "zero": request.zero,
            "tensor": request.tensor,
            "pipeline": request.pipeline,
            "expert": request.expert,
            "micro_batch_tokens": request.micro_batch_tokens,
            "sleep": request.sleep,
            "checkpointing": request.checkpointing,
            "whole_logits": not request.chunked_logits,
            "offload": request.offload,
            "adapter_params": request.models.adapter_params,
        },
        "assumptions": [asdict(item) for item in request.assumptions],
        "efficiency": asdict(request.efficiency),
        "state_bytes": plan.states,
        "candidates": [_candidate(candidate) for candidate in plan.candidates],
        "other_batches": [
            {"batch": other.batch, "lanes": other.lanes, **_candidate(other.candidate)} for other in plan.batches
        ],
        "chosen": plan.candidates.index(plan.chosen) if plan.chosen else None,
        "reasons": list(plan.reasons),
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    layout = candidate.layout
    return {
        "sharing": layout.sharing,
        "generating": layout.generating,
        "training": layout.training,
        "engine_gpus": layout.placed.job.generation.tensor,
        "run_ahead": candidate.run_ahead,
        "fits": candidate.fits,
        "memory": {
            pool.name: {phase.name: phase_figures(phase) for phase in pool.phases} for pool in layout.placed.pools
        },
        "micro_batch_tokens": layout.placed.job.micro_batch_tokens,
        "times": {name: _finite(value) for name, value in asdict(candidate.times).items()},
        "rollouts_per_s_by_law": candidate.rate,
        "expected_mean_lag": candidate.expected_lag,
        "simulated": asdict(candidate.figures) if candidate.figures else None,
    }


def phase_figures(phase: Phase) -> dict[str, Any]:
    return {
        "floor_bytes": phase.floor,
        "expected_bytes": phase.expected,
        "lines": [asdict(line) for line in phase.lines],
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
