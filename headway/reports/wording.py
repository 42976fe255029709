"""Numbers as people read them, the same on the page and in the terminal."""

from __future__ import annotations

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


def interval(examined: Event) -> str:
    """The 95 % interval of an examination's accuracy, as in '51.8–74.7 %'."""
    low, high = wilson(examined["num_correct"], examined["num"])
    return f"{100 * low:.1f}–{100 * high:.1f} %"


def examination(examined: Event) -> str:
    """One line on an examination."""
    num, num_unscored = examined["num"], examined["num_unscored"]
    name = f"examination of version {examined['version']}"
    unscored = f", {num_unscored} unscored" if num_unscored else ""
    if not num:
        return f"{name}: no answer could be scored{unscored}"
    share = percent(examined["num_correct"] / num)
    return f"{name}: {examined['num_correct']} of {num} correct, {share} (95 % interval {interval(examined)}){unscored}"
