"""Who was trained: lengths of the rollouts that were, beside those that were started, dropped and interrupted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headway.reports import lengths
from headway.reports.fates import FATES_IN_WORDS
from headway.reports.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    Column,
    binned,
    column,
    has,
    house_style,
    line,
    line_through,
    rounded,
    x_steps,
)
from headway.reports.record import MAX_POINTS, Row, RunRecord, thinned

NUM_BINS = 40

POINTS = (
    ("dropped", "dropped", RED, "x"),
    ("interrupted", "interrupted", ORANGE, "triangle-up"),
    ("filtered", "filtered out", PURPLE, "circle-open"),
    ("aborted", "thrown away", GREY, "cross-thin-open"),
)
"""Kinds of `lengths.KINDS` that are drawn as points: kind, label, colour, symbol."""

FATE_COLORS = {
    "trained": BLUE,
    "interrupted": ORANGE,
    "dropped": RED,
    "filtered": PURPLE,
    "failed": INK,
    "aborted": GREY,
    "waiting": GREEN,
}
LABELS: dict[str, str] = {**FATES_IN_WORDS, "interrupted": "interrupted, whatever came then"}


def trained_length(run: RunRecord) -> go.Figure | None:
    """Mean length step by step: trained against started; below, trained over started of all steps so far."""
    rows = thinned(lengths.cohorts(run.timeline.lives), MAX_POINTS)
    if not has(rows, "trained"):
        return None
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.68, 0.32], vertical_spacing=0.08)
    figure.add_trace(line(rows, "started", "all that started then", GREY, dash="dot"), 1, 1)
    figure.add_trace(line(rows, "trained", "trained", BLUE), 1, 1)
    for kind, label, color, symbol in POINTS:
        if has(rows, kind):
            figure.add_trace(_points(rows, kind, label, color, symbol), 1, 1)
    versions = column(rows, "version")
    figure.add_trace(line_through(versions, _ratio(rows), "trained / started, of all steps so far", GREEN), 2, 1)
    figure.add_hline(y=1, line={"color": GREY, "width": 1}, row=2, col=1)  # type: ignore[arg-type]  # an int, as in plotly's guide
    house_style(figure, 400)
    x_steps(figure, run, row=2)
    figure.update_yaxes(title={"text": _unit(run)}, rangemode="tozero", row=1)
    figure.update_yaxes(title={"text": "ratio"}, range=_around_one(_ratio(rows)), row=2)
    return figure


def _unit(run: RunRecord) -> str:
    return "tokens" if run.unit == "s" else "length"


def _points(rows: Sequence[Row], kind: str, label: str, color: str, symbol: str) -> go.Scatter:
    return go.Scatter(
        x=column(rows, "version"),
        y=column(rows, kind),
        name=label,
        mode="markers",
        marker={"color": color, "symbol": symbol, "size": 7, "line": {"color": color, "width": 1.4}},
    )


def _ratio(rows: Sequence[Row]) -> Column:
    pairs = zip(column(rows, "trained_so_far"), column(rows, "started_so_far"), strict=True)
    return [rounded(trained / started) if trained is not None and started else None for trained, started in pairs]


def _around_one(ratios: Column) -> list[float]:
    """An axis that holds 1 and every ratio, and on which a few per cent look small."""
    known = [ratio for ratio in ratios if ratio is not None]
    return [min([0.88, *(0.97 * ratio for ratio in known)]), max([1.12, *(1.03 * ratio for ratio in known)])]


def length_histogram(run: RunRecord) -> go.Figure | None:
    """How many rollouts of each length there were, by what became of them."""
    found = lengths.by_fate(run.timeline.lives)
    if not found:
        return None
    counted = run.unit == "s"  # tokens, which are whole; else lengths of any size
    longest = max(max(tokens) for tokens in found.values())
    width = max(1, math.ceil((longest + 1) / NUM_BINS)) if counted else longest / NUM_BINS or 1.0
    num_bins = int(longest // width) + 1 if counted else NUM_BINS
    middle = (width - 1) / 2 if counted else width / 2
    figure = go.Figure()
    for fate, color in FATE_COLORS.items():
        if fate in found:
            figure.add_trace(
                go.Bar(
                    x=[rounded(number * width + middle) for number in range(num_bins)],
                    y=binned(found[fate], width, num_bins),
                    width=width,
                    name=LABELS[fate],
                    marker={"color": color, "line": {"color": "white", "width": 0.5}},
                )
            )
    house_style(figure, 300, barmode="stack", bargap=0)
    figure.update_xaxes(title={"text": f"length of the rollout ({_unit(run)})", "standoff": 8}, rangemode="tozero")
    figure.update_yaxes(title={"text": "rollouts"})
    return figure
