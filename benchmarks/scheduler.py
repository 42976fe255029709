"""What the schedule costs: CPU time per rollout, and memory, of Headway's ledger and loop on virtual time, beside the
same schedule as a model in SimPy, from 10^3 to 10^6 rollouts and up to 10^4 lanes.

Every cell is a process of its own, the best of `--repeats`. Both meet the same lengths and do the same: lanes,
admission, batches in order of finish, versions, lags (`tests/test_scheduler_benchmark.py` holds that they agree on
every batch and lag). Headway does it with what a real run is driven by: tasks of asyncio, the ledger with its checks,
rules asked at every instant, a trace event for every transition, which is counted here and not kept.

A second table holds what each rule costs.

    python benchmarks/scheduler.py [--repeats 3] [--rollouts 1000000]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import simpy

from headway import clock, program
from headway.config import resolve
from headway.simulate.doubles import Doubles, Times
from headway.simulate.workload import Lengths, make_lengths
from headway.trace import Event, Trace

Taken = Callable[[list[int], list[int]], object]
"""Told of every batch: its rollouts, by number in order of start, and their lags."""


@dataclass(frozen=True)
class Case:
    """A workload: mean length 1, exponential; rules: further words of a configuration."""

    lanes: int
    batch_size: int
    steps: int
    run_ahead: int = 1
    train_time: float = 0.5
    rules: tuple[str, ...] = ()

    @property
    def lengths(self) -> Lengths:
        return make_lengths("exponential", 1.0, seed=0)


def headway(case: Case, taken: Taken) -> int:
    """Simulate it with Headway -> how many rollouts were started."""
    words = [f"--lanes={case.lanes}", f"--batch-size={case.batch_size}", f"--steps={case.steps}"]
    words += [f"--run-ahead={case.run_ahead}", "--group-size=1", *case.rules]
    config = resolve(None, words).config
    settings, rules = program.sizes(config), program.rules(config, simulated=True)
    doubles = Doubles(
        case.lengths,
        Times(case.train_time),
        num_members=settings.num_members,
        pinned=rules.in_flight == "pinned",
    )
    started = 0

    def listen(event: Event) -> None:
        nonlocal started
        if event.kind == "started":
            started += 1
        elif event.kind == "taken":
            taken(event["rollouts"], event["lags"])

    clock.run(program.drive(config, doubles, settings, rules, Trace(listen), clock_name="virtual"), virtual=True)
    return started


def in_simpy(case: Case, taken: Taken) -> int:
    """The same schedule in SimPy: a process per lane, slots as a container, finished rollouts as a store."""
    environment = simpy.Environment()
    slots = simpy.Container(environment, init=(case.run_ahead + 1) * case.batch_size)
    finished = simpy.Store(environment)
    lengths, started, version = case.lengths, 0, 0

    def lane() -> Generator[simpy.Event, Any, None]:
        nonlocal started
        while True:
            yield slots.get(1)
            number, begun_with = started, version
            started += 1
            yield environment.timeout(lengths(number))
            yield finished.put((number, begun_with))

    def trainer() -> Generator[simpy.Event, Any, None]:
        nonlocal version
        for _ in range(case.steps):
            batch = []
            for _ in range(case.batch_size):
                batch.append((yield finished.get()))
            taken([number for number, _ in batch], [version - begun_with for _, begun_with in batch])
            yield environment.timeout(case.train_time)
            version += 1
            yield slots.put(case.batch_size)

    for _ in range(case.lanes):
        environment.process(lane())
    environment.run(until=environment.process(trainer()))
    return started


PROGRAMS = {"headway": headway, "simpy": in_simpy}


def measure(program: str, case: Case) -> dict[str, float]:
    """CPU time per started rollout, and how much the process grew. Both programs under one setting of the collector."""
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.process_time()
    with clock.rare_collections(250_000):
        started = PROGRAMS[program](case, lambda rollouts, lags: None)
    spent_s = time.process_time() - began_s
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"started": started, "us": spent_s / started * 1e6, "seconds": spent_s, "mib": grown_mib}


def in_a_process(program: str, case: Case, repeats: int) -> dict[str, float]:
    """The fastest of `repeats` fresh processes."""
    words = [program, str(case.lanes), str(case.batch_size), str(case.steps), str(case.run_ahead), str(case.train_time)]
    command = [sys.executable, str(Path(__file__).resolve()), "--one", *words, *case.rules]
    outputs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(repeats)]
    return min(map(json.loads, outputs), key=lambda measured: measured["us"])


SIZES = (
    *((64, num) for num in (1_000, 10_000, 100_000, 1_000_000)),
    *((1_000, num) for num in (10_000, 100_000, 1_000_000)),
    *((10_000, num) for num in (100_000, 1_000_000)),
)
"""(lanes, rollouts to be trained); a batch is as large as the lanes are many."""


def sizes_table(repeats: int, most_rollouts: int) -> None:
    print("| lanes = batch | trained | µs per rollout | MiB | in SimPy: µs | MiB | ratio |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for lanes, num_rollouts in SIZES:
        if num_rollouts > most_rollouts:
            continue
        case = Case(lanes, lanes, math.ceil(num_rollouts / lanes))
        ours, theirs = (in_a_process(program, case, repeats) for program in PROGRAMS)
        print(
            f"| {lanes:,} | {lanes * case.steps:,} | {ours['us']:.1f} | {ours['mib']:.0f} | "
            f"{theirs['us']:.1f} | {theirs['mib']:.0f} | {ours['us'] / theirs['us']:.1f} |",
            flush=True,
        )


RULES = {
    "finished": (),
    "started": ("--order=started",),
    "window": ("--order=window", "--window={batch}"),
    "drop at max_lag 2": ("--stragglers=drop", "--max-lag=2"),
    "interrupt at max_lag 2": ("--stragglers=interrupt", "--max-lag=2"),
    "in-flight updates": ("--in-flight=keep",),
    "new weights restart": ("--in-flight=restart",),
    "a deadline of 3": ("--deadline-s=3",),
    "groups of 8": ("--group-size=8",),
    "groups of 8, and 2 redundant": ("--group-size=8", "--redundant=2"),
}


def rules_table(repeats: int) -> None:
    lanes = (64, 1_024)
    print(f"\n| rule | {' | '.join(f'{num:,} lanes: µs per rollout' for num in lanes)} |\n|---|--:|--:|")
    for name, rules in RULES.items():
        costs = []
        for num in lanes:
            words = tuple(word.format(batch=num) for word in rules)
            case = Case(num, num, steps=math.ceil(50_000 / num), run_ahead=2, rules=words)
            costs.append(in_a_process("headway", case, repeats)["us"])
        print(f"| {name} | {' | '.join(f'{cost:.1f}' for cost in costs)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=1_000_000, help="leave out the rows with more")
    parser.add_argument("--one", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        program, lanes, batch_size, steps, run_ahead, train_time, *rules = options.one
        case = Case(int(lanes), int(batch_size), int(steps), int(run_ahead), float(train_time), tuple(rules))
        print(json.dumps(measure(program, case)))
        return
    sizes_table(options.repeats, options.rollouts)
    rules_table(options.repeats)


if __name__ == "__main__":
    main()
