"""Values of an objective that a run may set: (objective, value) -> objective. Free of torch.

An override that finds nothing to act on is an error: no setting is accepted and then ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from math import inf
from typing import Any

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


def _on_policy_terms(chosen: Objective, change: Any) -> Objective:
    terms = tuple(change(term) if term.uses_advantage else term for term in chosen.terms)
    return replace(chosen, terms=terms)


def _clip(side: str):
    def change(chosen: Objective, value: float) -> Objective:
        def in_weight(weight: Weight) -> Weight:
            if weight.ratio.new != "current" or weight.act not in ("truncate", "mask", "clip_mask"):
                return weight
            if side == "clip_high":
                return weight if weight.high == inf else replace(weight, high=1 + value)
            return weight if weight.low == 0 else replace(weight, low=1 - value)

        def in_term(term: Term) -> Term:
            loss: Any = term.loss
            if isinstance(loss, Clipped | Clamped):
                loss = replace(loss, **{side: value})
            return replace(term, loss=loss, weights=tuple(in_weight(weight) for weight in term.weights))

        return _must_change(chosen, _on_policy_terms(chosen, in_term), side, "nothing in it is clipped on that side")

    return change


def _must_change(before: Objective, after: Objective, key: str, why: str) -> Objective:
    """An override with the preset's own value leaves all as it is; one that finds nothing to act on is refused."""
    if after == before and not _has_value(before, key):
        raise ValueError(f"{key} does nothing in {before.name}: {why}")
    return after


def _has_value(chosen: Objective, key: str) -> bool:
    for term in chosen.terms:
        if key in {field.name for field in fields(term.loss)}:
            return True
        if key == "clip_high" and any(w.ratio.new == "current" and w.high < inf for w in term.weights):
            return True
        if key == "clip_low" and any(w.ratio.new == "current" and w.low > 0 for w in term.weights):
            return True
    return False


def _in_loss(key: str, why: str, setting: str = ""):
    """setting: what a user calls it, where that is not the field's name."""

    def change(chosen: Objective, value: Any) -> Objective:
        def in_term(term: Term) -> Term:
            named = {field.name for field in fields(term.loss)}
            return replace(term, loss=replace(term.loss, **{key: value})) if key in named else term

        if not any(key in {field.name for field in fields(term.loss)} for term in chosen.terms):
            raise ValueError(f"{setting or key} does nothing in {chosen.name}: {why}")
        return replace(chosen, terms=tuple(in_term(term) for term in chosen.terms))

    return change


def _off_at_0(key: str, why: str):
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


def _of_gae(key: str):
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


def _field(key: str):
    return lambda chosen, value: replace(chosen, **{key: value})


def _filters(chosen: Objective, value: Iterable[FilterName]) -> Objective:
    return replace(chosen, filters=tuple(value))


def _overlong(chosen: Objective, value: float) -> Objective:
    return replace(chosen, overlong=Overlong(cache_share=value) if value else None)


def _retire(chosen: Objective, value: float) -> Objective:
    return replace(chosen, retire_above=value or None)


OVERRIDES: dict[str, Any] = {
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
    "length": _field("length"),
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
    if isinstance(term.loss, ReferenceKL):
        own = {"kl_coefficient": term.coefficient, "kl_estimator": term.loss.estimator}
    if isinstance(term.loss, SquaredLogRatio):
        own["quadratic_coefficient"] = term.coefficient
    if term.uses_advantage:
        own["reduction"] = term.reduction
        for weight in term.weights:
            if weight.ratio.new == "current" and weight.act in ("truncate", "mask", "clip_mask"):
                own |= {"clip_low": 1 - weight.low} if weight.low else {}
                own |= {"clip_high": weight.high - 1} if weight.high < inf else {}
    return {key: value for key, value in own.items() if value is not None}
