"""Which of two recipes ends higher, which is steeper, which is there sooner; and whether the points can tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from headway.scaling.result import PARAMETERS, Comparison, Difference, Estimate, Fit


@dataclass(frozen=True)
class _Question:
    """One parameter, as a question. larger, smaller: what the second does if its own is; better: one of the two."""

    parameter: str
    is_ratio: bool
    larger: str
    smaller: str
    better: str


Interval = tuple[float | None, float | None, float | None]

QUESTIONS = (
    _Question("asymptote", False, "ends higher", "ends lower", "ends higher"),
    _Question("efficiency", True, "rises more steeply", "rises less steeply", "rises more steeply"),
    _Question("midpoint", True, "is halfway later", "is halfway sooner", "is halfway sooner"),
)


def compare(fits: Sequence[Fit]) -> list[Comparison]:
    """Every pair, in order."""
    return [
        Comparison(first.name, second.name, [_difference(question, first, second) for question in QUESTIONS])
        for first, second in combinations(fits, 2)
    ]


def _difference(question: _Question, first: Fit, second: Fit) -> Difference:
    one, other = first.estimate(question.parameter), second.estimate(question.parameter)
    value, low, high = _interval(question, one, other)
    if value is None or low is None or high is None:
        sign = _apart(one, other)  # one that isn't determined may have one end all the same
    else:
        even = 1.0 if question.is_ratio else 0.0
        sign = 1 if low > even else -1 if high < even else 0
    verdict = f"{_verdict(question, first, second, sign)}: {_because(question, first, second, (value, low, high))}"
    return Difference(question.parameter, question.is_ratio, value, low, high, sign != 0, verdict)


def _verdict(question: _Question, first: Fit, second: Fit, sign: int) -> str:
    if sign == 0:
        return f"can't tell whether {first.name} or {second.name} {question.better}"
    return f"{second.name} {question.larger if sign > 0 else question.smaller} than {first.name}"


def _because(question: _Question, first: Fit, second: Fit, interval: Interval) -> str:
    value, low, high = interval
    if value is not None:
        letter, joined = PARAMETERS[question.parameter], "over" if question.is_ratio else "less"
        return f"{letter} of {second.name} {joined} that of {first.name} is {value:.3g} [{low:.3g}, {high:.3g}]"
    one, other = first.estimate(question.parameter), second.estimate(question.parameter)
    names = [fit.name for fit, its in ((first, one), (second, other)) if its.value is None]
    all_the_same = ", but the two intervals lie apart" if _apart(one, other) else ""
    return f"the {question.parameter} of {' and '.join(names)} isn't determined{all_the_same}"


def _interval(question: _Question, one: Estimate, other: Estimate) -> Interval:
    """Of other - one (or other / one, by logs), from the two intervals: their distances add up as standard errors do.

    low = d - sqrt((other - other_low)^2 + (one_high - one)^2), and high the same with the other ends, for two runs that
    have nothing to do with each other. Nones where one of the six figures isn't there.

    Source: Zou & Donner, Statistics in Medicine 27 (2008), "method of variance estimates recovery".
    """
    figures = (one.value, one.low, one.high, other.value, other.low, other.high)
    if any(figure is None for figure in figures):
        return None, None, None
    scale = math.log if question.is_ratio else float
    a, a_low, a_high, b, b_low, b_high = (scale(figure) for figure in figures if figure is not None)
    ends = b - a, b - a - math.hypot(b - b_low, a_high - a), b - a + math.hypot(b_high - b, a - a_low)
    value, low, high = (math.exp(end) for end in ends) if question.is_ratio else ends
    return value, low, high


def _apart(one: Estimate, other: Estimate) -> int:
    """1: the other's interval lies above the one's all the same; -1: below; 0: neither."""
    if one.high is not None and other.low is not None and other.low > one.high:
        return 1
    return -1 if other.high is not None and one.low is not None and other.high < one.low else 0
