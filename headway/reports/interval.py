"""How sure a share of correct answers is."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054
"""Half-width of the central 95 % of a standard normal distribution, in standard deviations."""


def wilson(num_correct: int, num: int, z: float = Z_95) -> tuple[float, float]:
    """The 95 % interval of a share, as shares of 1: (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), p = k/n.

    It stays inside [0, 1] and has a width at 0 and at n of n (Wilson, JASA 22, 1927). (0, 1) when `num` is 0.

    >>> [round(end, 4) for end in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    assert 0 <= num_correct <= num, f"{num_correct} of {num} answers can't be correct"
    if num == 0:
        return 0.0, 1.0
    share, square = num_correct / num, z * z / num
    middle = share + square / 2
    half = z * math.sqrt(share * (1 - share) / num + square / num / 4)
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    return (0.0 if num_correct == 0 else low), (1.0 if num_correct == num else high)
