"""Sweeps: one workload simulated under many schedules, `--sweep KEY=VALUES`, several of them multiplied."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from headway import program, simulation
from headway.config import Config, Resolved, full_key, last_word, resolve
from headway.reports.summary import summarise, timeline
from headway.reports.sweep_table import SweptRun
from headway.simulate.workload import Lengths
from headway.trace import Event
from headway.types import UserError

MAX_RUNS = 200
"""A page with more would be too large to open, and a table too long to read."""

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_FORMS = "KEY=a..b (whole numbers), KEY=a..b..step, KEY=v1,v2,v3 or, of values with commas, 'KEY=v1;v2'"

Choice = dict[str, str]
"""One run of a sweep: each swept key and its value, as on the command line."""


@dataclass(frozen=True)
class Sweep:
    """A key and the values that it takes in turn."""

    key: str
    values: tuple[str, ...]


def parse(words: Sequence[str]) -> list[Sweep]:
    """The words of `--sweep`, in order. Raises UserError for one that isn't understood.

    >>> parse(["run-ahead=0..8..4"])
    [Sweep(key='schedule.run_ahead', values=('0', '4', '8'))]
    >>> parse(["stragglers=accept;interrupt,drop"])
    [Sweep(key='schedule.stragglers', values=('accept', 'interrupt,drop'))]
    """
    sweeps = [_parse(word) for word in words]
    keys = [sweep.key for sweep in sweeps]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"--sweep {key} is given {keys.count(key)} times; give all its values in one")
    return sweeps


def _parse(word: str) -> Sweep:
    key, equals, values = word.partition("=")
    if not (key and equals and values):
        raise UserError(f"--sweep {word} is not understood; it may be {_FORMS}")
    return Sweep(full_key(key.removeprefix("--")), _range(word, values) if ".." in values else _list(word, values))


def _list(word: str, values: str) -> tuple[str, ...]:
    listed = [value.strip() for value in values.split(";" if ";" in values else ",")]
    if not all(listed):
        raise UserError(f"--sweep {word} has an empty value; it may be {_FORMS}")
    return tuple(dict.fromkeys(listed))


def _range(word: str, values: str) -> tuple[str, ...]:
    match = _RANGE.fullmatch(values)
    if not match:
        raise UserError(f"--sweep {word} is not understood; it may be {_FORMS}")
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if step < 1 or last < first:
        raise UserError(f"--sweep {word} is an empty range; it goes up, as in {word.partition('=')[0]}=0..8..2")
    numbers = range(first, last + 1, step)
    _refuse_too_many(len(numbers))
    return tuple(map(str, numbers))


def choices(sweeps: Sequence[Sweep]) -> list[Choice]:
    """Every combination of the values; those of the last sweep change first."""
    _refuse_too_many(math.prod(len(sweep.values) for sweep in sweeps))
    keys = [sweep.key for sweep in sweeps]
    return [dict(zip(keys, values, strict=True)) for values in product(*(sweep.values for sweep in sweeps))]


def _refuse_too_many(num: int) -> None:
    if num > MAX_RUNS:
        raise UserError(f"--sweep asks for {num} runs, and at most {MAX_RUNS} are simulated at once; give fewer values")


def in_words(choice: Choice) -> str:
    """
    >>> in_words({"schedule.run_ahead": "1", "schedule.order": "started"})
    'run_ahead 1, order started'
    """
    return ", ".join(f"{last_word(key)} {value}" for key, value in choice.items())


# ---- simulating them


@dataclass(frozen=True)
class SweepJob:
    """One run of a sweep that is still to be simulated.

    words: its overrides; replayed: the run of which it is a replay; for_page: how many runs a page will draw (0: none).
    """

    choice: Choice
    words: list[str]
    resolved: Resolved
    replayed: Path | None = None
    for_page: int = 0

    @property
    def num_rollouts(self) -> int:
        return self.resolved.config.run.steps * self.resolved.config.schedule.batch_size


def jobs(
    recipe: Path | None,
    overrides: Sequence[str],
    sweeps: Sequence[Sweep],
    *,
    replayed: Path | None = None,
    for_page: bool = False,
) -> list[SweepJob]:
    """Every combination of the swept values. Raises UserError that names a combination which is refused.

    replayed: the folder of the run whose replays these are; `recipe` is its configuration.
    """
    all_choices = choices(sweeps)
    found: list[SweepJob] = []
    for choice in all_choices:
        words = [*overrides, *(f"--{key}={value}" for key, value in (choice | _taken_back(choice)).items())]
        with _named(choice):
            resolved = resolve(recipe, words)
            program.rules(resolved.config, simulated=True)
        found.append(SweepJob(choice, words, resolved, replayed, len(all_choices) if for_page else 0))
    return found


def _taken_back(choice: Choice) -> Choice:
    """A window is for one of the orders that are swept; the others must not be refused for it."""
    needs_no_window = choice.get("schedule.order", "window") != "window" and "schedule.window" not in choice
    return {"schedule.window": "none"} if needs_no_window else {}


def without_sweep(jobs: Sequence[SweepJob], recipe: Path | None, overrides: Sequence[str]) -> int:
    """Which of them is most like what the command would do without its sweeps; the first among equals."""
    try:
        config = resolve(recipe, overrides).config
    except UserError:  # it may be valid with swept values alone
        return 0
    alike = [sum(job.resolved.config.setting(key) == config.setting(key) for key in job.choice) for job in jobs]
    return alike.index(max(alike))


@contextmanager
def _named(choice: Choice) -> Iterator[None]:
    """What is wrong with one run of a sweep says which."""
    try:
        yield
    except UserError as error:
        raise UserError(f"--sweep, at {in_words(choice)}: {error}") from None


def simulate(jobs: Sequence[SweepJob], done: Callable[[], object] = lambda: None) -> list[SweptRun]:
    """Simulate them, on all cores where that pays. done: called as each run ends."""
    runs: list[SweptRun] = []
    for one in _on_all_cores(jobs) if _is_long(jobs) else map(swept, jobs):
        base = (runs[0] if runs else one).figures["throughput"]
        speedup = one.figures["throughput"] / base if base else None
        runs.append(replace(one, figures={**one.figures, "speedup": speedup}))
        done()
    return runs


PARALLEL_FROM = 60_000
"""Rollouts of a sweep, a few seconds' work; a process takes half a second to start."""


def _is_long(jobs: Sequence[SweepJob]) -> bool:
    return len(jobs) > 1 and sum(job.num_rollouts for job in jobs) >= PARALLEL_FROM


def _on_all_cores(jobs: Sequence[SweepJob]) -> Iterator[SweptRun]:
    """In processes that are started anew: this one may have threads."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(jobs)), spawn, _leave_interrupts_to_the_parent) as pool:
        try:
            yield from pool.map(swept, jobs)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def swept(job: SweepJob) -> SweptRun:
    """Simulate one run of a sweep -> its figures, and what a page draws of it."""
    config = job.resolved.config
    skip_steps = config.simulate.skip_steps
    with _named(job.choice):
        events = simulation.replay(job.replayed, job.words) if job.replayed else simulation.simulate(config)
        lines = timeline(events)
        figures = summarise(lines, events, skip_steps)
    started = _started(events, simulation.whole_lengths(config, job.replayed), program.sizes(config).num_members)
    seen = None
    if job.for_page:
        from headway.reports.simulation_pictures import see

        seen = see(lines, events, started, skip_steps, job.for_page, replayed=job.replayed is not None)
    kept = {name: value for name, value in figures.items() if name not in ("batches", "lags")}
    return SweptRun(job.choice, {**kept, **_more_figures(config, figures["trained_length"], started)}, seen)


def _more_figures(config: Config, trained_length: float | None, started: Sequence[float]) -> dict[str, Any]:
    """What a sweep says of a run beside `summarise`; see `SweptRun`."""
    true_length = fmean(started) if started else None
    return {
        "run_ahead": config.schedule.run_ahead,
        "true_length": true_length,
        "length_ratio": trained_length / true_length if trained_length is not None and true_length else None,
        "why": program.bound(config).why,
    }


def _started(events: Sequence[Event], lengths: Lengths, num_members: int) -> list[float]:
    """The whole length of every rollout that was started, each identity once."""
    started = (event for event in events if event.kind == "started" and not event["evaluation"])
    identities = dict.fromkeys(event["group"] * num_members + event["member"] for event in started)
    return [lengths(identity) for identity in identities]
