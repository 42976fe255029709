"""How objectives bear stale data: `python -m experiments.staleness [runs/staleness]`.

The quickstart's task with generation 0, 1, 2, 4 and 8 batches ahead of training, under four objectives:

- GRPO anchored wrongly: the proximal policy is recomputed from the current weights, and nothing looks at the policy
  that sampled. Headway refuses it; here `unsound` lets it run.
- decoupled PPO: the same clip, times pi_prox / mu.
- CISPO on pi / mu: the weight is clipped, the gradient is not.
- online DPO: pairs of answers, no ratio to the policy that sampled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from experiments.page import Section, curves, figure_or_dash, write
from experiments.side_by_side import RECIPE, Arm, Outcome, main_words, recipe_without, run_all

STEPS = 150
LEARNING_RATE = "1e-3"
"""Three times the quickstart's, so that the policy moves far in a version, and lag tells."""

SHARED = ("--run.steps", str(STEPS), "--train.learning-rate", LEARNING_RATE, "--evaluate.every", "0")
RUN_AHEAD = (0, 1, 2, 4, 8)
OBJECTIVES = {
    "grpo-unsound": ("--objective.name", "grpo", "--objective.kl-coefficient", "0", "--objective.unsound", "true"),
    "decoupled-ppo": ("--objective.name", "decoupled_ppo"),
    "cispo": ("--objective.name", "cispo", "--objective.anchor", "behaviour"),
    "online-dpo": ("--objective.name", "online_dpo"),
}


def main() -> None:
    out = main_words(sys.argv[1:], "python -m experiments.staleness [runs/staleness]")
    recipe = recipe_without("objective", RECIPE, out)
    outcomes = run_all(list(arms()), recipe, out, SHARED)
    write(out / "index.html", "What stale data cost", _LEAD, list(_sections(outcomes)))


def arms() -> Iterator[Arm]:
    for name, words in OBJECTIVES.items():
        for ahead in RUN_AHEAD:
            yield Arm(f"{name}-ahead-{ahead}", (*words, "--schedule.run-ahead", str(ahead)))


_LEAD = (
    f"Four objectives on the quickstart's task, {STEPS} steps of 256 answers at learning rate {LEARNING_RATE}, one "
    f"seed, with generation {', '.join(map(str, RUN_AHEAD))} batches ahead of training."
)


def _sections(outcomes: list[Outcome]) -> Iterator[Section]:
    yield Section(
        "Reward at the end",
        "Mean sampled reward of the last ten steps; in brackets the greedy accuracy on 478 held-out sums at the end.",
        table=[["run_ahead", *OBJECTIVES], *(_row(outcomes, ahead, _reward) for ahead in RUN_AHEAD)],
    )
    yield Section(
        "How stale, how far",
        "Token-weighted lag, KL(mu, pi) by k3 over the trained tokens, and the effective sample size of pi / mu: means "
        "over all steps.",
        table=[["run_ahead", *OBJECTIVES], *(_row(outcomes, ahead, _distance) for ahead in RUN_AHEAD)],
    )
    for place, name in enumerate(OBJECTIVES):
        mine = outcomes[place * len(RUN_AHEAD) : (place + 1) * len(RUN_AHEAD)]
        yield Section(
            f"{name}: reward",
            "Mean sampled reward over five steps.",
            curves(mine, "reward_mean", "reward", smooth=5),
        )
    yield Section(
        "KL from the sampling policy",
        "KL(mu, pi) by k3, mean over the trained tokens of each step, at the greatest run_ahead.",
        curves(
            outcomes[len(RUN_AHEAD) - 1 :: len(RUN_AHEAD)],
            "mismatch_kl_k3",
            "KL(mu, pi), k3",
            log=True,
            smooth=5,
            floor=1e-5,
        ),
    )


def _row(outcomes: list[Outcome], ahead: int, cell) -> list[str]:
    row = RUN_AHEAD.index(ahead)
    return [str(ahead), *(cell(outcome) for outcome in outcomes[row :: len(RUN_AHEAD)])]


def _reward(outcome: Outcome) -> str:
    if outcome.failure:
        return outcome.failure
    return f"{figure_or_dash(outcome.last('reward_mean'))} ({figure_or_dash(outcome.greedy)})"


def _distance(outcome: Outcome) -> str:
    lag, kl, ess = (outcome.last(name, STEPS) for name in ("token_lag", "mismatch_kl_k3", "ess_share"))
    return f"lag {figure_or_dash(lag, '.2f')}, KL {figure_or_dash(kl, '.1e')}, ESS {figure_or_dash(ess)}"


if __name__ == "__main__":
    main()
