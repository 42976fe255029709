"""Where the tokens and the lane time of a run went: a table on its page, and a line in the terminal."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from headway.reports.fates import FATES_IN_WORDS
from headway.reports.wording import percent

NOTES = {
    "failed": "no score, or too few in the group",
    "aborted": "redundant, or begun again",
    "lost": "its tokens are not known",
    "in_flight": "tokens of its last stretch are not known",
}
ROWS = {
    **{fate: words + (f" ({NOTES[fate]})" if fate in NOTES else "") for fate, words in FATES_IN_WORDS.items()},
    "idle": "lanes without a rollout",
}
"""Class of `goodput.CLASSES` -> how a reader is told of it."""

ACROSS = {
    "truncated": "of all these, cut off at the token budget",
    "interrupted": "of all these, interrupted (max_lag or deadline)",
}

COLUMNS = ("", "rollouts", "tokens", "share", "lane time", "share")


def table(goodput: dict[str, Any], unit: str) -> str:
    """The account of `goodput.figures` as HTML; "" of a run in which no lane was ever ready."""
    if not goodput["lane_time"]:
        return ""
    rows = [_row(ROWS[name], figures) for name, figures in goodput["classes"].items()]
    whole = {"rollouts": _total(goodput, "rollouts"), "tokens": goodput["tokens"], "lane_time": goodput["lane_time"]}
    rows.append(_row("all", {**whole, "token_share": 1.0, "lane_share": 1.0}))
    rows += [_row(ACROSS[name], figures) for name, figures in goodput["of_all"].items()]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    return (
        "<h3>Goodput</h3><p class=over>Where every sampled token and every second of every lane went, by what became "
        f"of the rollout. Lane time in {'seconds' if unit == 's' else html.escape(unit)}. "
        '<b class="good">Healthy:</b> nearly all of both is trained.</p>'
        f'<div class="wide"><table class="numbers"><tr>{head}</tr>{"".join(rows)}</table></div>'
    )


def _total(goodput: dict[str, Any], name: str) -> int:
    return sum(figures[name] for figures in goodput["classes"].values())


def _row(label: str, figures: dict[str, float]) -> str:
    no_rollout = not figures["rollouts"]
    cells = [
        label,
        "" if no_rollout else f"{figures['rollouts']:,}",
        "" if no_rollout else _amount(figures["tokens"]),
        "" if no_rollout else percent(figures["token_share"]),
        _amount(figures["lane_time"]),
        percent(figures["lane_share"]),
    ]
    return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def lines(goodput: dict[str, Any], lengths: Sequence[float | None]) -> list[str]:
    """Of the terminal's outcome: shares of what was sampled and of the lanes, and lengths (trained, started)."""
    classes = goodput["classes"]
    if "trained" not in classes:
        return []
    trained = classes["trained"]
    rest = [f"{name.replace('_', ' ')} {percent(classes[name]['lane_share'])}" for name in classes if name != "trained"]
    said = [
        f"goodput          {percent(trained['token_share'])} of the sampled tokens and "
        f"{percent(trained['lane_share'])} of the lane time were trained"
    ]
    said += [f"                 (other lane time: {', '.join(rest)})"] if rest else []
    trained_length, started_length = lengths
    if trained_length is not None and started_length:
        said.append(
            f"mean length      {trained_length:.4g} trained, {started_length:.4g} of all that ended "
            f"(ratio {trained_length / started_length:.3g})"
        )
    return said
