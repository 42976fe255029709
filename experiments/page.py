"""The page of an experiment: text, tables and curves in one file that asks nothing of the network."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
from plotly.subplots import make_subplots

from experiments.side_by_side import Outcome
from headway.reports.page_style import CSS

COLOURS = ("#2f6db3", "#d97b29", "#2f8f5b", "#8e5bb5", "#b03a2e", "#53606c", "#c2a21c", "#1f9aa8")


@dataclass(frozen=True)
class Section:
    """A heading, what is to be seen, and a figure or a table (rows of cells, the first one the head)."""

    title: str
    text: str
    figure: go.Figure | None = None
    table: Sequence[Sequence[str]] = ()


def write(path: Path, title: str, lead: str, sections: Sequence[Section]) -> None:
    """Write the page, and say where it is."""
    parts = [f"<h1>{html.escape(title)}</h1>", f'<p class="lead">{html.escape(lead)}</p>']
    scripts: bool | str = True
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{html.escape(line)}</p>" for line in section.text.split("\n") if line]
        if section.table:
            parts.append(_table(section.table))
        if section.figure is not None:
            parts.append(plotly.io.to_html(section.figure, full_html=False, include_plotlyjs=scripts, config=_PLAIN))
            scripts = False
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{CSS}{_TABLES}</style>'
    body = "\n".join(parts)
    path.write_text(f"<!doctype html><html lang=en><head>{head}</head><body><main>{body}</main></body></html>")
    print(f"page: {path}")


_PLAIN = {"displayModeBar": False, "responsive": True}

_TABLES = """
table{width:100%}th{text-align:left;font-weight:600;padding:4px 14px 4px 0;border-bottom:1px solid var(--line)}
td,th{overflow-wrap:normal}
td{border-bottom:1px solid var(--soft);font-variant-numeric:tabular-nums}td:first-child{color:var(--ink)}
"""


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ([html.escape(cell) for cell in row] for row in rows)
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{cells}</tr>{lines}</table>"


def curves(
    outcomes: Sequence[Outcome],
    metric: str,
    title: str,
    *,
    log: bool = False,
    smooth: int = 1,
    floor: float = -math.inf,
) -> go.Figure:
    """One line per run: a metric against train steps. floor: values below it are not drawn."""
    figure = go.Figure()
    for place, outcome in enumerate(outcomes):
        versions, values = outcome.column(metric)
        drawn = [value if value >= floor else None for value in smoothed(values, smooth)]
        figure.add_trace(_line(versions, drawn, outcome.arm.name, place))
    figure.update_yaxes(title={"text": title}, type="log" if log else "linear", exponentformat="power")
    return _styled(figure, 380)


def over_time(outcomes: Sequence[Outcome], metric: str, title: str) -> go.Figure:
    """One line per run: a metric against minutes since the run began."""
    figure = go.Figure()
    for place, outcome in enumerate(outcomes):
        points = [(row["at_s"] / 60, row[metric]) for row in outcome.rows if row.get(metric) is not None]
        figure.add_trace(_line([x for x, _ in points], [y for _, y in points], outcome.arm.name, place))
    figure.update_yaxes(title={"text": title})
    figure.update_xaxes(title={"text": "minutes"})
    return _styled(figure, 380)


def small_multiples(outcomes: Sequence[Outcome], metric: str, columns: int = 4, smooth: int = 1) -> go.Figure:
    """One panel per run, all with the same axes; the others are there in grey."""
    num_rows = -(-len(outcomes) // columns)
    figure = make_subplots(
        rows=num_rows,
        cols=columns,
        subplot_titles=[outcome.arm.name for outcome in outcomes],
        shared_xaxes=True,
        shared_yaxes=True,
        vertical_spacing=0.28 / num_rows,
        horizontal_spacing=0.02,
    )
    for place, outcome in enumerate(outcomes):
        row, column = divmod(place, columns)
        for other in outcomes:
            versions, values = other.column(metric)
            grey = go.Scatter(x=versions, y=smoothed(values, smooth), line={"color": "#e3e7eb", "width": 1})
            figure.add_trace(grey.update(hoverinfo="skip"), row + 1, column + 1)
        versions, values = outcome.column(metric)
        figure.add_trace(_line(versions, smoothed(values, smooth), outcome.arm.name, 0), row + 1, column + 1)
    return _styled(figure.update_layout(showlegend=False), 170 * num_rows + 60)


def smoothed(values: Sequence[float], num: int) -> list[float]:
    """The mean of each value and the ones before it, `num` in all."""
    windows = [values[max(0, place + 1 - num) : place + 1] for place in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _line(x: Sequence[float], y: Sequence[float | None], name: str, place: int) -> go.Scatter:
    dash = ("solid", "dot", "dash")[place // len(COLOURS) % 3]
    return go.Scatter(x=x, y=y, name=name, line={"color": COLOURS[place % len(COLOURS)], "width": 2, "dash": dash})


def _styled(figure: go.Figure, height: int) -> go.Figure:
    figure.update_layout(
        height=height, margin={"l": 60, "r": 16, "t": 34, "b": 44}, plot_bgcolor="white", font={"size": 12}
    )
    figure.update_annotations(font={"size": 12})
    figure.update_xaxes(showgrid=True, gridcolor="#eef1f4", zeroline=False)
    return figure.update_yaxes(showgrid=True, gridcolor="#eef1f4", zeroline=False)


def figure_or_dash(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)
