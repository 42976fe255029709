"""Figures of a simulated run after its warm-up, read from the trace by themselves: no report has a hand in them."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean

from headway.config import resolve
from headway.simulation import simulate
from headway.trace import Event

SEEDS = range(5)
STEPS, WARM_UP = 400, 60
LENGTHS = {
    "exp": ("--lengths=exponential",),
    "lognormal": ("--lengths=lognormal:1",),
    "capped": ("--lengths=lognormal:1", "--longest=8"),
    "const": ("--lengths=constant",),
}
"""Each of mean 1, before the cap."""


@dataclass(frozen=True)
class Workload:
    """lengths: a name in LENGTHS, or the file of an empirical distribution; rules: words of the schedule's settings."""

    lengths: str
    lanes: int
    batch_size: int
    train_time: float
    run_ahead: int
    rules: tuple[str, ...] = ()
    steps: int = STEPS
    warm_up: int = WARM_UP

    def words(self, seed: int) -> list[str]:
        sizes = {"lanes": self.lanes, "batch-size": self.batch_size, "group-size": 1, "run-ahead": self.run_ahead}
        times = {"train-time": self.train_time, "steps": self.steps, "seed": seed}
        lengths = LENGTHS.get(self.lengths, (f"--lengths=file:{self.lengths}",))
        return [*lengths, *(f"--{name}={value}" for name, value in {**sizes, **times}.items()), *self.rules]


Figures = dict[str, float]
Job = tuple[Workload, int]


def figures(job: Job) -> Figures:
    """Of one seed: over the window [end of the warm-up, end of the run], and over the batches taken in it."""
    workload, seed = job
    events = simulate(resolve(None, workload.words(seed)).config)
    return of_events(events, workload)


def of_events(events: Sequence[Event], workload: Workload) -> Figures:
    trained_s = [0.0, *(event.at_s for event in events if event.kind == "trained")]
    began_s, ended_s = trained_s[workload.warm_up], trained_s[-1]
    window_s = ended_s - began_s
    taken = [event for event in events if event.kind == "taken"][workload.warm_up :]
    tokens = {event["rollout"]: event["tokens"] for event in events if event.kind == "generated"}
    dropped = [event for event in events if event.kind == "dropped" and event.at_s > began_s]
    lags = [lag for event in taken for lag in event["lags"]]
    lengths = [tokens[rollout] for event in taken for rollout in event["rollouts"]]
    true_length = fmean(tokens.values())
    batch_tokens = [sum(tokens[rollout] for rollout in event["rollouts"]) for event in taken]
    token_lags = [event["token_lag"] * num for event, num in zip(taken, batch_tokens, strict=True)]
    return {
        "throughput": len(lags) / window_s,
        "lanes": busy(events, began_s, ended_s) / window_s / workload.lanes,
        "trainer": len(taken) * workload.train_time / window_s,
        "mean_lag": fmean(lags),
        "max_lag": max(lags),
        "beyond": sum(lag > workload.run_ahead for lag in lags) / len(lags),
        "length": fmean(lengths),
        "token_lag": sum(token_lags) / sum(lengths),
        "drop_fraction": len(dropped) / (len(dropped) + len(lags)),
        "dropped_length": sum(event["tokens"] for event in dropped) / max(1, len(dropped)),
        "length_ratio": fmean(lengths) / true_length,
    }


def busy(events: Sequence[Event], began_s: float, ended_s: float) -> float:
    """Time that lanes were held within the window; a rollout still in flight at its end held one up to there."""
    started: dict[int, float] = {}
    held_s = 0.0
    for event in events:
        if event.kind == "started":
            started[event["rollout"]] = event.at_s
        elif event.kind == "generated":
            held_s += max(0.0, event.at_s - max(started.pop(event["rollout"]), began_s))
    return held_s + sum(ended_s - max(since, began_s) for since in started.values())


def of_all_seeds(workloads: Sequence[Workload]) -> list[dict[str, list[float]]]:
    """For each workload every figure of every seed, simulated on all cores."""
    jobs = [(workload, seed) for workload in workloads for seed in SEEDS]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(figures, jobs))
    by_workload = [results[start : start + len(SEEDS)] for start in range(0, len(results), len(SEEDS))]
    return [{name: [result[name] for result in of_one] for name in of_one[0]} for of_one in by_workload]
