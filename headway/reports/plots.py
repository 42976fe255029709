"""What the figures of a page are made of: one look, columns of the steps' rows, curves, bands, panels, log axes.

Every curve has the train step on its x axis, as the version that the step made. Plain lists go in: no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headway.reports.record import Row, RunRecord

INK, MUTED, GRID = "#1f2933", "#66727f", "#e6eaee"
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f6db3", "#d97b29", "#2f8f5b", "#c0392b", "#7d5ba6", "#8a96a3"
BAND = "rgba(47,109,179,{alpha})"

ALL_ZERO = 1e-8
"""Where a log axis draws exact zeros if it has nothing else."""

ABOVE_PANELS_PX, BELOW_PANELS_PX = 64, 46
"""Room for a panel's title and legend, and for its axis."""

LEGEND = {"orientation": "h", "traceorder": "normal", "xanchor": "left", "yanchor": "bottom", "font": {"size": 12}}

Column = list[float | None]


def column(rows: Sequence[Row], name: str) -> Column:
    return [rounded(row.get(name)) for row in rows]


def rounded(value: float | None) -> float | None:
    """Six figures are more than a picture shows, and half the bytes."""
    return value if value is None else float(f"{value:.6g}")


def binned(values: Sequence[float], width: float, num_bins: int) -> list[int]:
    """How many values lie in [0, width), [width, 2 width) ...; the last bin takes whatever is beyond.

    >>> binned([0, 1, 2, 5, 9], width=2, num_bins=3)
    [2, 1, 2]
    """
    counts = [0] * num_bins
    for value in values:
        counts[min(int(value / width), num_bins - 1)] += 1
    return counts


def has(rows: Sequence[Row], *names: str) -> bool:
    return any(row.get(name) is not None for row in rows for name in names)


def suffixes(rows: Sequence[Row], prefix: str) -> list[str]:
    """What follows `prefix` in the names of the rows, in the order of their first appearance."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def house_style(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
    """One look for all: white, thin grid, legend above, one hover box per step."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 64, "r": 24, "t": 34, "b": 46},
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12, "color": INK},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="white",
        hovermode="x unified",
        showlegend=True,
        hoverlabel={"bgcolor": "white", "bordercolor": GRID},
        legend={**LEGEND, "x": 0, "y": 1.0},
    )
    title = {"font": {"size": 12, "color": MUTED}}
    figure.update_xaxes(gridcolor=GRID, zeroline=False, linecolor=GREY, ticks="outside", tickcolor=GREY, title=title)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True, title=title)
    figure.update_layout(**layout)
    return figure


def line(rows: Sequence[Row], name: str, label: str, color: str, **options: Any) -> go.Scatter:
    return line_through(column(rows, "version"), column(rows, name), label, color, **options)


def line_through(
    x: Sequence[Any], y: Column, label: str, color: str, *, dash: str = "solid", width: float = 2, **options: Any
) -> go.Scatter:
    """A curve; where it has few points each is marked, so that one step is seen too."""
    return go.Scatter(
        x=list(x),
        y=y,
        name=label,
        mode="lines+markers" if len(x) <= 30 else "lines",
        line={"color": color, "width": width, "dash": dash},
        marker={"size": 5, "color": color},
        **options,
    )


def band(rows: Sequence[Row], low: Column, high: Column, label: str, alpha: float, **options: Any) -> go.Scatter:
    """The area between two curves, as one closed shape, over the steps that have both ends."""
    both = [
        (x, down, up)
        for x, down, up in zip(column(rows, "version"), low, high, strict=True)
        if down is not None and up is not None
    ]
    return go.Scatter(
        x=[x for x, _, _ in both] + [x for x, _, _ in reversed(both)],
        y=[up for _, _, up in both] + [down for _, down, _ in reversed(both)],
        name=label,
        fill="toself",
        fillcolor=BAND.format(alpha=alpha),
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        **options,
    )


def x_steps(figure: go.Figure, run: RunRecord, *, titled: bool = True, bars: bool = False, **where: Any) -> None:
    """The x axis: from version 0, before the first step, to the newest; with room for a mark or a bar at either end."""
    last = max([1, *(row["version"] for row in run.steps), *(event["version"] for event in run.evaluations)])
    room = max(0.015 * last, 0.5 if bars else 0.0)
    figure.update_xaxes(range=[-room, last + room], dtick=1 if last <= 12 else None, **where)
    if titled:
        figure.update_xaxes(title={"text": "train step", "standoff": 8}, **where)


def headroom(steps: Sequence[Row], names: Sequence[str], least: float) -> float:
    """The upper end of an axis that begins at 0: a little above the highest value, and never below `least`."""
    return max([least, *(1.1 * value for name in names for value in column(steps, name) if value is not None)])


# ---- several panels side by side


def panels(titles: Sequence[str], height: int, **options: Any) -> go.Figure:
    """Panels side by side (with `rows`, the upper row has the titles), each with a title and a legend of its own."""
    num = len(titles)
    spacing = {"horizontal_spacing": 0.09} if num > 1 else {}
    figure = make_subplots(**{"rows": 1, "cols": num, "subplot_titles": titles, **spacing, **options})
    house_style(figure, height, margin={"l": 64, "r": 24, "t": ABOVE_PANELS_PX, "b": BELOW_PANELS_PX})
    layout: Any = figure.layout
    for number, title in enumerate(layout.annotations, 1):
        left, top = _corner(layout, number)
        title.update(x=left, xanchor="left", y=top, yanchor="bottom", yshift=24, font={"size": 13, "color": INK})
        figure.update_layout({legend_of(number): {**LEGEND, "x": left, "y": top}})
    return figure


def legend_of(number: int) -> str:
    """The legend of panel 1, 2 ..."""
    return "legend" if number == 1 else f"legend{number}"


def _corner(layout: Any, number: int) -> tuple[float, float]:
    """The upper left one of a panel."""
    axis = "" if number == 1 else str(number)
    return layout[f"xaxis{axis}"].domain[0], layout[f"yaxis{axis}"].domain[1]


def add(figure: go.Figure, trace: Any, number: int, row: int = 1) -> None:
    """Add a trace to panel 1, 2 ... and its legend."""
    trace.legend = legend_of(number)
    figure.add_trace(trace, row, number)


# ---- log axes


def log_traces(curves: Sequence[Any]) -> list[go.Scatter]:
    """The curves of one log axis. It has no zero: exact zeros (bitwise parity) are hollow marks a decade below all."""
    positive = [value for curve in curves for value in curve.y if value is not None and value > 0]
    floor = min(positive) / 10 if positive else ALL_ZERO
    traces: list[go.Scatter] = []
    for curve in curves:
        points = list(zip(curve.x, curve.y, strict=True))
        zeros = [x for x, value in points if value is not None and value <= 0]
        above = [value if value is not None and value > 0 else None for _, value in points]
        if any(above):
            traces.append(curve.update(y=above, connectgaps=False))
        if zeros:
            traces.append(_zero_marks(zeros, floor, curve))
    return traces


def _zero_marks(x: Sequence[Any], floor: float, curve: Any) -> go.Scatter:
    return go.Scatter(
        x=list(x),
        y=[floor] * len(x),
        name=f"{curve.name}: exactly 0",
        mode="markers",
        marker={"symbol": "circle-open", "size": 6, "color": curve.line.color},
        hovertemplate="exactly 0",
    )


def log_axis(figure: go.Figure, curves: Sequence[Any], **where: Any) -> None:
    """The y axis of curves in powers of ten, about eight of them named; where all is exactly 0 it says just that."""
    positive = [value for curve in curves for value in curve.y if value is not None and value > 0]
    if not positive:
        figure.update_yaxes(type="log", range=[-9, -7], tickvals=[ALL_ZERO], ticktext=["0"], **where)
        return
    decades = math.log10(max(positive)) - math.log10(min(positive))
    named = "D2" if decades < 1.5 else math.ceil((decades + 1) / 8)  # D2: also 2 and 5 times a power
    figure.update_yaxes(type="log", exponentformat="power", dtick=named, tickfont={"size": 10}, **where)
