"""The page of a probe: how much each source brings, where in the model it begins, and every figure in a table."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from headway.reports.document import document
from headway.reports.document import figure as placed
from headway.reports.mismatch_table import CONTROL, ROUNDING, SAID, TABLES, Column, Probe, Source, label
from headway.reports.page_style import DRAW
from headway.reports.plots import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, house_style

COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, INK, "#b58900", "#2aa198", GREY)


def write(path: Path, probe: Probe) -> None:
    path.write_text(page(probe), encoding="utf-8", errors="replace")


def page(probe: Probe) -> str:
    """The whole document."""
    figures = {"sizes": _sizes(probe), "stages": _stages(probe)}
    body = "\n".join(
        [
            '<header><p class="what">A Headway probe</p><h1>Where engine and trainer differ</h1>'
            f'<p class="lead">{html.escape(probe.verdict())}</p>',
            f'<p class="over">{html.escape(probe.asked)}</p></header>',
            "<noscript><p class='note'>The pictures need JavaScript; the tables below do not.</p></noscript>",
            placed("sizes", figures["sizes"], "How much", "KL per token. Blue: your own engine does it."),
            placed(
                "stages",
                figures["stages"],
                "Where in the model",
                "Of the first answer's tokens: the length of the difference of the two states over that of the "
                f"trainer's, at its largest. Below the dotted line, {ROUNDING:.2g}, it is no more than float32 rounds.",
            ),
            "<section><h2>All figures</h2>",
            *(_table(title, columns, probe.sources) for title, columns in TABLES),
            *(f"<p>{html.escape(words)}</p>" for words in probe.notes()),
            f'<p class="over">{html.escape(SAID)}</p></section>',
        ]
    )
    plots = {name: figure.to_plotly_json() for name, figure in figures.items()}
    return document("Where engine and trainer differ", body, plots, DRAW, source="one probe's figures")


def _table(title: str, columns: Sequence[Column], sources: Sequence[Source]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in columns)
    rows = "".join(
        f"<tr><td>{html.escape(label(source))}</td>"
        + "".join(f"<td>{html.escape(say(source))}</td>" for _, say in columns)
        + "</tr>"
        for source in sources
        if source.figures
    )
    return (
        f'<h3>{html.escape(title)}</h3><div class="wide"><table class="numbers"><tr><th></th>{head}</tr>{rows}'
        "</table></div>"
    )


def _sizes(probe: Probe) -> go.Figure:
    """Bars over powers of ten; what is exactly 0 has none."""
    shown = [(one, one.figures) for one in reversed(probe.sources) if one.figures and one.name != CONTROL]
    figure = go.Figure(
        go.Bar(
            x=[figures.kl or None for _, figures in shown],
            y=[label(one) for one, _ in shown],
            orientation="h",
            marker={"color": [BLUE if one.given else GREY for one, _ in shown]},
            hovertemplate="%{x:.2g}<extra></extra>",
        )
    )
    house_style(figure, 80 + 28 * len(shown), showlegend=False, hovermode="closest")
    figure.update_xaxes(type="log", exponentformat="power", title={"text": "KL per token"})
    return figure


def _stages(probe: Probe) -> go.Figure:
    figure = go.Figure()
    drawn = [one for one in probe.sources if any(stage.relative for stage in one.stages)]
    for one, color in zip(drawn, COLORS * (1 + len(drawn) // len(COLORS)), strict=False):
        figure.add_trace(
            go.Scatter(
                x=[stage.name for stage in one.stages],
                y=[stage.relative or None for stage in one.stages],
                name=label(one),
                mode="lines+markers",
                line={"color": color, "width": 2 if one.given else 1.2},
                marker={"size": 4},
                hovertemplate="%{y:.2g}",
            )
        )
    figure.add_hline(y=ROUNDING, line={"color": GREY, "width": 1, "dash": "dot"})
    house_style(figure, 460, margin={"l": 64, "r": 24, "t": 90, "b": 90})
    figure.update_yaxes(type="log", exponentformat="power", title={"text": "relative difference"})
    return figure
