"""Objectives as data: which parts, with which values, from which source. Free of torch, so configuration can check it.

Every preset is a line of parts. `compose.py` turns a description into functions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Literal, get_args

AdvantageName = Literal["group_mean_std", "group_mean"]
WeightName = Literal["truncated", "none"]
SurrogateName = Literal["clipped", "policy_gradient"]
ReductionName = Literal["token_mean", "rollout_mean_token_mean", "rollout_mean_token_sum", "constant", "prompt_mean"]

ADVANTAGES: tuple[str, ...] = get_args(AdvantageName)
WEIGHTS: tuple[str, ...] = get_args(WeightName)
SURROGATES: tuple[str, ...] = get_args(SurrogateName)
REDUCTIONS: tuple[str, ...] = get_args(ReductionName)

GRPO = "advantage, surrogate, reduction: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, section 4.1"
DR_GRPO = "advantage, reduction: Liu et al. 2025, Dr. GRPO, arXiv 2503.20783, section 3.2"
PPO = "surrogate: Schulman et al. 2017, PPO, arXiv 1707.06347, section 3, equation 7"
TIS = "weight: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, C = 2"


def _check_name(what: str, name: str, valid: Iterable[str]) -> None:
    names = sorted(valid)
    if name not in names:
        nearest = max(names, key=lambda known: difflib.SequenceMatcher(None, name, known).ratio())
        raise ValueError(f"unknown {what} {name!r}; the nearest valid name is {nearest} (valid: {', '.join(names)})")


def _check_range(what: str, value: float, above: float, up_to: float = inf) -> None:
    if not above < value <= up_to:
        bound = "" if up_to == inf else f" and at most {up_to:g}"
        raise ValueError(f"{what} {value} must be above {above:g}{bound}")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One policy term: an advantage, a weight, a surrogate and a reduction, each named as the function that does it.

    sources: which part is from where. weight_cap: C of the truncated weight of the proximal against the behaviour
    log-probs, inf for plain importance sampling. clip_low, clip_high: the surrogate's ratio is clipped to
    [1 - clip_low, 1 + clip_high]. dual_clip: see `surrogates.clipped`; None is off. length: the constant of the
    reduction "constant", in tokens; other reductions ignore it. Raises ValueError for an unknown name or unfit value.
    """

    name: str
    sources: tuple[str, ...]
    advantage: AdvantageName
    weight: WeightName = "truncated"
    weight_cap: float = 2.0
    surrogate: SurrogateName = "clipped"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    reduction: ReductionName = "rollout_mean_token_mean"
    length: int | None = None

    def __post_init__(self) -> None:
        _check_name("advantage", self.advantage, ADVANTAGES)
        _check_name("weight", self.weight, WEIGHTS)
        _check_name("surrogate", self.surrogate, SURROGATES)
        _check_name("reduction", self.reduction, REDUCTIONS)
        _check_range("weight_cap", self.weight_cap, above=0.0)
        _check_range("clip_low", self.clip_low, above=0.0, up_to=1.0)
        _check_range("clip_high", self.clip_high, above=0.0)
        if self.dual_clip is not None:
            _check_range("dual_clip", self.dual_clip, above=1.0)
        if self.length is not None:
            _check_range("length", self.length, above=0.0)

    @property
    def recorded(self) -> tuple[str, ...]:
        """What must be recorded for this objective, beside token ids, rewards and masks.

        behaviour_logprobs: by the engine, as each token is sampled. whole_groups: baselines compare a prompt's
        rollouts, so a group is never split over batches. proximal_logprobs: the trainer's, before the first of several
        optimizer steps on one batch; with one step they equal the current ones and need no forward pass.
        """
        behaviour = ("behaviour_logprobs",) if self.weight == "truncated" else ()
        return (*behaviour, "proximal_logprobs", "whole_groups")


PRESETS: dict[str, Objective] = {
    preset.name: preset
    for preset in (
        Objective(name="grpo", sources=(GRPO, PPO, TIS), advantage="group_mean_std"),
        Objective(name="dr_grpo", sources=(DR_GRPO, PPO, TIS), advantage="group_mean", reduction="constant"),
    )
}
"""Every named objective. The weight against the behaviour log-probs is on in all: generation may run ahead."""


def objective(name: str, /, **overrides: Any) -> Objective:
    """A preset by name, with some of its values replaced; an override of None keeps the preset's value.

    Raises ValueError, naming the nearest valid choice, for an unknown objective, an unknown key, or an unfit value.

    >>> objective("grpo", weight_cap=5.0, reduction="token_mean", length=None).weight_cap
    5.0
    """
    _check_name("objective", name, PRESETS)
    keys = [field.name for field in fields(Objective) if field.name not in ("name", "sources")]
    for key in overrides:
        _check_name("setting of an objective", key, keys)
    return replace(PRESETS[name], **{key: value for key, value in overrides.items() if value is not None})
