"""An engine that computes less exactly than the trainer: `python -m experiments.collapse [runs/collapse]`.

The quickstart's task, synchronous, so that no token is stale and all mismatch is the engine's: its linear layers give
outputs of two significant bits (`experiments/low_precision.py`), the trainer computes in float32. Uncorrected, with
truncated and with masked importance weights, and with the mismatch removed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from experiments.page import Section, curves, figure_or_dash, write
from experiments.side_by_side import RECIPE, Arm, Outcome, main_words, recipe_without, run_all

STEPS = 400
BITS = 2
LEARNING_RATE = "1e-3"
SEEDS = (0, 1)
CORRECTIONS = {"uncorrected": "", "tis": "tis", "mis": "mis", "sequence-mis": "sequence_mis"}


def main() -> None:
    out = main_words(sys.argv[1:], "python -m experiments.collapse [runs/collapse]")
    recipe = recipe_without("objective", RECIPE, out)
    shared = ["--run.steps", str(STEPS), "--train.learning-rate", LEARNING_RATE, "--schedule.run-ahead", "0"]
    shared += ["--objective.name", "grpo", "--objective.kl-coefficient", "0", "--evaluate.every", "0"]
    outcomes = run_all(list(_arms()), recipe, out, shared)
    write(out / "index.html", "An engine that is not the trainer", _LEAD, list(_sections(outcomes)))


def _arms() -> Iterator[Arm]:
    exact, coarse = (("experiments.low_precision", str(bits)) for bits in (24, BITS))
    for seed in SEEDS:
        words = ("--run.seed", str(seed))
        yield Arm(f"exact-engine-{seed}", words, exact)
        for name, correction in CORRECTIONS.items():
            yield Arm(f"{name}-{seed}", ("--objective.corrections", correction, *words), coarse)


_LEAD = (
    f"GRPO on the quickstart's task: {STEPS} synchronous steps of 256 answers, learning rate {LEARNING_RATE}. The "
    f"engine's linear layers give outputs of {BITS} significant bits, the trainer's are float32. "
    f"Curves are of seed {SEEDS[0]}."
)


def _sections(outcomes: list[Outcome]) -> Iterator[Section]:
    yield Section(
        "What came out",
        "Reward: mean of the last 20 steps, and the lowest mean of 20 steps after the first 100. Greedy: held-out sums "
        "answered by the coarse engine. KL(mu, pi) by k3 and the share of tokens whose weight was cut: means over all "
        "steps.",
        table=[_HEAD, *map(_row, outcomes)],
    )
    shown = outcomes[: len(outcomes) // len(SEEDS)]
    yield Section("Reward", "Sampled, over ten steps.", curves(shown, "reward_mean", "reward", smooth=10))
    yield Section(
        "Mismatch",
        "KL(mu, pi) by k3 over the trained tokens of each step.",
        curves(shown, "mismatch_kl_k3", "KL(mu, pi), k3", log=True, smooth=10),
    )
    yield Section(
        "Gradient norm", "Before clipping, over ten steps.", curves(shown, "grad_norm", "norm", log=True, smooth=10)
    )


_HEAD = (
    "run",
    "reward, last 20",
    "lowest after 100",
    "greedy",
    "KL(mu, pi)",
    "ESS",
    "weights cut",
    "chi^2 of sequences",
)


def _row(outcome: Outcome) -> tuple[str, ...]:
    if outcome.failure:
        return (outcome.arm.name, outcome.failure, *[""] * (len(_HEAD) - 2))
    _, rewards = outcome.column("reward_mean")
    means = [sum(rewards[place : place + 20]) / 20 for place in range(100, len(rewards) - 19)]
    cut = [outcome.last(f"acted_share/{name}", STEPS) for name in ("tis", "mis", "sequence_mis")]
    return (
        outcome.arm.name,
        figure_or_dash(outcome.last("reward_mean", 20)),
        figure_or_dash(min(means, default=None)),
        figure_or_dash(outcome.greedy),
        figure_or_dash(outcome.last("mismatch_kl_k3", STEPS), ".1e"),
        figure_or_dash(outcome.last("ess_share", STEPS)),
        figure_or_dash(next((share for share in cut if share is not None), None)),
        figure_or_dash(outcome.last("chi2_sequence", STEPS), ".2g"),
    )


if __name__ == "__main__":
    main()
