"""Uniforms by number: nothing to save, no order to keep."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

Uniforms = Callable[[int], float]
"""Number of a draw -> a uniform of the open interval (0, 1)."""


def uniforms(name: str, seed: int) -> Uniforms:
    """The stream `name` of a seed.

    A counter hash: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), whose state
    at a draw is a sum, so that draws need no order. To seed a `random.Random` by name costs ten times as much.

    >>> draw = uniforms("length", seed=0)
    >>> draw(7) == draw(7) != draw(8)
    True
    """
    origin = int.from_bytes(hashlib.sha256(f"{name}:{seed}".encode()).digest()[:8], "big")

    def draw(number: int) -> float:
        bits = (origin + number * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return (((bits ^ (bits >> 31)) >> 12) + 0.5) * 2.0**-52

    return draw
