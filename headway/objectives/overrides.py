"""Values of an objective that a run may set: (objective, value) -> objective. Free of torch.

An override that finds nothing to act on is an error: no setting is accepted and then ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from math import inf
from typing import Any, Literal

from headway.objectives.parts import (
    Clamped,
    Clipped,
    ClippedValue,
    FilterName,
    Objective,
    Overlong,
    ReductionName,
    ReferenceKL,
    SquaredLogRatio,
    Term,
    Weight,
    check_name,
)

Override = Callable[[Objective, Any], Objective]
"""Raises ValueError for an unfit value, and where nothing in the objective answers to it."""

Side = Literal["clip_low", "clip_high"]


def _on_policy_terms(chosen: Objective, change: Callable[[Term], Term]) -> Objective:
    terms = tuple(change(term) if term.uses_advantage else term for term in chosen.terms)
    return replace(chosen, terms=terms)


def _clip(side: Side) -> Override:
    def change(chosen: Objective, value: float) -> Objective:
        bound = {"high": 1 + value} if side == "clip_high" else {"low": 1 - value}

        def in_term(term: Term) -> Term:
            loss = replace(term.loss, **{side: value}) if isinstance(term.loss, Clipped | Clamped) else term.loss
            weights = tuple(replace(weight, **bound) if _clips(weight, side) else weight for weight in term.weights)
            return replace(term, loss=loss, weights=weights)

        if not any(_is_clipped(term, side) for term in chosen.terms):
            raise ValueError(f"{side} does nothing in {chosen.name}: nothing in it is clipped on that side")
        return _on_policy_terms(chosen, in_term)

    return change


def _is_clipped(term: Term, side: Side) -> bool:
    return hasattr(term.loss, side) or any(_clips(weight, side) for weight in term.weights)


def _clips(weight: Weight, side: Side) -> bool:
    """It bounds a ratio of the current policy on that side, as a clip does."""
    if weight.ratio.new != "current" or weight.act not in ("truncate", "mask", "clip_mask"):
        return False
    return weight.high < inf if side == "clip_high" else weight.low > 0


def _in_loss(key: str, why: str, setting: str = "") -> Override:
    """setting: what a user calls it, where that is not the field's name."""

    def change(chosen: Objective, value: Any) -> Objective:
        def in_term(term: Term) -> Term:
            return replace(term, loss=replace(term.loss, **{key: value})) if hasattr(term.loss, key) else term

        if not any(hasattr(term.loss, key) for term in chosen.terms):
            raise ValueError(f"{setting or key} does nothing in {chosen.name}: {why}")
        return replace(chosen, terms=tuple(in_term(term) for term in chosen.terms))

    return change


def _off_at_0(key: str, why: str) -> Override:
    change = _in_loss(key, why)
    return lambda chosen, value: change(chosen, value or None)


def _anchor(chosen: Objective, value: str) -> Objective:
    check_name("anchor", value, ("proximal", "behaviour"))

    def in_term(term: Term) -> Term:
        loss: Any = term.loss
        if hasattr(loss, "ratio"):
            loss = replace(loss, ratio=replace(loss.ratio, old=value))
        weights = tuple(
            replace(weight, ratio=replace(weight.ratio, old=value)) if weight.ratio.new == "current" else weight
            for weight in term.weights
        )
        return replace(term, loss=loss, weights=weights)

    if not any(ratio.new == "current" for term in chosen.terms for ratio in term.ratios):
        raise ValueError(f"anchor does nothing in {chosen.name}: it has no ratio of the current policy to an older one")
    return replace(chosen, terms=tuple(in_term(term) for term in chosen.terms))


def _reduction(chosen: Objective, value: ReductionName) -> Objective:
    if not any(term.uses_advantage for term in chosen.terms):
        raise ValueError(f"reduction does nothing in {chosen.name}: its loss is a mean over pairs")
    if value == "pair_mean":
        raise ValueError("the reduction pair_mean belongs to the preference loss, and to no other")
    return replace(chosen, terms=tuple(replace(term, reduction=value) for term in chosen.terms))


def _advantage(chosen: Objective, value: Any) -> Objective:
    """An advantage by a critic brings the critic's loss, any other takes it away."""
    terms = tuple(term for term in chosen.terms if not isinstance(term.loss, ClippedValue))
    if value == "gae":
        terms = (*terms, chosen.value_term or Term(loss=ClippedValue(), reduction="token_mean"))
    return replace(chosen, advantage=replace(chosen.advantage, name=value), terms=terms)


def _whiten(chosen: Objective, value: bool) -> Objective:
    return replace(chosen, advantage=replace(chosen.advantage, whiten=value))


def _of_gae(key: str) -> Override:
    def change(chosen: Objective, value: float) -> Objective:
        if chosen.advantage.name != "gae":
            raise ValueError(f"{key} does nothing in {chosen.name}: it belongs to the advantage gae")
        return replace(chosen, advantage=replace(chosen.advantage, **{key: value}))

    return change


def _kl_coefficient(chosen: Objective, value: float) -> Objective:
    others = tuple(term for term in chosen.terms if not isinstance(term.loss, ReferenceKL))
    if value == 0:
        return replace(chosen, terms=others)
    if not any(term.uses_advantage for term in chosen.terms):
        raise ValueError(f"kl_coefficient does not belong in {chosen.name}: beta already holds it to the reference")
    own = next((term for term in chosen.terms if isinstance(term.loss, ReferenceKL)), None)
    reduction: ReductionName = next(term.reduction for term in chosen.terms if term.uses_advantage)
    term = own or Term(loss=ReferenceKL(), reduction=reduction)
    return replace(chosen, terms=(*others, replace(term, coefficient=value)))


def _quadratic(chosen: Objective, value: float) -> Objective:
    if not any(isinstance(term.loss, SquaredLogRatio) for term in chosen.terms):
        raise ValueError(f"quadratic_coefficient does nothing in {chosen.name}: it has no squared log-ratio")
    return replace(
        chosen,
        terms=tuple(replace(t, coefficient=value) if isinstance(t.loss, SquaredLogRatio) else t for t in chosen.terms),
    )


def _field(key: str) -> Override:
    return lambda chosen, value: replace(chosen, **{key: value})


def _filters(chosen: Objective, value: Iterable[FilterName]) -> Objective:
    return replace(chosen, filters=tuple(value))


def _overlong(chosen: Objective, value: float) -> Objective:
    return replace(chosen, overlong=Overlong(cache_share=value) if value else None)


def _length(chosen: Objective, value: int) -> Objective:
    if all(term.reduction != "constant" for term in chosen.terms):
        raise ValueError(f"length does nothing in {chosen.name}: only the reduction constant divides by it")
    return replace(chosen, length=value)


def _retire(chosen: Objective, value: float) -> Objective:
    return replace(chosen, retire_above=value or None)


OVERRIDES: dict[str, Override] = {
    "advantage": _advantage,
    "whiten": _whiten,
    "gamma": _of_gae("gamma"),
    "lam": _of_gae("lam"),
    "anchor": _anchor,
    "reduction": _reduction,
    "clip_low": _clip("clip_low"),
    "clip_high": _clip("clip_high"),
    "dual_clip": _off_at_0("dual_clip", "only the clipped surrogate has one"),
    "kl_coefficient": _kl_coefficient,
    "kl_estimator": _in_loss("estimator", "it has no KL term; set kl_coefficient too", "kl_estimator"),
    "reward_kl": _field("reward_kl"),
    "quadratic_coefficient": _quadratic,
    "value_clip": _off_at_0("value_clip", "it has no value loss"),
    "beta": _in_loss("beta", "only the preference loss has one"),
    "overlong_share": _overlong,
    "filters": _filters,
    "retire_above": _retire,
    "self_normalise": _field("self_normalise"),
    "proximal": _field("proximal"),
    "length": _length,
    "unsound": _field("unsound"),
}
"""Key -> what it changes, in the order in which they are applied.

0 switches dual_clip, kl_coefficient, reward_kl, value_clip, overlong_share and retire_above off.
"""


def values(chosen: Objective) -> dict[str, Any]:
    """Key -> the objective's value, of every key that it answers to: giving it back as an override changes nothing."""
    found: dict[str, Any] = {"corrections": chosen.corrections, "advantage": chosen.advantage.name}
    found["whiten"] = chosen.advantage.whiten
    if chosen.advantage.name == "gae":
        found |= {"gamma": chosen.advantage.gamma, "lam": chosen.advantage.lam}
    for term in chosen.terms:
        found |= _values_of_term(term)
    return found | {
        "reward_kl": chosen.reward_kl,
        "overlong_share": chosen.overlong.cache_share if chosen.overlong else 0.0,
        "filters": chosen.filters,
        "retire_above": chosen.retire_above or 0.0,
        "self_normalise": chosen.self_normalise,
        "proximal": chosen.proximal,
    }


def _values_of_term(term: Term) -> dict[str, Any]:
    own = {field.name: getattr(term.loss, field.name) for field in fields(term.loss) if field.name != "ratio"}
    own = {key: 0.0 if value is None else value for key, value in own.items()}
    if isinstance(term.loss, ReferenceKL):
        own = {"kl_coefficient": term.coefficient, "kl_estimator": term.loss.estimator}
    if isinstance(term.loss, SquaredLogRatio):
        own["quadratic_coefficient"] = term.coefficient
    if term.uses_advantage:
        own["reduction"] = term.reduction
        for weight in term.weights:
            own |= {"clip_low": 1 - weight.low} if _clips(weight, "clip_low") else {}
            own |= {"clip_high": weight.high - 1} if _clips(weight, "clip_high") else {}
    return {key: value for key, value in own.items() if value is not None}
