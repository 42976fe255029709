"""A learning curve -> the sigmoid through it, what the points determine of it, and what they foretell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.scaling.amount import Amount, figure
from headway.scaling.learning_curve import MIN_COMPUTES, LearningCurve, Measured
from headway.scaling.model import Model
from headway.scaling.result import Drawn, Estimate, Extrapolation, Fit, HeldBack, Point
from headway.scaling.search import Ends
from headway.types import UserError

SURE_SHARE = 0.5
"""A reward is determined if its interval is no wider than this share of the rise that was seen."""

SURE_FACTOR = 4.0
"""An efficiency or a midpoint is determined if its interval's upper end is no more than so many times the lower."""

MAX_POINTS = 200
"""Points that are fitted one by one; of a longer curve neighbours are joined."""

NARROW = 4.0
"""Points whose largest compute is less than so many times the smallest show little of a curve over many times that."""

ALIKE = 0.5
"""An autocorrelation that is worth a word."""

NUM_DRAWN = 81

USUAL_AT = (Amount(2.0, is_share=True), Amount(10.0, is_share=True))


@dataclass(frozen=True)
class Asked:
    """What is wanted of a fit.

    skip: the early part up to there is left out; until: what comes after is held back; at: where to extrapolate to
    (nothing: USUAL_AT, or the last point that is held back). start: R_0, None to fit it; ceiling: no reward is above
    it, None: as the curve has it.
    """

    skip: Amount | None = None
    until: Amount | None = None
    at: Sequence[Amount] = ()
    start: float | None = None
    ceiling: float | None = None

    def role(self, compute: float, largest: float) -> str:
        """What was measured at compute 0 is R_0 itself, and stays where the early part goes; unless R_0 is given."""
        if compute == 0:
            return "fitted" if self.start is None else "early"
        if self.skip and compute < self.skip.of(largest):
            return "early"
        return "later" if self.until and compute > self.until.of(largest) else "fitted"


def fit(curve: LearningCurve, asked: Asked = Asked()) -> Fit:
    """Raises UserError where there is nothing to fit: too few points, or no rise beyond the noise."""
    largest = curve.points[-1].compute
    roles = [asked.role(point.compute, largest) for point in curve.points]
    fitted = [point for point, role in zip(curve.points, roles, strict=True) if role == "fitted"]
    _refuse_too_few(curve, fitted, asked)
    points, width = _joined(fitted)
    ceiling = _ceiling(curve, fitted, asked)
    model = None if _is_constant(fitted) else Model(points, asked.start, ceiling)
    if model is None or not model.rises:
        raise UserError(
            f"{curve.name}: from {curve.x} {figure(fitted[0].compute)} to {figure(fitted[-1].compute)}, {curve.y} "
            "rises by no more than its points scatter: train longer, or measure it on more prompts"
        )
    return _told(curve, asked, roles, model, _notes(model, width))


def _refuse_too_few(curve: LearningCurve, fitted: Sequence[Measured], asked: Asked) -> None:
    num = len({point.compute for point in fitted})
    needed = MIN_COMPUTES - (asked.start is not None)
    if num < needed:
        left = " left" if len(fitted) < len(curve.points) else ""
        raise UserError(
            f"{curve.name} has {curve.y} at {num} amounts of {curve.x}{left}, and a fit needs {needed}: evaluate more "
            "often, or name another reward by --y"
        )


def _is_constant(fitted: Sequence[Measured]) -> bool:
    return len({point.reward for point in fitted}) == 1


def _ceiling(curve: LearningCurve, fitted: Sequence[Measured], asked: Asked) -> float | None:
    ceiling = curve.ceiling if asked.ceiling is None else asked.ceiling
    highest = max(point.reward for point in fitted)
    if ceiling is not None and highest > ceiling:
        raise UserError(f"--ceiling {ceiling:g}: {curve.name} has a {curve.y} of {highest:g}, which is above it")
    if asked.start is not None and ceiling is not None and asked.start >= ceiling:
        raise UserError(f"--start {asked.start:g} is not below the ceiling, {ceiling:g}")
    return ceiling


def _joined(fitted: Sequence[Measured]) -> tuple[list[Measured], int]:
    """At most MAX_POINTS points: neighbours are joined into their mean, all but those at compute 0. And how many."""
    at_0 = [point for point in fitted if point.compute == 0]
    others = [point for point in fitted if point.compute > 0]
    width = math.ceil(len(others) / MAX_POINTS)
    return at_0 + [_mean(others[first : first + width]) for first in range(0, len(others), width)], width


def _mean(points: Sequence[Measured]) -> Measured:
    num = len(points)
    compute = math.fsum(point.compute for point in points) / num
    reward = math.fsum(point.reward for point in points) / num
    return Measured(compute, reward, math.hypot(*(point.spread for point in points)) / num)


# ---- what is told of it


def _told(curve: LearningCurve, asked: Asked, roles: Sequence[str], model: Model, notes: Sequence[str]) -> Fit:
    reasons = _Reasons(curve.x, model)
    later = [point for point, role in zip(curve.points, roles, strict=True) if role == "later"]
    computes = _extrapolated_to(curve, asked, later)
    start = _reward(model, model.curve.start, model.starts(), reasons.of_rise())
    return Fit(
        name=curve.name,
        x=curve.x,
        y=curve.y,
        points=[Point(p.compute, p.reward, role) for p, role in zip(curve.points, roles, strict=True)],
        asymptote=_reward(model, model.curve.asymptote, model.asymptotes(), reasons.of_plateau()),
        efficiency=_factor(model.curve.efficiency, model.efficiencies(), reasons.of_rise()),
        midpoint=_factor(model.curve.midpoint, model.midpoints(), reasons.of_rise()),
        start=start if asked.start is None else Estimate(asked.start, asked.start, asked.start, held=True),
        noise=model.usual_noise,
        autocorrelation=model.best.rho,
        extrapolations=[_extrapolation(model, compute, reasons) for compute in computes],
        curve=_drawn(model, max([model.largest, *computes, *(point.compute for point in later)])),
        held_back=_held_back(model, later),
        notes=notes,
    )


def _extrapolated_to(curve: LearningCurve, asked: Asked, later: Sequence[Measured]) -> list[float]:
    if later and not asked.at:
        return [later[-1].compute]
    return [amount.of(curve.points[-1].compute) for amount in asked.at or USUAL_AT]


class _Reasons:
    """Why the points don't determine something, in words that say what would help. x: what compute is."""

    def __init__(self, x: str, model: Model) -> None:
        self._x, self._model = x, model
        low, high = model.midpoints()
        self._may_be_ahead, self._may_be_over = high > model.largest, low < model.smallest

    def of_plateau(self) -> str:
        largest, smallest = self._model.largest, self._model.smallest
        if self._may_be_ahead:
            return f"no plateau in sight: the midpoint may lie beyond {self._x} {figure(largest)}"
        if largest < NARROW * smallest and not self._model.has_start:
            return f"the points span no more than a factor of {largest / smallest:.2g} in {self._x}"
        return "the points scatter too much for how far they go into the plateau"

    def of_rise(self) -> str:
        if self._may_be_ahead:
            return self.of_plateau()
        if not self._model.has_start:
            return "the points tell too little of where the rise began: give --start R, or leave out less"
        if self._may_be_over:
            return f"the rise may be over before the first point, at {self._x} {figure(self._model.smallest)}"
        return "too few points lie in the rise, or they scatter too much"


def _extrapolation(model: Model, compute: float, reasons: _Reasons) -> Extrapolation:
    reward = _reward(model, model.curve(compute), model.at(compute), reasons.of_plateau())
    return Extrapolation(compute, compute / model.largest, reward)


def _reward(model: Model, value: float, ends: Ends, why: str) -> Estimate:
    return _estimate(value, ends, why, is_sure=_is_sure(model, ends))


def _is_sure(model: Model, ends: Ends) -> bool:
    rise = model.curve(model.largest) - model.curve(0.0 if model.has_start else model.smallest)
    return ends[1] - ends[0] <= SURE_SHARE * rise


def _factor(value: float, ends: Ends, why: str) -> Estimate:
    low, high = ends
    ends = (low if low > 0 else -math.inf), high
    return _estimate(value, ends, why, is_sure=low > 0 and high <= SURE_FACTOR * low)


def _estimate(value: float, ends: Ends, why: str, *, is_sure: bool) -> Estimate:
    low, high = (end if math.isfinite(end) else None for end in ends)
    return Estimate(value, low, high) if is_sure else Estimate(None, low, high, why)


def _drawn(model: Model, last: float) -> list[Drawn]:
    """In equal steps of log compute, from the first point above 0."""
    computes = np.geomspace(model.smallest, last, NUM_DRAWN).tolist()
    return [_drawn_at(model, compute) for compute in computes]


def _drawn_at(model: Model, compute: float) -> Drawn:
    low, high = model.at(compute)
    shown = compute <= model.largest or _is_sure(model, (low, high))
    return Drawn(compute, model.curve(compute) if shown else None, low, high)


def _held_back(model: Model, later: Sequence[Measured]) -> HeldBack | None:
    if not later:
        return None
    misses = [point.reward - model.curve(point.compute) for point in later]
    return HeldBack(
        num=len(later),
        num_inside=sum(model.is_likely(point) for point in later),
        mean_miss=math.fsum(misses) / len(misses),
        rms_miss=math.hypot(*misses) / math.sqrt(len(misses)),
    )


def _notes(model: Model, width: int) -> list[str]:
    said: list[str] = []
    if width > 1:
        said.append(f"of so many points, {width} neighbours each were joined into their mean")
    if model.best.rho >= ALIKE:
        said.append(
            f"neighbouring points stray alike (autocorrelation {model.best.rho:.1f}): slow noise, for which the "
            "intervals allow, or a curve that is no sigmoid, for which they don't"
        )
    if model.ceiling is not None and model.curve.asymptote >= model.ceiling - 1e-9:
        said.append(f"the asymptote is held at the ceiling, {model.ceiling:g}")
    return said
