"""How long a rollout is: given lengths, or a distribution keyed by the rollout's number.

A length is a pure function of (seed, index), so two schedules of one workload meet the same rollouts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from headway.types import UserError

Lengths = Callable[[int], float]
"""Start index of a rollout -> its length, in units of time at one unit of length per unit of time."""

LONGEST = 1e9
_KINDS = "constant, exponential, lognormal:SIGMA, or numbers as in 1,3,1"


def make_lengths(spec: str, mean: float, seed: int) -> Lengths:
    """`spec` as in the setting simulate.lengths. Given lengths are used in order; the last one repeats."""
    kind, _, parameter = spec.partition(":")
    if kind == "constant" and not parameter:
        return lambda index: mean
    if kind == "exponential" and not parameter:
        return lambda index: mean * _draw(seed, index).expovariate(1.0)
    if kind == "lognormal":
        sigma = _sigma(parameter or "1")
        return lambda index: mean * _draw(seed, index).lognormvariate(-sigma * sigma / 2, sigma)
    return _given(spec)


def _draw(seed: int, index: int) -> random.Random:
    return random.Random(f"length:{seed}:{index}")


def _sigma(parameter: str) -> float:
    try:
        sigma = float(parameter)
    except ValueError:
        sigma = math.nan
    if not 0 < sigma < math.inf:
        raise UserError(f"simulate.lengths: lognormal:{parameter} needs a positive number after the colon")
    return sigma


def _given(spec: str) -> Lengths:
    try:
        lengths = [float(word) for word in spec.split(",")]
    except ValueError:
        raise UserError(f"simulate.lengths {spec!r} is not understood; it may be {_KINDS}") from None
    if not all(0 < length <= LONGEST for length in lengths):
        raise UserError(f"simulate.lengths {spec!r}: every length must be above 0 and at most {LONGEST:g}")
    return lambda index: lengths[min(index, len(lengths) - 1)]
