"""The page of fits: points, the curve with its interval and its extrapolation, the asymptote; figures in a table."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from headway.reports import scaling_table
from headway.reports.document import document
from headway.reports.page_style import DRAW
from headway.reports.plots import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, house_style
from headway.scaling.amount import figure
from headway.scaling.result import Comparison, Drawn, Fit

COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, INK, GREY)

SYMBOLS = {"fitted": "circle", "early": "x-thin-open", "later": "circle-open"}
"""Of points, by their role; what it is called stands in ROLES."""

ROLES = {"fitted": "", "early": ", left out", "later": ", held back"}


SAID_OF_FITS = (scaling_table.whys, scaling_table.held_back, scaling_table.notes)

CAPTION = (
    "The band is the 95 % interval of the curve. Beyond what was fitted, the line goes on in dashes, as far as it is "
    "determined. Dotted: the asymptote, where it is determined. Points at compute 0 are drawn at the left edge."
)


def write(path: Path, fits: Sequence[Fit], comparisons: Sequence[Comparison]) -> None:
    path.write_text(page(fits, comparisons), encoding="utf-8", errors="replace")


def page(fits: Sequence[Fit], comparisons: Sequence[Comparison]) -> str:
    """The whole document."""
    picture = _picture(fits)
    title = "Where learning curves lead" if len(fits) > 1 else "Where a learning curve leads"
    parts = (scaling_table.compared(comparisons), *(say(fits) for say in SAID_OF_FITS))
    said = [words for part in parts for words in part]
    body = "\n".join(
        [
            f'<header><p class="what">A Headway fit</p><h1>{title}</h1>',
            *(f'<p class="lead">{html.escape(words)}</p>' for words in scaling_table.told(comparisons)),
            f'<p class="over">{html.escape(scaling_table.axes(fits[0]))}</p></header>',
            "<noscript><p class='note'>The picture needs JavaScript; the table below does not.</p></noscript>",
            f"<figure><h3>Reward over compute</h3><figcaption>{CAPTION}</figcaption>"
            f'<div class="plot" id="curves" style="height:{picture.layout["height"]:g}px"></div></figure>',
            "<section><h2>All figures</h2>",
            _table(fits),
            *(f"<p>{html.escape(words)}</p>" for words in said),
            f'<p class="over">{html.escape(scaling_table.SAID)}</p></section>',
        ]
    )
    return document(title, body, {"curves": picture.to_plotly_json()}, DRAW, source="learning curves and their fits")


def _table(fits: Sequence[Fit]) -> str:
    head = "".join(f"<th>{html.escape(fit.name)}</th>" for fit in fits)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(word)}</td>" for word in row) + "</tr>" for row in scaling_table.rows(fits)
    )
    return f'<div class="wide"><table class="numbers"><tr><th></th>{head}</tr>{rows}</table></div>'


def _picture(fits: Sequence[Fit]) -> go.Figure:
    left = min(point.compute for fit in fits for point in fit.points if point.compute > 0) / 1.3
    right = max(drawn.compute for fit in fits for drawn in fit.curve)
    drawing = go.Figure()
    for fit, color in zip(fits, COLORS * (1 + len(fits) // len(COLORS)), strict=False):
        drawing.add_traces([_band(fit, color), *_points(fit, color, left), *_lines(fit, color)])
        if fit.asymptote.value is not None:
            drawing.add_trace(_asymptote(fit, fit.asymptote.value, color, (left, right)))
    house_style(drawing, 520, hovermode="closest", margin={"l": 64, "r": 24, "t": 72, "b": 46})
    drawing.update_xaxes(type="log", title={"text": f"{fits[0].x} (log scale)"})
    drawing.update_yaxes(range=_heights(fits), title={"text": fits[0].y})
    return drawing


def _heights(fits: Sequence[Fit]) -> list[float]:
    """Of the y axis: all that was measured or is determined; a band that goes on for ever leaves the picture."""
    rewards = [point.reward for fit in fits for point in fit.points]
    rewards += [fit.asymptote.value for fit in fits if fit.asymptote.value is not None]
    margin = 0.08 * (max(rewards) - min(rewards))
    return [min(rewards) - margin, max(rewards) + margin]


def _band(fit: Fit, color: str) -> go.Scatter:
    there, back = list(fit.curve), list(reversed(fit.curve))
    return go.Scatter(
        x=[drawn.compute for drawn in (*there, *back)],
        y=[drawn.high for drawn in there] + [drawn.low for drawn in back],
        fill="toself",
        fillcolor=color,
        opacity=0.15,
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
    )


def _points(fit: Fit, color: str, left: float) -> list[go.Scatter]:
    traces: list[go.Scatter] = []
    for role, symbol in SYMBOLS.items():
        points = [point for point in fit.points if point.role == role]
        if points:
            marker: dict[str, Any] = {"symbol": symbol, "size": 6, "color": color, "opacity": 0.7}
            traces.append(
                go.Scatter(
                    x=[point.compute or left for point in points],
                    y=[point.reward for point in points],
                    text=[f"{point.reward:.4g} at {figure(point.compute)}" for point in points],
                    name=f"{fit.name}{ROLES[role]}",
                    mode="markers",
                    marker=marker | ({"line": {"width": 1.5, "color": color}} if role == "early" else {}),
                    hovertemplate="%{text}",
                )
            )
    return traces


def _lines(fit: Fit, color: str) -> list[go.Scatter]:
    """As far as points were fitted, and on from there in dashes."""
    num_inside = sum(drawn.compute <= fit.reaches for drawn in fit.curve)
    parts = (fit.curve[:num_inside], "solid"), (fit.curve[max(num_inside - 1, 0) :], "dash")
    return [_line(drawn, color, dash) for drawn, dash in parts if len(drawn) > 1]


def _line(curve: Sequence[Drawn], color: str, dash: str) -> go.Scatter:
    known = [drawn for drawn in curve if drawn.reward is not None]
    return go.Scatter(
        x=[drawn.compute for drawn in known],
        y=[drawn.reward for drawn in known],
        mode="lines",
        line={"color": color, "width": 2, "dash": dash},
        text=[f"{d.reward:.4g} [{d.low:.4g}, {d.high:.4g}] at {figure(d.compute)}" for d in known],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )


def _asymptote(fit: Fit, value: float, color: str, ends: tuple[float, float]) -> go.Scatter:
    return go.Scatter(
        x=list(ends),
        y=[value, value],
        name=f"{fit.name}, asymptote {value:.3f}",
        mode="lines",
        line={"color": color, "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )
