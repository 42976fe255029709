"""What running ahead buys on this machine: seconds per step of the quickstart at several run_ahead, in one run.

Engine and trainer have one thread each at every setting, so overlapping is all that differs. Beside the measured ratio
stands the limit (g + t) / max(g, t), from the generation time g and the train time t of the synchronous runs.

    python benchmarks/overlap.py [--repeats 3] [--steps 60]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

from headway.trace import Event, read_trace

RUN_AHEAD = (0, 1, 2)
WARM_UP_STEPS = 5


def run(run_ahead: int, steps: int, folder: Path) -> list[Event]:
    command = [sys.executable, "-m", "headway", "train", "recipes/quickstart.toml", "--out", str(folder)]
    settings = {"run-ahead": run_ahead, "steps": steps, "evaluate.size": 0, "threads": 1, "share-cores": "false"}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    subprocess.run([*command, *words, "--checkpoint.every", "0"], check=True, stdout=subprocess.DEVNULL)
    return read_trace(folder / "trace.jsonl")


def times(events: list[Event], kind: str) -> list[float]:
    return [event.at_s for event in events if event.kind == kind][WARM_UP_STEPS:]


def step_s(events: list[Event]) -> float:
    published = times(events, "published")
    return (published[-1] - published[0]) / (len(published) - 1)


def generation_and_training_s(events: list[Event]) -> tuple[float, float]:
    """Of a synchronous run: from new weights to the next batch, and from there to the next weights."""
    taken, published = times(events, "taken"), times(events, "published")
    training = fmean(end - start for start, end in zip(taken, published, strict=True))
    generation = fmean(start - end for end, start in zip(published[:-1], taken[1:], strict=True))
    return generation, training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    seconds: dict[int, list[float]] = {run_ahead: [] for run_ahead in RUN_AHEAD}
    limits: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(options.repeats):
            for run_ahead in RUN_AHEAD:
                print(
                    f"repeat {repeat + 1} of {options.repeats}, run_ahead {run_ahead} ...", file=sys.stderr, flush=True
                )
                events = run(run_ahead, options.steps, Path(scratch) / f"{repeat}-{run_ahead}")
                seconds[run_ahead].append(step_s(events))
                if run_ahead == 0:
                    generation, training = generation_and_training_s(events)
                    limits.append((generation + training) / max(generation, training))
    print("| run_ahead | seconds per step (median) | faster than synchronous, per repeat | limit |")
    print("|---|---|---|---|")
    for run_ahead in RUN_AHEAD:
        ratios = [base / now for base, now in zip(seconds[0], seconds[run_ahead], strict=True)]
        shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
        limit = f"{median(limits):.2f}" if run_ahead else "1.00"
        print(f"| {run_ahead} | {median(seconds[run_ahead]):.4f} | {shown} | {limit} |")


if __name__ == "__main__":
    main()
