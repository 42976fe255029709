"""The curves of a run's page, one function per figure: record -> figure, or None where nothing of it was recorded.

Every figure has the train step on its x axis, as the version that the step made. Plain lists go in: no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headway.reports.interval import wilson
from headway.reports.record import Row, RunRecord, thinned
from headway.reports.summary import Span

INK, MUTED, GRID = "#1f2933", "#66727f", "#e6eaee"
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f6db3", "#d97b29", "#2f8f5b", "#c0392b", "#7d5ba6", "#8a96a3"
BAND = "rgba(47,109,179,{alpha})"

ALL_ZERO = 1e-8
"""Where a log axis draws exact zeros if it has nothing else."""

MAX_POINTS = 1000
"""Steps drawn one by one; a longer run has neighbours joined."""

Column = list[float | None]


def rows(run: RunRecord) -> list[Row]:
    return thinned(run.steps, MAX_POINTS)


def column(rows: Sequence[Row], name: str) -> Column:
    return [_rounded(row.get(name)) for row in rows]


def _rounded(value: float | None) -> float | None:
    """Six figures are more than a picture shows, and half the bytes."""
    return value if value is None else float(f"{value:.6g}")


def has(rows: Sequence[Row], *names: str) -> bool:
    return any(row.get(name) is not None for row in rows for name in names)


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
        hoverlabel={"bgcolor": "white", "bordercolor": GRID},
        legend={"orientation": "h", "x": 0, "y": 1.0, "xanchor": "left", "yanchor": "bottom", "font": {"size": 12}},
    )
    title = {"font": {"size": 12, "color": MUTED}}
    figure.update_xaxes(gridcolor=GRID, zeroline=False, linecolor=GREY, ticks="outside", tickcolor=GREY, title=title)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True, title=title)
    figure.update_layout(**layout)
    return figure


def line(rows: Sequence[Row], name: str, label: str, color: str, **options: Any) -> go.Scatter:
    return line_through(column(rows, "version"), column(rows, name), label, color, **options)


def line_through(x: Column, y: Column, label: str, color: str, *, dash: str = "solid", **options: Any) -> go.Scatter:
    """A curve; where it has few points each is marked, so that one step is seen too."""
    return go.Scatter(
        x=x,
        y=y,
        name=label,
        mode="lines+markers" if len(x) <= 30 else "lines",
        line={"color": color, "width": 2, "dash": dash},
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


def _x_steps(figure: go.Figure, run: RunRecord, **where: Any) -> None:
    """The x axis: from version 0, before the first step, to the newest; with room for a mark at either end."""
    last = max([1, *(row["version"] for row in run.steps), *(event["version"] for event in run.evaluations)])
    figure.update_xaxes(range=[-0.015 * last, 1.015 * last], dtick=1 if last <= 12 else None)
    figure.update_xaxes(title={"text": "train step", "standoff": 8}, **where)


# ---- is it learning?


def reward(run: RunRecord) -> go.Figure | None:
    """Mean reward of the sampled rollouts with a band of one std, and greedy accuracy where it was evaluated."""
    steps = rows(run)
    sampled = has(steps, "reward_mean")
    if not sampled and not run.evaluations:
        return None
    figure = go.Figure()
    if sampled:
        mean, std = column(steps, "reward_mean"), column(steps, "reward_std")
        if has(steps, "reward_std"):
            ends = _plus(mean, std, -1, run), _plus(mean, std, 1, run)
            figure.add_trace(band(steps, *ends, "± one std of the rollouts", 0.12))
        figure.add_trace(line(steps, "reward_mean", "sampled reward, mean", BLUE))
    shared = all(0 <= value <= 1 for value in column(steps, "reward_mean") if value is not None)
    if run.evaluations:
        figure.add_trace(_greedy(run, "y" if shared else "y2"))
    house_style(figure, 360)
    _x_steps(figure, run)
    figure.update_yaxes(title={"text": "reward and accuracy" if shared else "reward"})
    if not shared:
        accuracy = {"text": "greedy accuracy"}
        figure.update_layout(
            yaxis2={"overlaying": "y", "side": "right", "tickformat": ".0%", "title": accuracy, "showgrid": False}
        )
    return figure


def _plus(mean: Column, std: Column, sign: int, run: RunRecord) -> Column:
    """mean ± std, but no further than any reward that was given."""
    lowest, highest = run.observed_rewards or (-math.inf, math.inf)
    return [
        None if middle is None or half is None else _rounded(min(max(middle + sign * half, lowest), highest))
        for middle, half in zip(mean, std, strict=True)
    ]


def _greedy(run: RunRecord, axis: str) -> go.Scatter:
    evaluated = [event for event in run.evaluations if event["num"]]
    shares = [event["num_correct"] / event["num"] for event in evaluated]
    ends = [wilson(event["num_correct"], event["num"]) for event in evaluated]
    return go.Scatter(
        x=[event["version"] for event in evaluated],
        y=shares,
        yaxis=axis,
        name="greedy accuracy, held out (95 % interval)",
        mode="markers",
        marker={"color": ORANGE, "size": 10, "symbol": "diamond", "line": {"color": "white", "width": 1}},
        error_y={
            "array": [high - share for share, (_, high) in zip(shares, ends, strict=True)],
            "arrayminus": [share - low for share, (low, _) in zip(shares, ends, strict=True)],
            "color": ORANGE,
            "thickness": 1.2,
            "width": 4,
        },
        hovertext=[f"{event['num_correct']} of {event['num']} correct" for event in evaluated],
        hovertemplate="%{y:.1%} (%{hovertext})<extra>greedy accuracy</extra>",
    )


def response_length(run: RunRecord) -> go.Figure | None:
    """Tokens per rollout, mean and longest; below, the share that the token budget cut off."""
    steps = rows(run)
    if not has(steps, "response_tokens_mean", "response_tokens_max", "truncated_share"):
        return None
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.65, 0.35], vertical_spacing=0.08)
    figure.add_trace(line(steps, "response_tokens_mean", "mean", BLUE), 1, 1)
    figure.add_trace(line(steps, "response_tokens_max", "longest", GREY, dash="dot"), 1, 1)
    figure.add_trace(line(steps, "truncated_share", "cut off at the token budget", RED), 2, 1)
    house_style(figure, 380)
    _x_steps(figure, run, row=2)
    figure.update_yaxes(title={"text": "tokens"}, rangemode="tozero", row=1)
    figure.update_yaxes(
        title={"text": "share"}, tickformat=".1%", row=2, range=[0, _headroom(steps, "truncated_share", 0.05)]
    )
    return figure


def _headroom(steps: Sequence[Row], name: str, least: float) -> float:
    """The upper end of an axis that begins at 0: a little above the highest value, and never below `least`."""
    return max([least, *(1.1 * value for value in column(steps, name) if value is not None)])


def optimizer(run: RunRecord) -> go.Figure | None:
    """Loss, gradient norm and learning rate, small, side by side."""
    steps = rows(run)
    panels = [
        (name, label, color)
        for name, label, color in (
            ("loss", "loss", BLUE),
            ("grad_norm", "gradient norm", ORANGE),
            ("learning_rate", "learning rate", GREEN),
        )
        if has(steps, name)
    ]
    if not panels:
        return None
    figure = make_subplots(rows=1, cols=len(panels), horizontal_spacing=0.1)
    for number, (name, label, color) in enumerate(panels, 1):
        figure.add_trace(line(steps, name, label, color), 1, number)
        figure.update_yaxes(exponentformat="power", row=1, col=number)
        if name == "learning_rate":  # a constant one would be drawn between -1 and 1
            figure.update_yaxes(range=[0, _headroom(steps, name, 1e-12)], row=1, col=number)
    house_style(figure, 250)
    _x_steps(figure, run)
    return figure


# ---- can the update be trusted?


def lag(run: RunRecord) -> go.Figure | None:
    """How old the trained tokens were, in versions, against the run_ahead that was allowed."""
    steps = rows(run)
    if not steps:
        return None
    figure = go.Figure()
    figure.add_trace(line(steps, "lag_max", "oldest rollout", GREY, dash="dot"))
    figure.add_trace(line(steps, "lag_mean", "mean of the rollouts", BLUE))
    figure.add_trace(line(steps, "token_lag", "mean of the tokens", ORANGE))
    house_style(figure, 300)
    run_ahead = run.header.fields.get("run_ahead")
    if run_ahead is not None:
        figure.add_hline(
            y=run_ahead,
            line={"color": GREEN, "dash": "dash", "width": 1.5},
            annotation={"text": f"run_ahead {run_ahead:g}", "font": {"color": GREEN, "size": 12}},
            annotation_position="top right",
        )
    _x_steps(figure, run)
    figure.update_yaxes(title={"text": "lag (versions)"}, rangemode="tozero")
    return figure


def mismatch(run: RunRecord) -> go.Figure | None:
    """The trainer's log-probs against those recorded at sampling: k1, and k3 (overall and by lag) on a log axis."""
    steps = rows(run)
    k3 = [name for name in _k3_names(steps) if has(steps, name)]
    if not k3 and not has(steps, "mismatch_kl_k1"):
        return None
    titles = ("k1: mean of −log ratio", "k3: never negative, log axis")
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12, subplot_titles=titles)
    figure.update_annotations(font={"size": 12, "color": MUTED})
    figure.add_trace(line(steps, "mismatch_kl_k1", "k1", BLUE), 1, 1)
    for trace in _k3_traces(steps, k3):
        figure.add_trace(trace, 1, 2)
    house_style(figure, 340, margin={"l": 64, "r": 24, "t": 56, "b": 46})
    figure.update_layout(legend={"y": 1.09})
    _x_steps(figure, run)
    figure.update_yaxes(exponentformat="power", row=1, col=1)
    figure.update_yaxes(type="log", exponentformat="power", dtick=1, tickfont={"size": 10}, row=1, col=2)
    if not any(column(steps, "mismatch_kl_k1")):
        figure.update_yaxes(range=[-1e-6, 1e-6], row=1, col=1)
    if not any(value for name in k3 for value in column(steps, name)):
        figure.update_yaxes(range=[-9, -5], tickvals=[ALL_ZERO], ticktext=["0"], row=1, col=2)
    return figure


def _k3_names(steps: Sequence[Row]) -> list[str]:
    """`mismatch_kl_k3`, then those of each lag in order of lag."""
    prefix = "mismatch_kl_k3/lag_"
    lags = {name for row in steps for name in row if name.startswith(prefix)}
    return ["mismatch_kl_k3", *sorted(lags, key=lambda name: (len(name), name))]


def _k3_traces(steps: Sequence[Row], names: Sequence[str]) -> list[go.Scatter]:
    """A log axis has no zero: exact zeros (bitwise parity) are hollow marks a decade below all else, and say so."""
    colors = [PURPLE, GREEN, ORANGE, RED, GREY, BLUE]
    columns = {name: column(steps, name) for name in names}
    positive = [value for values in columns.values() for value in values if value is not None and value > 0]
    floor = min(positive) / 10 if positive else ALL_ZERO
    traces: list[go.Scatter] = []
    x = column(steps, "version")
    for number, (name, values) in enumerate(columns.items()):
        color = colors[number % len(colors)]
        label = name.removeprefix("mismatch_kl_").replace("/lag_", ", lag ")
        above = [value if value is not None and value > 0 else None for value in values]
        if any(above):
            traces.append(line_through(x, above, label, color, connectgaps=False))
        zeros = [version for version, value in zip(x, values, strict=True) if value is not None and value <= 0]
        if zeros:
            traces.append(_zero_marks(zeros, floor, label, color))
    return traces


def _zero_marks(x: Column, floor: float, label: str, color: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=[floor] * len(x),
        name=f"{label}: exactly 0",
        mode="markers",
        marker={"symbol": "circle-open", "size": 6, "color": color},
        hovertemplate="exactly 0",
    )


def ratios(run: RunRecord) -> go.Figure | None:
    """Trainer over behaviour probability of the trained tokens: nested quantile bands around 1."""
    steps = rows(run)
    names = [f"ratio_q{percent}" for percent in ("01", "05", "25", "50", "75", "95", "99")]
    if not has(steps, *names, "ratio_min", "ratio_max"):
        return None
    figure = go.Figure()
    for low, high, label, alpha in (("01", "99", "98 %", 0.13), ("05", "95", "90 %", 0.2), ("25", "75", "50 %", 0.32)):
        ends = column(steps, f"ratio_q{low}"), column(steps, f"ratio_q{high}")
        if has(steps, f"ratio_q{low}") and has(steps, f"ratio_q{high}"):
            figure.add_trace(band(steps, *ends, f"middle {label}", alpha))
    if has(steps, "ratio_q50"):
        figure.add_trace(line(steps, "ratio_q50", "median", BLUE))
    for name, label in (("ratio_min", "smallest"), ("ratio_max", "largest")):
        if has(steps, name):
            figure.add_trace(line(steps, name, f"{label} (click to show)", RED, dash="dot", visible="legendonly"))
    house_style(figure, 340)
    figure.add_hline(y=1, line={"color": INK, "width": 1, "dash": "dash"})
    _x_steps(figure, run)
    figure.update_yaxes(title={"text": "probability ratio"})
    return figure


def correction(run: RunRecord) -> go.Figure | None:
    """What the importance weights did to the batch: how many rollouts' worth is left, and how many were capped."""
    steps = rows(run)
    names = ("ess_share", "weight_capped_share")
    if not has(steps, *names):
        return None
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.1)
    for number, (name, label, color) in enumerate(
        zip(names, ("effective sample size, share", "tokens with a capped weight, share"), (GREEN, RED), strict=True), 1
    ):
        figure.add_trace(line(steps, name, label, color), 1, number)
        figure.update_yaxes(tickformat=".3~%", rangemode="tozero", row=1, col=number)
    house_style(figure, 250)
    _x_steps(figure, run)
    return figure


# ---- did the hardware wait?


def utilization(run: RunRecord) -> go.Figure | None:
    """Of the time between one step's end and the next: how much of it the lanes and the trainer were busy."""
    if not run.steps:
        return None
    steps = thinned(_busy_rows(run), MAX_POINTS)
    figure = go.Figure()
    figure.add_trace(line(steps, "lanes", "lanes generating", BLUE))
    if has(steps, "evaluating") and any(column(steps, "evaluating")):
        figure.add_trace(line(steps, "evaluating", "lanes answering an evaluation", GREY, dash="dot"))
    figure.add_trace(line(steps, "trainer", "trainer computing", ORANGE))
    house_style(figure, 300)
    _x_steps(figure, run)
    figure.update_yaxes(tickformat=".0%", range=[0, 1.05], title={"text": "busy share of the time"})
    return figure


def _busy_rows(run: RunRecord) -> list[Row]:
    """Per train step, busy shares of the time since the step before it ended (the run began)."""
    lines = run.timeline
    ends = [(span.version + 1, span.ended_s) for span in lines.trainer if span.finished]
    edges = [0.0, *(ended_s for _, ended_s in ends)]
    rollouts = [span for lane in lines.lanes for span in lane if not span.evaluation]
    answers = [span for lane in lines.lanes for span in lane if span.evaluation]
    widths = [after - before for before, after in pairwise(edges)]
    busy = zip(
        (version for version, _ in ends),
        _shares(rollouts, edges, [width * len(lines.lanes) for width in widths]),
        _shares(answers, edges, [width * len(lines.lanes) for width in widths]),
        _shares(lines.trainer, edges, widths),
        strict=True,
    )
    newest = {
        version: {"version": version, "lanes": lanes, "evaluating": evaluating, "trainer": trainer}
        for version, lanes, evaluating, trainer in busy
    }
    return [newest[row["version"]] for row in run.steps if row["version"] in newest]


def _shares(spans: Sequence[Span], edges: Sequence[float], available_s: Sequence[float]) -> Column:
    seconds = busy_between(spans, edges)
    return [busy / all_of_it if all_of_it else None for busy, all_of_it in zip(seconds, available_s, strict=True)]


def busy_between(spans: Sequence[Span], edges: Sequence[float]) -> list[float]:
    """Busy seconds of all spans together within each [edges[i], edges[i+1]). Edges ascend.

    >>> busy_between([Span("r0", 0.5, 2.5, 0)], [0.0, 1.0, 2.0, 3.0])
    [0.5, 1.0, 0.5]
    """
    busy = [0.0] * (len(edges) - 1)
    first = 0
    for span in sorted(spans, key=lambda span: span.began_s):
        while first < len(busy) and edges[first + 1] <= span.began_s:
            first += 1
        number = first
        while number < len(busy) and edges[number] < span.ended_s:
            busy[number] += min(span.ended_s, edges[number + 1]) - max(span.began_s, edges[number])
            number += 1
    return busy


def throughput(run: RunRecord) -> go.Figure | None:
    """Tokens per second that were sampled, and that were trained, between one step's end and the next."""
    steps = rows(run)
    if not has(steps, "generated_tokens_per_s", "trained_tokens_per_s"):
        return None
    figure = go.Figure()
    figure.add_trace(line(steps, "generated_tokens_per_s", "sampled", BLUE))
    if has(steps, "trained_tokens_per_s"):
        figure.add_trace(line(steps, "trained_tokens_per_s", "trained", ORANGE))
    house_style(figure, 280)
    _x_steps(figure, run)
    figure.update_yaxes(title={"text": f"tokens / {run.unit.rstrip('s') or 's'}"}, rangemode="tozero")
    return figure
