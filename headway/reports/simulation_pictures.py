"""The figures of a simulation's page: one run of a sweep, among the others."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import plotly.graph_objects as go

from headway.config import last_word
from headway.reports import gantt, lengths
from headway.reports.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, binned, house_style, line_through, rounded
from headway.reports.summary import Timeline, kept_steps
from headway.reports.sweep_table import SweptRun
from headway.trace import Event

MAX_LANES = 16
MAX_BARS = 40_000
"""Of the timelines of all runs together: about 4 MB."""

MAX_BARS_OF_ONE = 1500
MAX_STEPS = 40
"""Of the curve of trained lengths: the early steps, which are the ones that differ."""

NUM_BINS = 40
MAX_OTHERS = 12
"""More curves of other runs would hide the chosen one."""

STEPS_IN_VIEW = 3
"""Of the slowest run; the others are shown over the same time."""


@dataclass(frozen=True)
class Seen:
    """What is drawn of one run.

    lags: how many trained rollouts had each lag; trained, started: lengths of the rollouts that were trained, and of
    all that were started, as they would be if nobody ended them early; steps: mean trained length of each train step,
    and of all up to it; ends_s: when train steps ended.
    """

    drawing: gantt.Drawing
    unit: str
    lags: dict[int, int]
    trained: array[float]
    started: array[float]
    steps: list[tuple[float | None, float | None]]
    ends_s: list[float]


def see(
    lines: Timeline,
    events: Sequence[Event],
    started: Sequence[float],
    skip_steps: int,
    num_runs: int,
    *,
    replayed: bool,
) -> Seen:
    """What a page draws of a run, from its trace and its timeline.

    started: as `Seen.started`; skip_steps: first train steps that the histograms leave out, as the figures do;
    num_runs: on the page; replayed: times are in seconds.
    """
    steps = kept_steps(events)
    max_bars = min(MAX_BARS_OF_ONE, MAX_BARS // num_runs)
    trained = lengths.trained(lines.lives, after_step=skip_steps)
    rows = lengths.cohorts(lines.lives)[:MAX_STEPS]
    return Seen(
        drawing=gantt.drawing(lines, max_bars, MAX_LANES),
        unit="s" if replayed else "units",
        lags=dict(Counter(lag for step in steps[skip_steps:] for lag in step.taken["lags"])),
        trained=array("d", (life.tokens for life in trained)),
        started=array("d", started),
        steps=[(row["trained"], row["trained_so_far"]) for row in rows],
        ends_s=[step.trained.at_s for step in steps[:STEPS_IN_VIEW]],
    )


@dataclass(frozen=True)
class SweptRuns:
    """The runs of a sweep: all combinations of the swept values, those of the last key changing first."""

    runs: list[SweptRun]

    @cached_property
    def values(self) -> dict[str, list[str]]:
        """The swept keys and their values, in order."""
        return {key: list(dict.fromkeys(run.choice[key] for run in self.runs)) for key in self.runs[0].choice}

    @cached_property
    def axis(self) -> str:
        """The key that curves are drawn over: run_ahead, or the one with the most numbers, or the first."""
        numeric = [key for key in self.values if numbers(self.values[key])]
        if "schedule.run_ahead" in numeric:
            return "schedule.run_ahead"
        return max(numeric, key=lambda key: len(self.values[key]), default=next(iter(self.values)))

    @property
    def axis_name(self) -> str:
        return last_word(self.axis)

    def x(self, run: SweptRun) -> float | str:
        value = run.choice[self.axis]
        return float(value) if numbers(self.values[self.axis]) else value

    @cached_property
    def curves(self) -> dict[tuple[str, ...], list[SweptRun]]:
        """Runs that differ in the axis' key alone, by the values of the other keys."""
        found: dict[tuple[str, ...], list[SweptRun]] = {}
        for run in self.runs:
            found.setdefault(self.others(run), []).append(run)
        return found

    def others(self, run: SweptRun) -> tuple[str, ...]:
        return tuple(value for key, value in run.choice.items() if key != self.axis)

    @cached_property
    def view_s(self) -> float:
        """How much of a run's beginning the timeline shows at first."""
        return 1.02 * max((run.seen.ends_s[-1] for run in self.runs if run.seen.ends_s), default=1.0)

    @cached_property
    def last_lag(self) -> int:
        """The lag from which on all are one bar: few rollouts of any run are beyond."""
        tails = [_quantile(run.seen.lags, 0.999) for run in self.runs]
        return min(NUM_BINS, max([3, *tails]))

    @cached_property
    def bin_width(self) -> float:
        started = sorted(length for run in self.runs[:8] for length in run.seen.started)
        return started[int(0.995 * (len(started) - 1))] / NUM_BINS if started else 1.0


def numbers(values: Sequence[str]) -> bool:
    """All of them are numbers."""
    return all(value.lstrip("-").replace(".", "", 1).isdigit() for value in values)


def _quantile(counts: dict[int, int], share: float) -> int:
    total, so_far = sum(counts.values()), 0
    for value, count in sorted(counts.items()):
        so_far += count
        if so_far >= share * total:
            return value
    return 0


# ---- over the swept key


def throughput(sweep: SweptRuns, run: SweptRun) -> go.Figure:
    per = "second" if run.seen.unit == "s" else "unit of time"
    figure = _curves(sweep, run, [("throughput", f"trained rollouts per {per}", BLUE)])
    return _over(figure, sweep, run)


def lags(sweep: SweptRuns, run: SweptRun) -> go.Figure:
    shown = [("mean_lag", "mean over rollouts", BLUE), ("token_lag", "mean over tokens", ORANGE)]
    return _over(_curves(sweep, run, shown), sweep, run)


def max_lag(sweep: SweptRuns, run: SweptRun) -> go.Figure:
    figure = _curves(sweep, run, [("max_lag", "largest", RED)])
    bounds = sweep.curves[sweep.others(run)]
    if any(other.figures["lag_bound"] is not None for other in bounds):
        y = [other.figures["lag_bound"] for other in bounds]
        figure.add_trace(line_through([sweep.x(o) for o in bounds], y, "bound", GREEN, dash="dash", width=1.5))
    return _over(figure, sweep, run)


def _curves(sweep: SweptRuns, run: SweptRun, shown: Sequence[tuple[str, str, str]]) -> go.Figure:
    """The chosen run's curves, and thin ones of the runs beside it."""
    figure = go.Figure()
    others = [curve for key, curve in sweep.curves.items() if key != sweep.others(run)]
    for curve in others[:MAX_OTHERS]:
        figure.add_trace(_thin(sweep, curve, shown[0][0], first=curve is others[0]))
    curve = sweep.curves[sweep.others(run)]
    for name, label, color in shown:
        x, y = [sweep.x(other) for other in curve], [rounded(other.figures[name]) for other in curve]
        figure.add_trace(line_through(x, y, label, color, hovertemplate="%{y:.4g}"))
        figure.add_trace(_mark(sweep.x(run), run.figures[name], color))
    return figure


def _thin(sweep: SweptRuns, curve: Sequence[SweptRun], name: str, *, first: bool) -> go.Scatter:
    return go.Scatter(
        x=[sweep.x(run) for run in curve],
        y=[rounded(run.figures[name]) for run in curve],
        name="other choices",
        legendgroup="others",
        showlegend=first,
        mode="lines",
        line={"color": "#c9d1d9", "width": 1.2},
        hoverinfo="skip",
    )


def _mark(x: float | str, y: float, color: str) -> go.Scatter:
    return go.Scatter(
        x=[x],
        y=[y],
        mode="markers",
        marker={"size": 13, "color": "white", "line": {"color": color, "width": 3}},
        showlegend=False,
        hoverinfo="skip",
    )


def _over(figure: go.Figure, sweep: SweptRuns, run: SweptRun) -> go.Figure:
    """The axis of the swept key."""
    house_style(figure, 270, margin={"l": 48, "r": 14, "t": 46, "b": 44}, hovermode="x", dragmode=False)
    figure.update_xaxes(title={"text": sweep.axis_name, "standoff": 8}, fixedrange=True)
    figure.update_yaxes(rangemode="tozero", fixedrange=True)
    values = sweep.values[sweep.axis]
    if not numbers(values):
        figure.update_xaxes(type="category")
    elif len(values) <= 12:
        figure.update_xaxes(tickvals=[float(value) for value in values], ticktext=list(values))
    return figure


# ---- of one run


def lanes(sweep: SweptRuns, run: SweptRun) -> go.Figure:
    """With one legend, which may take as many lines as a narrow screen needs; panning survives another choice."""
    shown = run.seen.drawing
    figure = gantt.picture(shown, run.seen.unit)
    if not any(span.ended_s > span.began_s for span in shown.syncs):
        figure.update_traces(showlegend=False, selector={"name": "sync"})
    figure.update_traces(legend="legend")
    figure.update_xaxes(range=[0.0, sweep.view_s])
    figure.update_layout(legend2=None, legend={"font": {"size": 11}}, margin={"l": 58, "r": 14, "t": 10})
    figure.update_layout(uirevision="same")
    return figure


def lag_histogram(sweep: SweptRuns, run: SweptRun) -> go.Figure:
    counts, last = run.seen.lags, sweep.last_lag
    total = sum(counts.values()) or 1
    shares = [counts.get(lag, 0) / total for lag in range(last)]
    shares.append(sum(count for lag, count in counts.items() if lag >= last) / total)
    run_ahead = run.figures["run_ahead"]
    figure = go.Figure()
    for label, color, beyond in (("up to run_ahead", BLUE, False), ("beyond it", ORANGE, True)):
        y = [rounded(share) if (lag > run_ahead) == beyond else None for lag, share in enumerate(shares)]
        hover = "lag %{x}: %{y:.2%}<extra></extra>"
        figure.add_trace(go.Bar(x=list(range(last + 1)), y=y, name=label, marker={"color": color}, hovertemplate=hover))
    bound = run.figures["lag_bound"]
    if bound is not None and bound <= last:
        figure.add_vline(x=bound + 0.5, line={"color": GREEN, "width": 2, "dash": "dash"})
        figure.add_trace(_legend_line("bound", GREEN))
    _histogram_style(figure, "lag of a trained rollout (versions)")
    step = max(1, math.ceil((last + 1) / 12))
    ticks = [*range(0, last - step // 2, step), last]
    texts = [*map(str, ticks[:-1]), f"≥{last}"]
    figure.update_xaxes(range=[-0.6, last + 0.8], tickvals=ticks, ticktext=texts)
    return figure


def length_histogram(sweep: SweptRuns, run: SweptRun) -> go.Figure:
    width = sweep.bin_width
    centres = [(number + 0.5) * width for number in range(NUM_BINS + 1)]
    started, trained = (_shares(found, width) for found in (run.seen.started, run.seen.trained))
    figure = go.Figure()
    options: dict[str, Any] = {"x": [rounded(x) for x in centres], "hovertemplate": "%{y:.2%}"}
    figure.add_trace(go.Bar(y=started, name="as started", marker={"color": "#cfd8e1"}, width=width, **options))
    line = {"color": BLUE, "width": 2, "shape": "hvh"}
    figure.add_trace(go.Scatter(y=trained, name="as trained", mode="lines", line=line, **options))
    _histogram_style(figure, "length of a rollout (last bar: all longer ones)")
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(range=[0, (NUM_BINS + 1.2) * width])
    return figure


def _shares(found: Sequence[float], width: float) -> list[float]:
    """Share of the rollouts per bin; the last holds all beyond."""
    counts = binned(found, width, NUM_BINS + 1)
    return [rounded(count / (len(found) or 1)) or 0.0 for count in counts]


def _histogram_style(figure: go.Figure, title: str) -> None:
    margin = {"l": 52, "r": 14, "t": 40, "b": 44}
    house_style(figure, 280, margin=margin, bargap=0.12, barmode="overlay", hovermode="closest", dragmode=False)
    figure.update_xaxes(title={"text": title, "standoff": 8}, fixedrange=True, ticks="")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", fixedrange=True)


def _legend_line(name: str, color: str) -> go.Scatter:
    return go.Scatter(x=[None], y=[None], name=name, mode="lines", line={"color": color, "width": 2, "dash": "dash"})


def step_lengths(sweep: SweptRuns, run: SweptRun) -> go.Figure:
    """Of the early steps, beside the mean of what was started."""
    rows = run.seen.steps
    versions = list(range(1, len(rows) + 1))
    figure = go.Figure()
    of_step, so_far = ([rounded(row[part]) for row in rows] for part in (0, 1))
    figure.add_trace(line_through(versions, of_step, "this step's batch", BLUE, hovertemplate="%{y:.3g}"))
    figure.add_trace(line_through(versions, so_far, "all steps so far", PURPLE, dash="dot", hovertemplate="%{y:.3g}"))
    if run.figures["true_length"] is not None:
        ends, mean = [1, max(len(rows), 2)], rounded(run.figures["true_length"])
        label = "what was started"
        figure.add_trace(
            go.Scatter(x=ends, y=[mean] * 2, name=label, mode="lines", line={"color": GREY, "dash": "dash"})
        )
    margin = {"l": 52, "r": 14, "t": 40, "b": 44}
    house_style(figure, 280, margin=margin, dragmode=False)
    highest = max((value for other in sweep.runs for row in other.seen.steps for value in row if value), default=1.0)
    figure.update_xaxes(
        title={"text": "train step", "standoff": 8}, range=[0.3, max(len(rows), 2) + 0.7], fixedrange=True
    )
    figure.update_yaxes(range=[0, 1.08 * highest], fixedrange=True)
    return figure
