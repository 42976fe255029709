"""The page of a plan in one process: memory, decoding as measured and reckoned with, schedules, what was measured."""

from __future__ import annotations

import html
from pathlib import Path

import plotly.graph_objects as go

from headway.plan.here import HerePlan, Pace
from headway.reports import here_table, plan_table
from headway.reports.document import document
from headway.reports.document import figure as placed
from headway.reports.page_style import DRAW
from headway.reports.plan_page import memory, memory_table, table
from headway.reports.plots import BLUE, GREEN, INK, ORANGE, RED, house_style, rounded


def write(path: Path, plan: HerePlan) -> None:
    path.write_text(page(plan), encoding="utf-8", errors="replace")


def page(plan: HerePlan) -> str:
    """The whole document."""
    measured = plan.beside.peak_bytes if plan.beside else None
    figures = {"memory": memory([plan.pool], plan.budget, measured)}
    captions = {
        "memory": (
            "What the process holds",
            "Expected, by phase, beside what its libraries take; the dashed line is what may be used of the memory "
            f"that is free{', the solid one what the run held at most' if plan.beside else ''}.",
        ),
    }
    if plan.pace:
        figures["decoding"] = _decoding(plan, plan.pace)
        captions["decoding"] = (
            "A pass of the engine",
            "Points: passes of like size in the runs that it is calibrated on, without a prompt in them; what training "
            "beside them slowed down is taken off. Line: what is reckoned with, at the mean length of those runs.",
        )
        figures["schedules"] = _schedules(plan)
        captions["schedules"] = (
            "A train step, by run_ahead",
            "Simulated by the real scheduler at the measured pace; engine and trainer share this machine"
            f"{'; the line is what the run took' if plan.beside else ''}.",
        )
    beside = [table("What the run took", ("", "predicted", "measured", "ratio"), here_table.compared(plan))] * bool(
        plan.beside
    )
    body = "\n".join(
        [
            '<header><p class="what">A Headway plan</p><h1>Will it fit, and how fast will it be</h1>'
            f'<p class="lead">{html.escape(here_table.headline(plan))}</p>',
            *(f"<p>{html.escape(line)}</p>" for line in here_table.verdict(plan)),
            f'<p class="over">{html.escape(plan_table.where_from(plan.assumptions, plan.job.answers))}</p></header>',
            "<noscript><p class='note'>The pictures need JavaScript; the tables below do not.</p></noscript>",
            *beside,
            *(placed(name, figure, *captions[name]) for name, figure in figures.items()),
            "<section><h2>All figures</h2>",
            memory_table(plan.pool, plan.budget),
            *_paced(plan),
            "</section>",
        ]
    )
    plots = {name: figure.to_plotly_json() for name, figure in figures.items()}
    return document("A plan", body, plots, DRAW, source="facts of models, measured work, and simulations")


def _paced(plan: HerePlan) -> list[str]:
    if plan.pace is None:
        return []
    return [
        table(f"Pace on {plan.pace.device}", ("", "", "why"), here_table.pace_rows(plan, plan.pace)),
        table("Schedules", here_table.COLUMNS, [here_table.row(schedule) for schedule in plan.schedules]),
        f'<p class="over">{html.escape(here_table.SAID)}. Calibrated on {html.escape(plan.pace.source)}.</p>',
    ]


def _decoding(plan: HerePlan, pace: Pace) -> go.Figure:
    """Milliseconds of a pass over rollouts in flight."""
    points = sorted(plan.decode)
    rows, cached = (sum(point[place] for point in points) for place in (0, 1))
    each = cached / rows if rows else 0.0
    most = max([plan.job.lanes, *(point[0] for point in points)])
    line = [most * place / 40 for place in range(41)]
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            name="measured",
            x=[rounded(point[0]) for point in points],
            y=[rounded(1e3 * point[2]) for point in points],
            mode="markers",
            marker={"color": BLUE, "size": 6},
            hovertemplate="%{x:.0f} rollouts: %{y:.1f} ms",
        )
    )
    figure.add_trace(
        go.Scatter(
            name="reckoned with",
            x=line,
            y=[rounded(1e3 * pace.decode_s(number, number * each)) for number in line],
            mode="lines",
            line={"color": INK, "width": 1.5},
            hoverinfo="skip",
        )
    )
    house_style(figure, 340, hovermode="closest")
    figure.update_xaxes(title={"text": "rollouts in the pass"}, rangemode="tozero")
    figure.update_yaxes(title={"text": "ms"}, rangemode="tozero")
    return figure


def _schedules(plan: HerePlan) -> go.Figure:
    figure = go.Figure()
    colors = [GREEN if schedule is plan.chosen else ORANGE for schedule in plan.schedules]
    figure.add_trace(
        go.Bar(
            x=[f"{schedule.run_ahead:g}{' (the recipe)' if schedule.own else ''}" for schedule in plan.schedules],
            y=[rounded(schedule.step_s) for schedule in plan.schedules],
            marker={"color": colors},
            text=[f"lag {schedule.token_lag:.2f}" for schedule in plan.schedules],
            hovertemplate="%{y:.3g} s",
        )
    )
    if plan.beside:
        figure.add_hline(y=plan.beside.step_s, line={"color": RED, "width": 1.5}, annotation_text="measured")
    house_style(figure, 320, showlegend=False)
    figure.update_xaxes(title={"text": "run_ahead"}, type="category")
    figure.update_yaxes(title={"text": "seconds of a train step"}, rangemode="tozero")
    return figure
