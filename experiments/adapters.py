"""Full fine-tuning, LoRA and TinyLoRA on one task: `python -m experiments.adapters [runs/adapters]`.

SmolLM2-135M-Instruct learns reasoning-gym's sums (`recipes/smollm2-arithmetic.toml`; `make smollm2` installs what it
needs). The same steps for all, each at its own learning rate: ten times that of full fine-tuning for LoRA, and that of
`recipes/smollm2-tinylora.toml` for TinyLoRA.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go

from experiments.page import Section, curves, figure_or_dash, over_time, write
from experiments.side_by_side import Arm, Outcome, main_words, run_all

STEPS = 12
RECIPE = Path("recipes/smollm2-arithmetic.toml")
SHARED = ("--run.steps", str(STEPS), "--evaluate.size", "200")
_RATE = "--train.learning-rate"
ARMS = (
    Arm("full", (_RATE, "2e-5")),
    Arm("lora-rank-8", ("--adapter.kind", "lora", "--adapter.rank", "8", _RATE, "2e-4")),
    Arm("lora-rank-1", ("--adapter.kind", "lora", "--adapter.rank", "1", _RATE, "2e-4")),
    Arm(
        "tinylora",
        ("--adapter.kind", "tinylora", "--adapter.rank", "2", "--adapter.vector-size", "4", _RATE, "5e-3"),
    ),
)


def main() -> None:
    out = main_words(sys.argv[1:], "python -m experiments.adapters [runs/adapters]")
    outcomes = run_all(ARMS, RECIPE, out, SHARED)
    write(out / "index.html", "How few numbers are enough", _LEAD, list(_sections(outcomes)))


_LEAD = (
    f"SmolLM2-135M-Instruct on sums of two numbers, GRPO, {STEPS} steps of 128 answers, one batch ahead, one seed: all "
    "weights, LoRA of rank 8 and 1 on every linear layer, and TinyLoRA."
)


def _sections(outcomes: list[Outcome]) -> Iterator[Section]:
    yield Section(
        "What it takes and what it gives",
        "Peak memory: of the whole process, engine and trainer together. Greedy: on 200 held-out problems.",
        table=[_HEAD, *map(_row, outcomes)],
    )
    yield Section("Reward against time", "Sampled, of each step.", _against_time(outcomes))
    yield Section("Reward against steps", "The same.", curves(outcomes, "reward_mean", "reward"))


def _against_time(outcomes: list[Outcome]) -> go.Figure:
    return over_time(outcomes, "reward_mean", "reward")


_HEAD = (
    "run",
    "trained numbers",
    "bytes per sync",
    "peak memory",
    "minutes",
    "reward, last 3",
    "greedy before",
    "after",
)


def _row(outcome: Outcome) -> tuple[str, ...]:
    if outcome.failure:
        return (outcome.arm.name, outcome.failure, *[""] * (len(_HEAD) - 2))
    greedy = outcome.figures.get("greedy") or [{}]
    peak = outcome.figures.get("peak_memory_bytes")
    return (
        outcome.arm.name,
        figure_or_dash(outcome.last("trainable_parameters", 1), ",.0f"),
        figure_or_dash(outcome.last("sync_bytes", 1), ",.0f"),
        "–" if peak is None else f"{peak / 1e9:.2f} GB",
        figure_or_dash(outcome.figures["time"] / 60, ".1f"),
        figure_or_dash(outcome.last("reward_mean", 3)),
        figure_or_dash(greedy[0].get("accuracy")),
        figure_or_dash(greedy[-1].get("accuracy")),
    )


if __name__ == "__main__":
    main()
