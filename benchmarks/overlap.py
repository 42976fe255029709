"""What running ahead buys on this machine: seconds per step of the quickstart at several run_ahead, in one run.

Engine and trainer have one thread each at every setting, so overlapping is all that differs. Beside the measured ratio
stands the limit (g + t) / max(g, t), from the generation time g and the train time t of the synchronous runs.

Two models: the quickstart's, whose products are so small that most of the time is Python's, which two threads of one
process can't share; and a wider one with random weights, whose time is in its products.

    python benchmarks/overlap.py [--repeats 3]
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
WARM_UP_STEPS = 3
BASE = Path("recipes/quickstart/base")
STEPS = {"quickstart": 60, "wide": 12}


def make_wide_model(folder: Path) -> Path:
    """Four layers of width 384 with random weights, and the quickstart's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(BASE)
    config.update({"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 96})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)
    return folder


def run(model: Path, run_ahead: int, steps: int, folder: Path) -> list[Event]:
    command = [sys.executable, "-m", "headway", "train", "recipes/quickstart.toml", "--out", str(folder)]
    command += ["--model.path", str(model)]
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


def measure(name: str, model: Path, repeats: int, scratch: Path) -> None:
    seconds: dict[int, list[float]] = {run_ahead: [] for run_ahead in RUN_AHEAD}
    limits: list[float] = []
    for repeat in range(repeats):
        for run_ahead in RUN_AHEAD:
            print(f"{name}: repeat {repeat + 1} of {repeats}, run_ahead {run_ahead} ...", file=sys.stderr, flush=True)
            events = run(model, run_ahead, STEPS[name], scratch / f"{name}-{repeat}-{run_ahead}")
            seconds[run_ahead].append(step_s(events))
            if run_ahead == 0:
                generation, training = generation_and_training_s(events)
                limits.append((generation + training) / max(generation, training))
    for run_ahead in RUN_AHEAD:
        ratios = [base / now for base, now in zip(seconds[0], seconds[run_ahead], strict=True)]
        shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
        limit = f"{median(limits):.2f}" if run_ahead else "1.00"
        print(f"| {name} | {run_ahead} | {median(seconds[run_ahead]):.3f} | {shown} | {limit} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print("| model | run_ahead | seconds per step (median) | times as fast as synchronous, per repeat | limit |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        measure("quickstart", BASE, options.repeats, Path(scratch))
        measure("wide", make_wide_model(Path(scratch) / "model"), options.repeats, Path(scratch))


if __name__ == "__main__":
    main()
