"""The curves of a run's page on learning and hardware, one function per figure: record -> figure, or None where nothing
of it was recorded. `trust_figures` has those of the mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headway.reports.alarms import zero_variance_share
from headway.reports.interval import wilson
from headway.reports.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    Column,
    add,
    band,
    column,
    has,
    headroom,
    house_style,
    line,
    panels,
    rounded,
    suffixes,
    x_steps,
)
from headway.reports.record import MAX_POINTS, Row, RunRecord, thinned
from headway.reports.summary import Span

# ---- is it learning?


def reward(run: RunRecord) -> go.Figure | None:
    """Mean reward of the sampled rollouts with a band of one std, and greedy accuracy where it was evaluated."""
    steps = run.drawn_steps
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
    x_steps(figure, run)
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
        None if middle is None or half is None else rounded(min(max(middle + sign * half, lowest), highest))
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
    steps = run.drawn_steps
    if not has(steps, "response_tokens_mean", "response_tokens_max", "truncated_share"):
        return None
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.65, 0.35], vertical_spacing=0.08)
    figure.add_trace(line(steps, "response_tokens_mean", "mean", BLUE), 1, 1)
    figure.add_trace(line(steps, "response_tokens_max", "longest", GREY, dash="dot"), 1, 1)
    figure.add_trace(line(steps, "truncated_share", "cut off at the token budget", RED), 2, 1)
    house_style(figure, 380)
    x_steps(figure, run, row=2)
    figure.update_yaxes(title={"text": "tokens"}, rangemode="tozero", row=1)
    figure.update_yaxes(
        title={"text": "share"}, tickformat=".3~%", row=2, range=[0, headroom(steps, ["truncated_share"], 0.05)]
    )
    return figure


def optimizer(run: RunRecord) -> go.Figure | None:
    """Loss, gradient norm and learning rate, small, side by side."""
    steps = run.drawn_steps
    shown = [
        (name, label, color)
        for name, label, color in (
            ("loss", "loss", BLUE),
            ("grad_norm", "gradient norm", ORANGE),
            ("learning_rate", "learning rate", GREEN),
        )
        if has(steps, name)
    ]
    if not shown:
        return None
    figure = make_subplots(rows=1, cols=len(shown), horizontal_spacing=0.1)
    for number, (name, label, color) in enumerate(shown, 1):
        figure.add_trace(line(steps, name, label, color), 1, number)
        figure.update_yaxes(exponentformat="power", row=1, col=number)
        if name == "learning_rate":  # a constant one would be drawn between -1 and 1
            figure.update_yaxes(range=[0, headroom(steps, [name], 1e-12)], row=1, col=number)
    house_style(figure, 250)
    x_steps(figure, run)
    return figure


def signal(run: RunRecord) -> go.Figure | None:
    """What of a batch can't teach: groups whose rewards are all equal, and rollouts that are no data, by reason."""
    steps, reasons = _signal_rows(run)
    if not has(steps, "zero_variance_share", *reasons):
        return None
    figure = go.Figure()
    if has(steps, "zero_variance_share"):
        figure.add_trace(line(steps, "zero_variance_share", "groups with equal rewards", BLUE))
    for number, reason in enumerate(reasons):
        label = f"rollouts that are no data: {reason.replace('_', ' ')}"
        figure.add_trace(line(steps, reason, label, (ORANGE, RED, PURPLE, GREEN)[number % 4], dash="dot"))
    house_style(figure, 250)
    x_steps(figure, run)
    figure.update_yaxes(title={"text": "share"}, tickformat=".0%", range=[0, 1.03])
    return figure


def _signal_rows(run: RunRecord) -> tuple[list[Row], list[str]]:
    """Rows of shares, and the reasons among their columns. A reason that a step doesn't name left out no rollout."""
    reasons = suffixes(run.steps, "dropped_rollouts/")
    shares = [
        {"version": row["version"], "zero_variance_share": zero_variance_share(row, run.group_size)}
        | {
            reason: (row.get(f"dropped_rollouts/{reason}") or 0) / row["num_rollouts"]
            for reason in reasons
            if row.get("num_rollouts")
        }
        for row in run.steps
    ]
    return thinned(shares, MAX_POINTS), reasons


def critic(run: RunRecord) -> go.Figure | None:
    """The critic's loss, the share of the returns' variance that its values explain, and its gradient norm."""
    steps = run.drawn_steps
    shown = [
        (name, title, color)
        for name, title, color in (
            ("value_explained_variance", "variance explained", BLUE),
            ("value_loss", "value loss", GREEN),
            ("critic_grad_norm", "gradient norm", ORANGE),
        )
        if has(steps, name)
    ]
    if not shown:
        return None
    figure = panels([title for _, title, _ in shown], 240)
    figure.update_layout(margin={"t": 44}, showlegend=False)
    figure.update_annotations(yshift=4)
    for number, (name, title, color) in enumerate(shown, 1):
        add(figure, line(steps, name, title, color), number)
        figure.update_yaxes(exponentformat="power", row=1, col=number)
        if name == "value_explained_variance":
            figure.update_yaxes(zeroline=True, zerolinecolor=GREY, row=1, col=number)
            figure.update_yaxes(tickformat=".2~%", row=1, col=number)
    x_steps(figure, run)
    return figure


def reference(run: RunRecord) -> go.Figure | None:
    """How far the policy has gone from the frozen reference, by both estimators."""
    steps = run.drawn_steps
    if not has(steps, "reference_kl_k1", "reference_kl_k3"):
        return None
    figure = go.Figure()
    figure.add_trace(line(steps, "reference_kl_k1", "k1: mean of log pi - log reference", GREY, dash="dot"))
    figure.add_trace(line(steps, "reference_kl_k3", "k3: never negative", PURPLE))
    house_style(figure, 250)
    x_steps(figure, run)
    figure.update_yaxes(title={"text": "nats"}, exponentformat="power")
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
    x_steps(figure, run)
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
    steps = run.drawn_steps
    if not has(steps, "generated_tokens_per_s", "trained_tokens_per_s"):
        return None
    figure = go.Figure()
    figure.add_trace(line(steps, "generated_tokens_per_s", "sampled", BLUE))
    if has(steps, "trained_tokens_per_s"):
        figure.add_trace(line(steps, "trained_tokens_per_s", "trained", ORANGE))
    house_style(figure, 280)
    x_steps(figure, run)
    figure.update_yaxes(title={"text": f"tokens / {run.unit.rstrip('s') or 's'}"}, rangemode="tozero")
    return figure


def cache(run: RunRecord) -> go.Figure | None:
    """Share of the engine's cache that rollouts stood on at most, and how often they gave way, step by step."""
    steps = run.drawn_steps
    if not has(steps, "cache_used"):
        return None
    figure = go.Figure()
    figure.add_trace(line(steps, "cache_used", "blocks in use", BLUE))
    figure.add_trace(line(steps, "preempted_share", "gave way, per trained rollout", ORANGE))
    house_style(figure, 280)
    x_steps(figure, run)
    figure.update_yaxes(title={"text": "share"}, rangemode="tozero", tickformat=".0%")
    return figure
