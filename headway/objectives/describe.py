"""An objective in words: formula, source, parts, values, what it needs and what it refuses. Free of torch.

What is printed is read off the same description that the loss is composed from, so it can't say anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headway.objectives import overrides
from headway.objectives.corrections import CORRECTIONS
from headway.objectives.named import PRESETS
from headway.objectives.parts import KL_ESTIMATORS, ClippedValue, Objective, ReferenceKL, Term, Weight
from headway.objectives.refusals import Situation, refusals

REDUCTIONS: dict[str, tuple[str, str]] = {
    "token_mean": ("mean over tokens", "masked tokens leave numerator and denominator"),
    "rollout_mean_token_mean": (
        "mean over rollouts of the mean over their tokens",
        "masked tokens leave their rollout's length; a rollout without another token is not counted",
    ),
    "rollout_mean_token_sum": (
        "mean over rollouts of the sum over their tokens",
        "a rollout without an unmasked token is not counted",
    ),
    "constant": (
        "sum over tokens / (rollouts x length)",
        "masked tokens leave length as it is; a rollout without an unmasked token is not counted",
    ),
    "prompt_mean": (
        "mean over prompts of the mean over the tokens of their group",
        "masked tokens leave their group's length; a group without another token is not counted",
    ),
    "pair_mean": (
        "mean over pairs",
        "masked tokens leave a pair's log-prob ratio; a pair without tokens is not counted",
    ),
}
"""Reduction -> what it is, and what tokens that are no data do to its denominator. Tokens that a weight masks are data:
they leave the numerator only."""

LEGEND = (
    "pi: current policy; pi_prox: the trainer's before this train step; mu: the one that sampled the token",
    "A: advantage; r: reward; len: trained tokens of a rollout; rho: a ratio with its gradient; weights have none",
)


def overview() -> str:
    """Every named objective and every correction, a line each."""
    width = max(map(len, [*PRESETS, *CORRECTIONS]))
    lines = ["objectives: headway objectives NAME tells all of one", ""]
    lines += [f"  {name:<{width}}  {preset.source}" for name, preset in PRESETS.items()]
    lines += [
        "",
        'corrections, of any policy term: objective.corrections = ["tis"], or "tis:5" for another bound',
        "",
    ]
    lines += [f"  {name:<{width}}  {_product(weights)}" for name, weights in CORRECTIONS.items()]
    return "\n".join(lines)


def description(objective: Objective) -> str:
    """All there is to know of an objective."""
    sections = [
        (objective.name, [objective.source]),
        ("maximises", list(_formula(objective))),
        ("advantage", list(_advantage(objective))),
        ("terms", [line for term in objective.terms for line in _term(term)]),
        ("settings, as [objective] KEY = VALUE", list(_settings(objective))),
        ("needs", list(_needs(objective))),
        ("refused", list(_refused(objective))),
        ("notes", list(objective.notes)),
    ]
    return "\n".join(_section(title, lines) for title, lines in sections if lines)


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"    {line}" for line in lines)])


def _formula(objective: Objective) -> Iterator[str]:
    for place, term in enumerate(objective.terms):
        sign = "" if place == 0 else "+ "
        factor = "" if term.coefficient == 1 else f"{term.coefficient:g} x "
        weights = f"{_product(term.weights)} x " if term.weights else ""
        of = " (of the critic)" if isinstance(term.loss, ClippedValue) else ""
        yield f"{sign}{factor}{REDUCTIONS[term.reduction][0]} of  {weights}{term.loss.formula}{of}"
    if objective.self_normalise:
        yield "weights divided by their mean over an optimizer step, in the sense of the term's reduction"
    yield from LEGEND


def _product(weights: tuple[Weight, ...]) -> str:
    return " x ".join(weight.formula for weight in weights)


def _advantage(objective: Objective) -> Iterator[str]:
    yield f"{objective.advantage.name}: A = {objective.advantage.formula}"
    if objective.reward_kl:
        yield f"reward of each token: r - {objective.reward_kl:g} (log pi_prox - log ref): the gradient of KL(pi, ref)"
    if objective.overlong:
        share = objective.overlong.cache_share
        yield f"answers in the last {share:.0%} of their token budget lose up to 1, linearly"
    if "zero_variance" in objective.filters:
        yield "groups whose outcomes are all equal (before shaping) are no data"
    if "truncated" in objective.filters:
        yield "answers that were cut off are no data, and count in baselines"
    if objective.retire_above:
        yield f"a prompt of which {objective.retire_above:.0%} of the answers were right is not asked again"


def _term(term: Term) -> Iterator[str]:
    name = type(term.loss).__name__
    yield f"{name}, per {term.level}: {type(term.loss).__doc__}".rstrip().replace("`", "")
    if isinstance(term.loss, ReferenceKL):
        gives = KL_ESTIMATORS[term.loss.estimator]
        samples = "samples of any recorded policy" if gives.corrected else "samples of pi"
        yield f"    {term.loss.estimator}: gradient of {gives.gradient or 'nothing'}, under {samples}"
    for weight in term.weights:
        yield f"    weight {weight.name}: {weight.formula} ({weight.source})"
    reduction, masked = REDUCTIONS[term.reduction]
    yield f"    {term.reduction}: {reduction}; {masked}"


def _settings(objective: Objective) -> Iterator[str]:
    yield from (f"{key} = {_toml(value)}" for key, value in overrides.values(objective).items())


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _needs(objective: Objective) -> Iterator[str]:
    if objective.advantage.compares_group:
        yield "whole groups of two or more rollouts of a prompt"
    if objective.needs_behaviour:
        yield "from the engine, as each token is sampled: its log-prob"
    if objective.proximal == "interpolated":
        yield "from the engine: the version of each token"
    if objective.overlong or "truncated" in objective.filters or objective.needs_critic:
        yield "from the engine: why each answer ended"
    if objective.needs_proximal(1):
        yield "a forward pass before each train step: log pi_prox"
    elif objective.needs_proximal(2):
        yield "with several optimizer steps per batch, a forward pass before: log pi_prox (with one it is log pi)"
    if objective.needs_reference:
        yield "a frozen reference and a forward pass of it (an adapter switched off, or a second copy of the model)"
    if objective.needs_critic:
        yield "a critic with its own optimizer, and the values of a forward pass of it"
    if objective.level == "pair":
        yield "groups that are not split over micro-batches"


def _refused(objective: Objective) -> Iterator[str]:
    """What would be refused of it with data that are older than the weights, in a run that is right otherwise."""
    stale = Situation(stale=True, optimizer_steps=2, group_size=8)
    sized = objective if objective.length else replace(objective, length=1)  # a run knows its token budget
    yield from (f"{refusal.reason}; {refusal.mend}" for refusal in refusals(sized, stale))
