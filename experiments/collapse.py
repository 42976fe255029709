"""An engine that is not the trainer: `python -m experiments.collapse [runs/collapse]`.

The quickstart's task, synchronous, so that no token is stale and all mismatch is the engine's, with two faults of
`experiments/wrong_engine.py`: linear layers of two significant bits, and a soft-cap on the logits that the trainer does
not have. Each uncorrected, with truncated and with masked importance weights; and the run with the mismatch removed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from experiments.page import Section, curves, figure_or_dash, write
from experiments.side_by_side import RECIPE, Arm, Outcome, main_words, recipe_without, run_all

STEPS = 400
LEARNING_RATE = "1e-3"
SYNCHRONOUS_GRPO = ("--objective.name", "grpo", "--objective.kl-coefficient", "0", "--schedule.run-ahead", "0")
SHARED = (
    *SYNCHRONOUS_GRPO,
    *("--run.steps", str(STEPS), "--train.learning-rate", LEARNING_RATE, "--evaluate.every", "0"),
)
JUDGE = ("--run.steps", "0", *SYNCHRONOUS_GRPO)
FAULTS = {"2-bit": "bits=2", "soft-cap": "softcap=6"}
CORRECTIONS = {"uncorrected": "", "tis": "tis", "mis": "mis"}


def main() -> None:
    out = main_words(sys.argv[1:], "python -m experiments.collapse [runs/collapse]")
    recipe = recipe_without("objective", RECIPE, out)
    outcomes = run_all(list(arms()), recipe, out, SHARED)
    exact = run_all([_judged(outcome, out) for outcome in outcomes], recipe, out / "exact", JUDGE)
    write(out / "index.html", "An engine that is not the trainer", _LEAD, list(_sections(outcomes, exact)))


def arms() -> Iterator[Arm]:
    yield Arm("mismatch-removed", (), ("experiments.wrong_engine", "exact"))
    for name, fault in FAULTS.items():
        for correction, words in CORRECTIONS.items():
            command = ("experiments.wrong_engine", fault)
            yield Arm(f"{name}-{correction}", ("--objective.corrections", words), command)


def _judged(outcome: Outcome, out: Path) -> Arm:
    """The policy that a run left, asked the held-out sums by an engine without a fault."""
    return Arm(outcome.arm.name, ("--model.path", str(out / outcome.arm.name / "model")))


_LEAD = (
    f"GRPO on the quickstart's task: {STEPS} synchronous steps of 256 answers, learning rate {LEARNING_RATE}, one "
    "seed. The engine samples from something else than the trainer trains, and records what it really sampled from."
)


def _sections(outcomes: list[Outcome], exact: list[Outcome]) -> Iterator[Section]:
    yield Section(
        "What came out",
        "Sampled reward: mean of the last 20 steps, and the lowest mean of 20 steps after the first 100. Greedy: "
        "held-out sums answered right by the run's own engine, and by one without a fault. KL(mu, pi) by k3 over the "
        "trained tokens: in the first 20 steps and in the last. Cut: share of tokens whose weight was cut or masked.",
        table=[_HEAD, *(_row(*pair) for pair in zip(outcomes, exact, strict=True))],
    )
    for name in FAULTS:
        shown = [outcomes[0], *(outcome for outcome in outcomes if outcome.arm.name.startswith(name))]
        yield Section(f"{name}: reward", "Sampled, over ten steps.", curves(shown, "reward_mean", "reward", smooth=10))
        yield Section(
            f"{name}: mismatch",
            "KL(mu, pi) by k3 over the trained tokens, over ten steps. Without a fault it is below 1e-12.",
            curves(shown[1:], "mismatch_kl_k3", "KL(mu, pi), k3", smooth=10),
        )
        yield Section(
            f"{name}: gradient norm",
            "Before clipping, over ten steps.",
            curves(shown, "grad_norm", "norm", log=True, smooth=10),
        )


_HEAD = ("run", "reward", "lowest", "greedy", "greedy, exact", "KL, first 20", "KL, last 20", "ESS", "cut")


def _row(outcome: Outcome, exact: Outcome) -> tuple[str, ...]:
    if outcome.failure:
        return (outcome.arm.name, outcome.failure, *[""] * (len(_HEAD) - 2))
    _, rewards = outcome.column("reward_mean")
    _, kl = outcome.column("mismatch_kl_k3")
    means = [sum(rewards[place : place + 20]) / 20 for place in range(100, len(rewards) - 19)]
    cut = [outcome.last(f"acted_share/{name}", STEPS) for name in ("tis", "mis")]
    return (
        outcome.arm.name,
        figure_or_dash(outcome.last("reward_mean", 20)),
        figure_or_dash(min(means, default=None)),
        figure_or_dash(outcome.greedy),
        figure_or_dash(exact.greedy),
        figure_or_dash(sum(kl[:20]) / 20, ".1e"),
        figure_or_dash(sum(kl[-20:]) / 20, ".1e"),
        figure_or_dash(outcome.last("ess_share", STEPS)),
        figure_or_dash(next((share for share in cut if share is not None), None)),
    )


if __name__ == "__main__":
    main()
