"""Every named objective on the quickstart's task: `python -m experiments.objectives [runs/objectives]`.

The same model, data, learning rate and schedule (one batch ahead) for all. Each objective has its authors' values, and
beside them only what data that are a batch old demand: a correction where it has none, a corrected KL estimator.
"""

from __future__ import annotations

import sys

from experiments.page import Section, figure_or_dash, small_multiples, write
from experiments.side_by_side import RECIPE, Arm, Outcome, main_words, recipe_without, run_all
from headway.objectives.named import PRESETS
from headway.objectives.parts import KL_ESTIMATORS, Objective, ReferenceKL

STEPS = 150
SHARED = ("--run.steps", str(STEPS), "--evaluate.every", "0")


def main() -> None:
    out = main_words(sys.argv[1:], "python -m experiments.objectives [runs/objectives]")
    recipe = recipe_without("objective", RECIPE, out)
    outcomes = run_all([arm(name) for name in PRESETS], recipe, out, SHARED)
    write(out / "index.html", "Every objective on one task", _lead(outcomes), list(_sections(outcomes)))


def arm(name: str) -> Arm:
    """An objective, with what a batch of lag demands of it beside its own values."""
    words = [word for key, value in _beside(PRESETS[name]).items() for word in (f"--{key}", value)]
    return Arm(name, ("--objective.name", name, *words))


def _beside(preset: Objective) -> dict[str, str]:
    critic = {"critic.value_learning_rate": "1e-3", "critic.value_warmup_steps": "5"} if preset.needs_critic else {}
    return {**demanded(preset), **critic}


def demanded(preset: Objective) -> dict[str, str]:
    """Settings without which data that are older than the weights, or several optimizer steps, are refused."""
    settings = {} if preset.corrects_behaviour else {"objective.corrections": "tis"}
    for term in preset.terms:
        if isinstance(term.loss, ReferenceKL) and not KL_ESTIMATORS[term.loss.estimator].corrected:
            settings["objective.kl_estimator"] = f"{term.loss.estimator}_corrected"
    return settings


def _lead(outcomes: list[Outcome]) -> str:
    learned = sum((outcome.greedy or 0) > 0.9 for outcome in outcomes)
    return (
        f"{len(outcomes)} objectives learn to carry in sums of two numbers: {STEPS} steps of 256 answers each, one "
        f"batch ahead, one seed. {learned} of them answer more than 90 % of the held-out sums right at the end."
    )


def _sections(outcomes: list[Outcome]):
    yield Section(
        "Sampled reward",
        "Mean reward of the 256 answers that a step trained on, over five steps. In grey: the others.",
        small_multiples(outcomes, "reward_mean", smooth=5),
    )
    yield Section(
        "What came out",
        "Greedy: accuracy on 478 held-out sums. Steps to 0.9: from there on the reward of five steps stays above it.",
        table=[_HEAD, *(_row(outcome) for outcome in outcomes)],
    )
    yield Section(
        "Entropy",
        "Of the trainer's distribution over trained tokens, in nats, over five steps.",
        small_multiples(outcomes, "entropy", smooth=5),
    )


_HEAD = (
    "objective",
    "beside its own values",
    "sampled, last 10",
    "greedy",
    "steps to 0.9",
    "entropy",
    "clipped or cut",
    "ESS",
)


def _row(outcome: Outcome) -> tuple[str, ...]:
    if outcome.failure:
        return (outcome.arm.name, outcome.failure, *[""] * 6)
    beside = _beside(PRESETS[outcome.arm.name]).items()
    words = ", ".join(f"{key.split('.')[1]} {value}" for key, value in beside)
    acted = [name for name in outcome.rows[1] if name.startswith("acted_share/") and name.count("/") == 1]
    return (
        outcome.arm.name,
        words or "nothing",
        figure_or_dash(outcome.last("reward_mean")),
        figure_or_dash(outcome.greedy),
        _steps_to(outcome, 0.9),
        figure_or_dash(outcome.last("entropy")),
        figure_or_dash(max((outcome.last(name, 1000) or 0 for name in acted), default=None), ".4f"),
        figure_or_dash(outcome.last("ess_share", 1000), ".4f"),
    )


def _steps_to(outcome: Outcome, reward: float) -> str:
    versions, values = outcome.column("reward_mean")
    means = [sum(values[place : place + 5]) / 5 for place in range(len(values) - 4)]
    below = [place for place, mean in enumerate(means) if mean < reward]
    first = below[-1] + 1 if below else 0
    return str(versions[first]) if first < len(means) else "not reached"


if __name__ == "__main__":
    main()
