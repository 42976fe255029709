"""The page of a plan: memory of every GPU and phase, the workload on its roofline, the schedules, one timeline."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from headway.plan.memory import Pool
from headway.plan.proposal import Candidate, Plan
from headway.reports import plan_table
from headway.reports.document import document
from headway.reports.document import figure as placed
from headway.reports.page_style import DRAW
from headway.reports.plots import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, house_style, rounded
from headway.reports.summary import Timeline

COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, INK, "#b58900", "#2aa198", GREY, "#6c71c4", "#859900", "#d33682")


def write(path: Path, plan: Plan, timeline: Timeline | None) -> None:
    """timeline: of the recommended schedule's simulation, None where none was simulated."""
    path.write_text(page(plan, timeline), encoding="utf-8", errors="replace")


def page(plan: Plan, timeline: Timeline | None) -> str:
    """The whole document."""
    figures = {
        "memory": memory(plan.shown.layout.placed.pools, plan.request.hardware.budget),
        "roofline": _roofline(plan),
    }
    if plan.simulated:
        figures["schedules"] = _schedules(plan)
    if timeline:
        figures["timeline"] = _timeline(timeline)
    shown = plan.shown.layout
    captions = {
        "memory": (
            "What each GPU holds",
            f"{shown.name}; expected, by phase; the line is what may be used of a {plan.request.hardware.gpu.title}. A "
            "GPU needs what its fullest phase needs.",
        ),
        "roofline": (
            "Decoding against the roofline",
            "Tokens a second of one engine over rollouts in flight: what memory and arithmetic would allow at the "
            "vendor's figures, and what is expected at the stated efficiencies; the point is this workload.",
        ),
        "schedules": (
            "What each schedule gives, and costs in lag",
            "Each point is a simulated schedule; the number is its run_ahead. The recommended one is ringed.",
        ),
        "timeline": (
            "The recommended schedule, as the scheduler would play it",
            "Rollouts in flight, and when the trainer trains, over the simulated steps that the figures count.",
        ),
    }
    body = "\n".join(
        [
            '<header><p class="what">A Headway plan</p><h1>Will it fit, and how fast will it be</h1>'
            f'<p class="lead">{html.escape(plan_table.headline(plan))}</p>',
            *(f"<p>{html.escape(reason)}</p>" for reason in plan_table.verdict(plan)),
            f'<p class="over">{html.escape(plan_table.assumed(plan))}</p></header>',
            "<noscript><p class='note'>The pictures need JavaScript; the tables below do not.</p></noscript>",
            *(placed(name, figure, *captions[name]) for name, figure in figures.items()),
            "<section><h2>All figures</h2>",
            *(memory_table(pool, plan.request.hardware.budget) for pool in shown.placed.pools),
            table("Times", ("", "", "why"), plan_table.times(plan)),
            _schedule_table(plan),
            _batch_table(plan),
            f'<p class="over">{html.escape(plan_table.SAID)}</p></section>',
        ]
    )
    plots = {name: figure.to_plotly_json() for name, figure in figures.items()}
    return document("A plan", body, plots, DRAW, source="facts of hardware and models, and simulations")


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<h3>{html.escape(title)}</h3><div class="wide"><table class="numbers"><tr>{cells}</tr>{lines}</table></div>'
    )


def memory_table(pool: Pool, budget: float) -> str:
    phase = pool.peak
    rows = [
        (line.name, plan_table.gigabytes(line.floor), plan_table.gigabytes(line.expected), line.why)
        for line in phase.lines
    ]
    total = ("total", plan_table.gigabytes(phase.floor), plan_table.gigabytes(phase.expected), "")
    title = f"Memory of {plan_table.of_pool(pool)} in phase {phase.name}, GB of {plan_table.gigabytes(budget)}"
    return table(title, ("", "at least", "expected", "why"), [*rows, total])


def _schedule_table(plan: Plan) -> str:
    if not plan.simulated:
        return ""
    price = plan.request.price is not None
    head = (*plan_table.COLUMNS, *(["price"] if price else []))
    return table("Schedules", head, [plan_table.row(candidate, price=price) for candidate in plan.simulated])


def _batch_table(plan: Plan) -> str:
    if not plan.batches:
        return ""
    head = (*plan_table.BATCH_COLUMNS, *(["price"] if plan.request.price is not None else []))
    return table("The recommended layout with other batches", head, plan_table.batch_rows(plan))


def memory(pools: Sequence[Pool], budget: float, measured: float | None = None) -> go.Figure:
    """One bar for each pool and phase, its lines stacked; the budget as a line, and what was measured as another."""
    figure = go.Figure()
    several = len(pools) > 1
    phases = [
        (f"{pool.name}: {phase.name}" if several else phase.name, phase) for pool in pools for phase in pool.phases
    ]
    phases.reverse()
    names = list(dict.fromkeys(line.name for _, phase in phases for line in phase.lines))
    for name, color in zip(names, COLORS * (1 + len(names) // len(COLORS)), strict=False):
        figure.add_trace(
            go.Bar(
                name=name,
                orientation="h",
                y=[title for title, _ in phases],
                x=[sum(line.expected for line in phase.lines if line.name == name) / 1e9 for _, phase in phases],
                marker={"color": color},
                hovertemplate="%{x:.2f} GB",
            )
        )
    figure.add_vline(x=budget / 1e9, line={"color": RED, "width": 1.5, "dash": "dash"})
    if measured is not None:
        figure.add_vline(x=measured / 1e9, line={"color": INK, "width": 2}, annotation_text="measured")
    house_style(figure, 190 + 44 * len(phases), barmode="stack", hovermode="closest")
    figure.update_layout(margin={"t": 110})
    figure.update_xaxes(title={"text": "GB"}, rangemode="tozero")
    return figure


def _roofline(plan: Plan) -> go.Figure:
    curves = plan.curves
    figure = go.Figure()
    styles = {
        "memory": {"color": BLUE, "dash": "dot"},
        "arithmetic": {"color": ORANGE, "dash": "dot"},
        "expected": {"color": INK, "width": 2},
    }
    for name, style in styles.items():
        figure.add_trace(
            go.Scatter(
                name=name,
                x=[rounded(batch) for batch in curves.batches],
                y=[rounded(value) for value in getattr(curves, name)],
                mode="lines",
                line=style,
                hovertemplate="%{y:,.0f}",
            )
        )
    figure.add_trace(
        go.Scatter(
            name="this workload",
            x=[curves.batch],
            y=[curves.tokens_per_s],
            mode="markers",
            marker={"color": RED, "size": 11},
            hovertemplate="%{y:,.0f}",
        )
    )
    house_style(figure, 380)
    figure.update_xaxes(type="log", title={"text": "rollouts in flight in one engine"})
    figure.update_yaxes(type="log", title={"text": "tokens/s"})
    return figure


def _schedules(plan: Plan) -> go.Figure:
    figure = go.Figure()
    by_layout: dict[str, list[Candidate]] = {}
    for candidate in plan.simulated:
        by_layout.setdefault(candidate.layout.name, []).append(candidate)
    for (name, candidates), color in zip(by_layout.items(), COLORS, strict=False):
        shown = [(candidate, candidate.figures) for candidate in candidates if candidate.figures]
        figure.add_trace(
            go.Scatter(
                name=name,
                x=[rounded(figures.mean_lag) for _, figures in shown],
                y=[rounded(figures.tokens_per_s) for _, figures in shown],
                text=[f"{candidate.run_ahead:g}" for candidate, _ in shown],
                mode="lines+markers+text",
                textposition="top center",
                line={"color": color, "width": 1.2},
                marker={"size": 7},
                hovertemplate="%{y:,.0f} tokens/s at lag %{x:.2f}",
            )
        )
    chosen = plan.chosen.figures if plan.chosen else None
    if chosen:
        ring = {"color": "rgba(0,0,0,0)", "size": 20, "line": {"color": RED, "width": 2}}
        figure.add_trace(
            go.Scatter(
                name="recommended",
                x=[chosen.mean_lag],
                y=[chosen.tokens_per_s],
                mode="markers",
                marker=ring,
                hoverinfo="skip",
            )
        )
    house_style(figure, 420, hovermode="closest")
    figure.update_xaxes(title={"text": "mean lag"}, rangemode="tozero")
    figure.update_yaxes(title={"text": "trained tokens/s"}, rangemode="tozero")
    return figure


def _timeline(timeline: Timeline) -> go.Figure:
    """Rollouts in flight as a stepped area, and train steps as bars below it."""
    changes = sorted(
        change for lane in timeline.lanes for span in lane for change in ((span.began_s, 1), (span.ended_s, -1))
    )
    times, counts, running = [0.0], [0], 0
    for at_s, change in changes:
        running += change
        if times[-1] == at_s:
            counts[-1] = running
        else:
            times.append(at_s)
            counts.append(running)
    stride = max(1, len(times) // 2000)
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            name="rollouts in flight",
            x=[rounded(at_s) for at_s in times[::stride]],
            y=counts[::stride],
            mode="lines",
            line={"color": BLUE, "width": 1, "shape": "hv"},
            fill="tozeroy",
            fillcolor="rgba(47,109,179,0.15)",
        )
    )
    lowest = -0.08 * max(counts)
    figure.add_trace(
        go.Bar(
            name="trainer",
            orientation="h",
            base=[rounded(span.began_s) for span in timeline.trainer],
            x=[rounded(span.ended_s - span.began_s) for span in timeline.trainer],
            y=[lowest] * len(timeline.trainer),
            width=[-lowest * 0.9] * len(timeline.trainer),
            marker={"color": ORANGE, "line": {"color": "white", "width": 0.5}},
            hovertemplate="train step from %{base:.1f} s",
        )
    )
    house_style(figure, 320, hovermode="closest")
    figure.update_xaxes(title={"text": "seconds"})
    figure.update_yaxes(title={"text": "rollouts in flight"})
    return figure
