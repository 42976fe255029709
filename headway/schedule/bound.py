"""How old a rollout can be when it is trained: the bound of each rule, as `docs/schedule.md` derives it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.schedule.policy import Rules


@dataclass(frozen=True)
class Bound:
    """lag: no rollout is trained with a larger one; None: there is no such number. why: what holds it, in words."""

    lag: int | None
    why: str


def lag_bound(rules: Rules, groups_per_batch: int) -> Bound:
    """The smallest of the bounds that the order and the stragglers' policy give.

    >>> lag_bound(Rules(run_ahead=2, order="window", window=9), groups_per_batch=4)
    Bound(lag=4, why='order window: run_ahead + ceil((window - 1) / groups per batch)')
    """
    bounds = [bound for bound in (_of_order(rules, groups_per_batch), _of_dropping(rules)) if bound.lag is not None]
    none = Bound(None, "order finished: a rollout may be overtaken by any number of others")
    return min(bounds, key=lambda bound: bound.lag or 0, default=none)


def _of_order(rules: Rules, groups_per_batch: int) -> Bound:
    ahead = rules.groups_ahead(groups_per_batch)
    if ahead == 0:
        return Bound(0, "run_ahead 0: nothing starts before the batch before it is published")
    if rules.order == "started":
        return Bound(math.ceil(ahead / groups_per_batch), "order started: run_ahead, rounded up")
    if rules.order == "window":
        assert rules.window is not None, "order window has a window"
        bound = math.ceil((ahead + rules.window - 1) / groups_per_batch)
        return Bound(bound, "order window: run_ahead + ceil((window - 1) / groups per batch)")
    return Bound(None, "")


def _of_dropping(rules: Rules) -> Bound:
    if "drop" in rules.stragglers:
        return Bound(rules.max_lag, "drop: what is older than max_lag is not trained")
    return Bound(None, "")
