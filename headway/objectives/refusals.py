"""Combinations that train something else than they say, and the reason. Free of torch.

Each rule looks at an objective and the run it is to be used in, and answers with what is wrong and the nearest thing
that is right. `unsound` overrides the rules of this module for an experiment; what can't be computed at all is refused
whatever it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.objectives.parts import (
    KL_ESTIMATORS,
    Clipped,
    ClippedValue,
    Objective,
    PolicyRatio,
    ReferenceKL,
    WithRatio,
)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a run does that an objective depends on.

    stale: data may be older than the weights they train (run_ahead > 0, or new weights while rollouts are in flight).
    optimizer_steps: per batch, all passes together. truncated_sampling: top-p, top-k or min-p; kept_set_recorded: the
    tokens that were left to choose from are known to the trainer. temperature, top_k (0: all tokens): of sampling.
    """

    stale: bool = False
    optimizer_steps: int = 1
    group_size: int = 1
    temperature: float = 1.0
    top_k: int = 0
    truncated_sampling: bool = False
    kept_set_recorded: bool = False


@dataclass(frozen=True)
class Refusal:
    """reason: what would be silently wrong; mend: the nearest thing that is right; impossible: `unsound` can't help."""

    reason: str
    mend: str
    impossible: bool = False

    def __str__(self) -> str:
        return f"{self.reason}: {self.mend}"


def refusals(objective: Objective, situation: Situation) -> list[Refusal]:
    """Everything that speaks against using `objective` in `situation`, the most serious first.

    >>> from headway.objectives.named import objective
    >>> print(refusals(objective("dapo"), Situation(stale=True, group_size=8))[0].mend)
    add a correction (objective.corrections = ["tis"]), or set schedule.run_ahead to 0
    """
    found = [refusal for rule in RULES if (refusal := rule(objective, situation))]
    return sorted(found, key=lambda refusal: not refusal.impossible)


def _groups_of_one(objective: Objective, situation: Situation) -> Refusal | None:
    if not objective.advantage.compares_group or situation.group_size >= 2:
        return None
    return Refusal(
        f"{objective.name} compares the rollouts of one prompt, and schedule.group_size is {situation.group_size}",
        "set it to 2 or more, 8 for instance",
        impossible=True,
    )


def _greedy(objective: Objective, situation: Situation) -> Refusal | None:
    if situation.top_k == 1:
        return Refusal(
            "generate.top_k is 1, and rollouts that take the likeliest token are all the same",
            "set it to 0, or to 2 or more",
            impossible=True,
        )
    if situation.temperature > 0:
        return None
    return Refusal(
        "generate.temperature is 0, and greedy rollouts of a prompt are all the same", "set it to 1.0", impossible=True
    )


def _no_length(objective: Objective, situation: Situation) -> Refusal | None:
    if objective.length is not None or all(term.reduction != "constant" for term in objective.terms):
        return None
    return Refusal(
        "the reduction constant has no length to divide by", "set objective.length in tokens", impossible=True
    )


def _stale_without_weight(objective: Objective, situation: Situation) -> Refusal | None:
    if not situation.stale or objective.corrects_behaviour:
        return None
    return Refusal(
        f"with schedule.run_ahead above 0 the data are older than the weights they train, and {objective.name} has no "
        f"weight against the policy that sampled them{_GEOMETRIC if _is_geometric(objective) else ''}: the update "
        "would be biased, and no metric of the loss would show it",
        'add a correction (objective.corrections = ["tis"]), or set schedule.run_ahead to 0',
    )


_GEOMETRIC = " (a geometric mean over an answer is none: it says how far the answer is, not how likely it was)"


def _is_geometric(objective: Objective) -> bool:
    ratios = [ratio for term in objective.terms for ratio in term.ratios]
    return any(ratio.old == "behaviour" and "geometric" in ratio.level for ratio in ratios)


def _steps_without_ratio(objective: Objective, situation: Situation) -> Refusal | None:
    """From the second optimizer step on the data are not those of the current weights, as if they were stale."""
    for term in objective.terms:
        follows = any(ratio.new == "current" for ratio in term.ratios)
        if situation.optimizer_steps > 1 and term.uses_advantage and not follows:
            return Refusal(
                f"with several optimizer steps on a batch, {objective.name} has no ratio of the current policy to the "
                "one before the train step: all steps but the first would be biased",
                "set train.optimizer_steps and train.passes to 1, or take an objective with such a ratio (grpo, cispo)",
            )
    return None


def _unbounded_product(objective: Objective, situation: Situation) -> Refusal | None:
    for term in objective.terms:
        weights = [weight for weight in term.weights if weight.ratio.level == "sequence" and not weight.bounded]
        loss = term.loss
        open_ended = isinstance(loss, PolicyRatio) or (isinstance(loss, Clipped) and loss.dual_clip is None)
        if weights or (open_ended and isinstance(loss, WithRatio) and loss.ratio.level == "sequence"):
            return Refusal(
                "a product of ratios over a whole answer with no bound has a variance that grows exponentially with "
                "the answer's length",
                "bound it (sequence_tis, sequence_mis), or weigh by token (tis)",
            )
    return None


def _counted_once_per_token(objective: Objective, situation: Situation) -> Refusal | None:
    for term in objective.terms:
        whole = isinstance(term.loss, WithRatio) and term.loss.ratio.level == "sequence"
        if whole and term.reduction != "rollout_mean_token_mean":
            return Refusal(
                f"the ratio of a whole answer stands at each of its tokens, and {term.reduction} adds them up: its "
                "gradient would count once per token",
                "use the reduction rollout_mean_token_mean, under which it counts once",
            )
    return None


def _weighted_twice(objective: Objective, situation: Situation) -> Refusal | None:
    """Two factors on one step of the way from mu to pi square it. A way is the set of steps that a ratio covers."""
    for term in objective.terms:
        if not term.uses_advantage:
            continue
        scaling = [weight for weight in term.weights if not weight.binary]
        steps = [step for weight in scaling for step in _steps(weight.ratio.new, weight.ratio.old)]
        if isinstance(term.loss, WithRatio):
            steps += _steps(term.loss.ratio.new, term.loss.ratio.old)
        if len(set(steps)) < len(steps):
            names = " and ".join(weight.name for weight in scaling) or "its ratio"
            return Refusal(
                f"{objective.name} would be weighted twice against the same policy ({names}), which squares the ratio",
                "keep one of them (objective.corrections = [] leaves out those of a recipe)",
            )
    return None


def _steps(new: str, old: str) -> list[str]:
    way = ["current", "proximal", "behaviour"]
    return [f"{way[place]}/{way[place + 1]}" for place in range(way.index(new), way.index(old))]


def _kl_without_gradient(objective: Objective, situation: Situation) -> Refusal | None:
    for term in objective.terms:
        if isinstance(term.loss, ReferenceKL) and not KL_ESTIMATORS[term.loss.estimator].gradient:
            return Refusal(
                f"{term.loss.estimator} in the loss has a gradient of mean 0 and holds the policy to nothing",
                "use k2 (the gradient of KL(pi, ref)), or put it in the reward (objective.reward_kl)",
            )
    return None


def _stale_kl(objective: Objective, situation: Situation) -> Refusal | None:
    for term in objective.terms:
        older = situation.stale or situation.optimizer_steps > 1
        if older and isinstance(term.loss, ReferenceKL) and not KL_ESTIMATORS[term.loss.estimator].corrected:
            why = "schedule.run_ahead above 0" if situation.stale else "several optimizer steps on a batch"
            return Refusal(
                f"the KL estimator {term.loss.estimator} is right for samples of the policy it holds, and with {why} "
                "they come from older ones",
                "use objective.kl_estimator k2_corrected or k3_corrected, or set objective.kl_coefficient to 0",
            )
    return None


def _nothing_to_interpolate(objective: Objective, situation: Situation) -> Refusal | None:
    if objective.proximal != "interpolated":
        return None
    if not any("proximal" in (ratio.new, ratio.old) for term in objective.terms for ratio in term.ratios):
        return Refusal(
            f"{objective.name} has no ratio to the proximal policy, so there is none to interpolate",
            "leave objective.proximal at recomputed",
            impossible=True,
        )
    if situation.optimizer_steps > 1:
        return None
    return Refusal(
        "with one optimizer step per batch the proximal policy is the current one, and guessing it gains nothing",
        "leave objective.proximal at recomputed, or set train.optimizer_steps above 1",
        impossible=True,
    )


def _normalises_nothing(objective: Objective, situation: Situation) -> Refusal | None:
    if not objective.self_normalise or any(term.weights for term in objective.terms):
        return None
    return Refusal(
        f"objective.self_normalise divides weights by their mean, and {objective.name} has no weight",
        'add a correction (objective.corrections = ["tis"]), or leave it out',
        impossible=True,
    )


def _unknown_support(objective: Objective, situation: Situation) -> Refusal | None:
    if not situation.truncated_sampling or situation.kept_set_recorded:
        return None
    return Refusal(
        "top-p, top-k or min-p renormalises over the tokens it keeps, and without a record of those the trainer's "
        "log-probs are of another distribution",
        "record the kept set, or sample from the whole vocabulary",
    )


def _value_of_nobody(objective: Objective, situation: Situation) -> Refusal | None:
    has_term = any(isinstance(term.loss, ClippedValue) for term in objective.terms)
    if has_term == objective.needs_critic:
        return None
    return Refusal("a critic needs both its loss and the advantage gae", "set objective.advantage to gae", True)


RULES: tuple[Callable[[Objective, Situation], Refusal | None], ...] = (
    _groups_of_one,
    _greedy,
    _no_length,
    _stale_without_weight,
    _steps_without_ratio,
    _unbounded_product,
    _counted_once_per_token,
    _weighted_twice,
    _kl_without_gradient,
    _stale_kl,
    _nothing_to_interpolate,
    _normalises_nothing,
    _unknown_support,
    _value_of_nobody,
)
