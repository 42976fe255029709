"""Goodput: of all tokens that were sampled and of all the time that lanes stood ready, what came to be trained.

Every second of a lane and every token is in exactly one of CLASSES, by the fate of the rollout that it went to; so the
shares add up to 1. What ended at the token budget, or was interrupted, is counted across them (OF_ALL).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from headway.reports.fates import Fate, Life, Stretch

CLASSES = (*get_args(Fate), "idle")
"""What a second of a lane can have gone to; a token, to all but `idle`."""

OF_ALL = {"length": "truncated", "interrupted": "interrupted"}
"""Finish reason of rollouts of any fate -> what they are called here."""


@dataclass(slots=True)
class Amount:
    """What went to a class: rollouts, the tokens that the trace knows of, and lane time."""

    rollouts: int = 0
    tokens: float = 0.0
    lane_s: float = 0.0

    def add(self, tokens: float, lane_s: float) -> None:
        self.rollouts += 1
        self.tokens += tokens
        self.lane_s += lane_s


@dataclass(frozen=True)
class Goodput:
    """The account of a window of time. classes: those of CLASSES that occur; of_all: counted across them."""

    classes: dict[str, Amount]
    of_all: dict[str, Amount]

    @property
    def tokens(self) -> float:
        return sum(amount.tokens for amount in self.classes.values())

    @property
    def lane_s(self) -> float:
        return sum(amount.lane_s for amount in self.classes.values())

    def shares(self, amount: Amount) -> tuple[float, float]:
        """(of all tokens, of all lane time)."""
        tokens, lane_s = self.tokens, self.lane_s
        return amount.tokens / tokens if tokens else 0.0, amount.lane_s / lane_s if lane_s else 0.0


def account(lives: Sequence[Life], num_lanes: int, *, began_s: float, ended_s: float) -> Goodput:
    """Where the tokens and the lane time of the window [began_s, ended_s] went.

    Lane time is cut at the window; a rollout's tokens count where it last held a lane within it.
    """
    classes: dict[str, Amount] = defaultdict(Amount)
    of_all: dict[str, Amount] = defaultdict(Amount)
    for life in lives:
        if life.stretches and life.stretches[-1].ended_s < began_s:
            continue
        lane_s = sum(_within(stretch, began_s) for stretch in life.stretches)
        classes[life.fate].add(life.tokens, lane_s)
        if life.finish in OF_ALL and not life.evaluation:
            of_all[OF_ALL[life.finish]].add(life.tokens, lane_s)
    idle_s = _idle_s(lives, num_lanes, began_s, ended_s)
    if idle_s:
        classes["idle"] = Amount(lane_s=idle_s)
    return Goodput(
        {name: classes[name] for name in CLASSES if name in classes},
        {name: of_all[name] for name in OF_ALL.values() if name in of_all},
    )


def _within(stretch: Stretch, began_s: float) -> float:
    return max(0.0, stretch.ended_s - max(stretch.began_s, began_s))


def _idle_s(lives: Iterable[Life], num_lanes: int, began_s: float, ended_s: float) -> float:
    """The gaps between the stretches of each lane."""
    lanes: dict[int, list[tuple[float, float]]] = {lane: [] for lane in range(num_lanes)}
    for life in lives:
        for stretch in life.stretches:
            lanes[stretch.lane].append((stretch.began_s, stretch.ended_s))
    idle_s = 0.0
    for stretches in lanes.values():
        free_s = began_s
        for began, ended in sorted(stretches):
            idle_s += max(0.0, began - free_s)
            free_s = max(free_s, ended)
        idle_s += max(0.0, ended_s - free_s)
    return idle_s


def figures(lives: Sequence[Life], num_lanes: int, *, began_s: float, ended_s: float) -> dict[str, Any]:
    """As JSON: {tokens, lane_time, classes: {NAME: {rollouts, tokens, token_share, lane_time, lane_share}}, of_all: the
    same across the classes}. What did not occur is left out.
    """
    goodput = account(lives, num_lanes, began_s=began_s, ended_s=ended_s)
    return {
        "tokens": goodput.tokens,
        "lane_time": goodput.lane_s,
        "classes": {name: _figures(goodput, amount) for name, amount in goodput.classes.items()},
        "of_all": {name: _figures(goodput, amount) for name, amount in goodput.of_all.items()},
    }


def _figures(goodput: Goodput, amount: Amount) -> dict[str, float]:
    token_share, lane_share = goodput.shares(amount)
    return {
        "rollouts": amount.rollouts,
        "tokens": amount.tokens,
        "token_share": token_share,
        "lane_time": amount.lane_s,
        "lane_share": lane_share,
    }
