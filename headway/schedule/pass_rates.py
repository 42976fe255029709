"""Which prompts are answered right so often that asking them again teaches nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

RIGHT = 1.0
"""A reward from here on is a right answer."""


@dataclass
class PassRates:
    """Right answers to each prompt, over all epochs so far.

    prompt_of: group -> uid of its prompt; num_prompts: how many there are; retire_above: the share of right answers
    from which on a prompt is not asked again. counts: uid -> (right, asked), what a resume begins with.

    Source: Khatri et al. 2025, ScaleRL, arXiv 2510.13786 (no-positive-resampling, at a pass rate of 0.9).
    """

    prompt_of: Callable[[int], str]
    num_prompts: int
    retire_above: float
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def count(self, group: int, rewards: Iterable[float]) -> bool:
        """Add the rewards of a trained group -> whether its prompt is retired by them."""
        uid, was_retired = self.prompt_of(group), self.retired(group)
        right, asked = self.counts.get(uid, (0, 0))
        given = list(rewards)
        self.counts[uid] = (right + sum(reward >= RIGHT for reward in given), asked + len(given))
        return self.retired(group) and not was_retired

    def retired(self, group: int) -> bool:
        return self._is_retired(self.prompt_of(group))

    @property
    def all_retired(self) -> bool:
        return len(self.counts) >= self.num_prompts and all(map(self._is_retired, self.counts))

    def _is_retired(self, uid: str) -> bool:
        right, asked = self.counts.get(uid, (0, 0))
        return asked > 0 and right / asked >= self.retire_above

    def progress(self) -> dict[str, list[int]]:
        return {uid: list(counts) for uid, counts in self.counts.items()}

    def resume(self, saved: Mapping[str, Sequence[int]]) -> None:
        self.counts = {uid: (right, asked) for uid, (right, asked) in saved.items()}
