"""How many tokens rollouts in flight hold, from the lengths that answers have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt


@dataclass(frozen=True)
class Answers:
    """Prompts of `prompt` tokens and the lengths of answers: numbers that stand for their distribution, ascending.

    longest: the token budget of an answer, or where there is none the longest of these.
    """

    prompt: float
    lengths: tuple[float, ...]
    longest: float

    @staticmethod
    def of(prompt: float, lengths: Sequence[float], longest: float | None = None) -> Answers:
        """longest: the token budget at which every answer ends."""
        cut = sorted(lengths if longest is None else [min(length, longest) for length in lengths])
        return Answers(prompt, tuple(cut), cut[-1] if longest is None else longest)

    @cached_property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @cached_property
    def steady(self) -> tuple[float, float]:
        """Mean and standard deviation of the answer tokens that one lane holds when lanes go on without a pause.

        A lane is found in an answer in proportion to its length, and anywhere in it: E[L^2] / 2 E[L], and for the
        square E[L^3] / 3 E[L].
        """
        first, second, third = (sum(x**power for x in self.lengths) for power in (1, 2, 3))
        mean = second / (2 * first)
        return mean, sqrt(max(0.0, third / (3 * first) - mean * mean))

    def held(self, num_rollouts: float, *, safety: float = 3.0) -> tuple[float, float]:
        """Tokens in the cache of so many rollouts in flight, prompts of their own each -> at least, as expected.

        At least: the mean in a steady state. As expected: the larger of that with `safety` standard deviations, and of
        rollouts that start together at their worst moment; but never more than all at their longest.
        """
        mean, deviation = self.steady
        floor = num_rollouts * (self.prompt + mean)
        steady = floor + safety * sqrt(num_rollouts) * deviation
        together = max(self._still_running(num_rollouts, place, safety) for place in range(len(self.lengths)))
        return floor, min(num_rollouts * (self.prompt + self.longest), max(steady, together))

    def _still_running(self, num_rollouts: float, place: int, safety: float) -> float:
        """Tokens of rollouts that started together when the place-th shortest is about to end."""
        share = 1 - place / len(self.lengths)
        num = num_rollouts * share + safety * sqrt(num_rollouts * share * (1 - share))
        return min(num, num_rollouts) * (self.prompt + self.lengths[place])

    def expected_longest(self, num: int) -> float:
        """Of so many independent answers: the i-th of n lengths is it with chance (i/n)^num - ((i-1)/n)^num."""
        n = len(self.lengths)
        shares = [(place / n) ** num for place in range(n + 1)]
        return sum(
            length * (after - before)
            for length, before, after in zip(self.lengths, shares[:-1], shares[1:], strict=True)
        )
