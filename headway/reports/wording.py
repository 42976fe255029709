"""Numbers as people read them, the same on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.reports.interval import wilson
from headway.trace import Event


def duration(seconds: float) -> str:
    """
    >>> duration(41.4), duration(3723)
    ('0:41', '1:02:03')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(share: float) -> str:
    """
    >>> percent(0.6406)
    '64.1 %'
    """
    return f"{100 * share:.1f} %"


def interval(evaluated: Event) -> str:
    """The 95 % interval of an evaluation's accuracy, as in '51.8–74.7 %'."""
    low, high = wilson(evaluated["num_correct"], evaluated["num"])
    return f"{100 * low:.1f}–{100 * high:.1f} %"


def evaluation(evaluated: Event) -> str:
    """One line on an evaluation."""
    num, num_unscored = evaluated["num"], evaluated["num_unscored"]
    name = f"evaluation of version {evaluated['version']}"
    unscored = f", {num_unscored} unscored" if num_unscored else ""
    if not num:
        return f"{name}: no answer could be scored{unscored}"
    share = percent(evaluated["num_correct"] / num)
    return (
        f"{name}: {evaluated['num_correct']} of {num} correct, {share} (95 % interval {interval(evaluated)}){unscored}"
    )


def simulated(figures: Mapping[str, Any], why: str) -> str:
    """The figures of a simulated run (`summary.summarise`) in a few lines. why: what holds its lag bound."""
    bound = "has no bound" if figures["lag_bound"] is None else f"can't exceed {figures['lag_bound']}"
    lines = [
        f"total {figures['total']:g}  lane utilisation {figures['lane_utilization']:.1%}  "
        f"trainer utilisation {figures['trainer_utilization']:.1%}  throughput {figures['throughput']:.4g}  "
        f"lag mean {figures['mean_lag']:.3g} max {figures['max_lag']}",
        f"lag {bound} ({why}); token-weighted mean {figures['token_lag']:.3g}; "
        f"above run_ahead in {percent(figures['over_run_ahead'])} of the trained rollouts",
        _lengths(figures),
        *(f"{name}: {_shares(figures, key)}" for name, key in (("tokens", "token_share"), ("lane time", "lane_share"))),
    ]
    return "\n".join(filter(None, lines))


def _lengths(figures: Mapping[str, Any]) -> str:
    trained, started = figures["trained_length"], figures["started_length"]
    if not (trained and started):
        return ""
    return f"mean length trained {trained:.4g}, of all that ended {started:.4g} (ratio {trained / started:.3f})"


def _shares(figures: Mapping[str, Any], key: str) -> str:
    """What the tokens, or the time of the lanes, went to; the largest first."""
    classes = figures["goodput"]["classes"].items()
    shares = sorted(((amount[key], name) for name, amount in classes if amount[key]), reverse=True)
    return ", ".join(f"{name.replace('_', ' ')} {percent(share)}" for share, name in shares)
