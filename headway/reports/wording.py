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
