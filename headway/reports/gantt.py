"""The timeline of lanes and trainer: who was busy when, and with which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from headway.reports.fates import FATES_IN_WORDS
from headway.reports.plots import GREY, INK, MUTED, RED, house_style
from headway.reports.record import RunRecord
from headway.reports.summary import Span, Timeline

MAX_LANES = 32
MAX_BARS = 4000
STEPS_IN_VIEW = 6
ABOVE_PX, BELOW_PX = 48, 136
"""Room for the buttons, and for axis and legends."""

TRAINER, SYNC = "#27323d", "#e0a100"
VERSION_COLORS = ("#7fb3e6", "#86cfc4", "#a5d28c", "#e3d26f", "#f2b26b", "#ea9a94", "#d7a1d0", "#a9a6e0")
"""Neighbouring versions have neighbouring hues, so a lane that lags is seen; the colours repeat."""


@dataclass(frozen=True)
class Window:
    """A stretch of the run, [began_s, ended_s], drawn whole: every bar that touches it, in the lanes shown."""

    began_s: float
    ended_s: float


@dataclass(frozen=True)
class Drawing:
    """What is drawn of a timeline: these lanes, these windows, and how many bars that left out."""

    lanes: list[list[Span]]
    trainer: list[Span]
    syncs: list[Span]
    windows: list[Window]
    num_lanes: int
    num_left_out: int

    @property
    def num_bars(self) -> int:
        return sum(len(lane) for lane in self.lanes) + len(self.trainer) + len(self.syncs)


def drawing(lines: Timeline, max_bars: int | None = None, max_lanes: int = MAX_LANES) -> Drawing:
    """At most `max_bars` (MAX_BARS) bars of at most max_lanes lanes: the whole run, or half of them of either end."""
    max_bars = max_bars or MAX_BARS
    rows = [*lines.lanes[:max_lanes], lines.trainer, lines.syncs]
    spans = [span for row in rows for span in row]
    windows = [Window(0.0, lines.total_s)]
    if len(spans) > max_bars:
        windows = _beginning_and_end(spans, lines.total_s, max_bars // 2)
        rows = [[span for span in row if _touches(span, windows)] for row in rows]
    return _drawing(lines, rows, windows, len(spans))


def drawing_of(lines: Timeline, windows: list[Window]) -> Drawing:
    """The bars that touch these windows."""
    rows = [*lines.lanes[:MAX_LANES], lines.trainer, lines.syncs]
    num_spans = sum(map(len, rows))
    return _drawing(lines, [[span for span in row if _touches(span, windows)] for row in rows], windows, num_spans)


def _drawing(lines: Timeline, rows: list[list[Span]], windows: list[Window], num_spans: int) -> Drawing:
    *lanes, trainer, syncs = rows
    return Drawing(lanes, trainer, syncs, windows, len(lines.lanes), num_spans - sum(map(len, rows)))


def _beginning_and_end(spans: Sequence[Span], total_s: float, max_bars: int) -> list[Window]:
    """The longest beginning that `max_bars` bars touch, and the longest end."""
    began = sorted(span.began_s for span in spans)
    ended = sorted((span.ended_s for span in spans), reverse=True)
    return [Window(0.0, began[max_bars]), Window(ended[max_bars], total_s)]


def _touches(span: Span, windows: Sequence[Window]) -> bool:
    return any(span.began_s < window.ended_s and span.ended_s > window.began_s for window in windows)


def gantt(run: RunRecord) -> go.Figure | None:
    """One row per lane and one for the trainer, with buttons for the beginning, the end and the whole."""
    lines = run.timeline
    shown = drawing(lines)
    if not shown.num_bars:
        return None
    figure = picture(shown, run.unit)
    for at_s in lines.resumed_s:
        figure.add_vline(
            x=at_s,
            line={"color": RED, "width": 2},
            annotation={"text": "resumed", "font": {"color": RED, "size": 12}},
        )
    add_view_buttons(figure, views(lines, shown.windows))
    return figure


def picture(shown: Drawing, unit: str) -> go.Figure:
    """The bars, their axes and their legends, without buttons."""
    figure = go.Figure()
    for trace in _lane_bars(shown, unit):
        figure.add_trace(trace)
    trainer_row = len(shown.lanes) + 0.6
    figure.add_trace(_trainer_bars(shown, trainer_row, unit))
    figure.add_trace(_sync_bars(shown, trainer_row, unit))
    figure.add_trace(_published_lines(shown, trainer_row))
    house_style(figure, ABOVE_PX + BELOW_PX + _plot_px(shown), barmode="overlay", hovermode="closest", dragmode="pan")
    _legends(figure, _plot_px(shown))
    _axes(figure, shown, trainer_row, unit)
    return figure


def _bars(spans: Sequence[Span], rows: Sequence[float], texts: Sequence[str], **options: Any) -> go.Bar:
    return go.Bar(
        orientation="h",
        base=[round(span.began_s, 4) for span in spans],
        x=[round(span.ended_s - span.began_s, 4) for span in spans],
        y=list(rows),
        hovertext=list(texts),
        hovertemplate="%{hovertext}<extra></extra>",
        **options,
    )


def _lane_bars(shown: Drawing, unit: str) -> list[go.Bar]:
    """One trace per colour (the legend), one for evaluations."""
    placed = [(row, span) for row, lane in enumerate(shown.lanes) for span in lane]
    num_colors = len(VERSION_COLORS)
    traces: list[go.Bar] = []
    for number, color in enumerate(VERSION_COLORS):
        bars = [(row, span) for row, span in placed if not span.evaluation and span.version % num_colors == number]
        if bars:
            bars.sort(key=lambda bar: _look(bar[1]) is not PLAIN)  # the legend looks like the first one
            traces.append(_trace_of(bars, _version_label(bars), _looks(color, [span for _, span in bars]), unit))
    traces += _look_legend([span for _, span in placed])
    evaluation = [(row, span) for row, span in placed if span.evaluation]
    if evaluation:
        hatched = {"shape": "/", "fgcolor": GREY, "bgcolor": "#eef1f4", "size": 5, "solidity": 0.25}
        marker = {"color": "#eef1f4", "pattern": hatched, "line": {"color": GREY, "width": 0.4}}
        traces.append(_trace_of(evaluation, "evaluation", marker, unit).update(legend="legend2"))
    return traces


@dataclass(frozen=True)
class Look:
    """How a stretch is marked beside its colour. shape: of the pattern, as plotly names it."""

    name: str
    shape: str = ""
    opacity: float = 1.0


PLAIN = Look("")
PAUSED = Look("paused, goes on later", opacity=0.45)
THROWN_AWAY = Look("thrown away or lost", shape="x")
RELEASED = Look("whole, and not to be trained", shape=".")
INTERRUPTED = Look("interrupted", shape="\\")


def _look(span: Span) -> Look:
    if span.ended_by == "paused":
        return PAUSED
    if span.fate in ("aborted", "lost", "killed"):
        return THROWN_AWAY
    if span.fate in ("dropped", "filtered", "failed"):
        return RELEASED
    return INTERRUPTED if span.interrupted else PLAIN


def _looks(color: str, spans: Sequence[Span]) -> dict[str, Any]:
    """The marker of bars of one colour; plain where none is marked, so that the page stays small."""
    looks = [_look(span) for span in spans]
    marker: dict[str, Any] = {"color": color, "line": {"color": "white", "width": 0.6}}
    if any(look.shape for look in looks):
        marker["pattern"] = {**PATTERN, "shape": [look.shape for look in looks], "bgcolor": color}
    if any(look.opacity < 1 for look in looks):
        marker["opacity"] = [look.opacity for look in looks]
    return marker


PATTERN = {"fgcolor": INK, "size": 6, "solidity": 0.22}


def _look_legend(spans: Sequence[Span]) -> list[go.Bar]:
    """What the marks mean, of those that occur."""
    found = {_look(span) for span in spans if not span.evaluation}
    return [
        go.Bar(
            base=[None],
            x=[None],
            y=[None],
            name=look.name,
            legend="legend2",
            marker={"color": "#c3ccd5", "opacity": look.opacity, "pattern": {**PATTERN, "shape": look.shape}},
        )
        for look in (PAUSED, INTERRUPTED, THROWN_AWAY, RELEASED)
        if look in found
    ]


def _trace_of(bars: Sequence[tuple[int, Span]], name: str, marker: dict[str, Any], unit: str) -> go.Bar:
    spans = [span for _, span in bars]
    texts = [_rollout_text(span, unit) for span in spans]
    return _bars(spans, [row for row, _ in bars], texts, name=name, marker=marker, width=0.86)


def _version_label(bars: Sequence[tuple[int, Span]]) -> str:
    versions = sorted({span.version for _, span in bars})
    return ", ".join(str(version) for version in versions[:2]) + (" …" if len(versions) > 2 else "")


def _rollout_text(span: Span, unit: str) -> str:
    what = f"evaluation answer {span.name[1:]}" if span.evaluation else f"rollout {span.name[1:]}"
    tokens = f", {span.tokens:g} tokens" if span.tokens and unit == "s" else ""
    return f"{what}, version {span.version}{tokens}{_became(span)}<br>{_when(span, unit)}"


def _became(span: Span) -> str:
    """What became of a rollout, where it isn't simply trained."""
    said = ["goes on"] if span.resumed else []
    said += ["interrupted"] if span.interrupted else []
    said += ["paused"] if span.ended_by == "paused" else []
    if span.fate not in (None, "trained", "evaluation"):
        said.append(FATES_IN_WORDS[span.fate])
    return "".join(f", {word}" for word in said)


def _when(span: Span, unit: str) -> str:
    end = "" if span.finished else ", unfinished"
    return f"{span.began_s:.4g}–{span.ended_s:.4g} {unit} ({span.ended_s - span.began_s:.3g} {unit}{end})"


def _trainer_bars(shown: Drawing, row: float, unit: str) -> go.Bar:
    return _bars(
        shown.trainer,
        [row] * len(shown.trainer),
        [f"train step: version {span.version} → {span.version + 1}<br>{_when(span, unit)}" for span in shown.trainer],
        name="train step, with the version it made",
        legend="legend2",
        marker={"color": TRAINER},
        width=1.1,
        text=[str(span.version + 1) for span in shown.trainer],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": "white"},
    )


def _sync_bars(shown: Drawing, row: float, unit: str) -> go.Bar:
    return _bars(
        shown.syncs,
        [row] * len(shown.syncs),
        [f"sync of version {span.version} to the engine<br>{_when(span, unit)}" for span in shown.syncs],
        name="sync",
        legend="legend2",
        marker={"color": SYNC},
        width=1.1,
    )


def _published_lines(shown: Drawing, row: float) -> go.Scatter:
    """A thin line through all lanes where new weights are out."""
    published = [round(span.ended_s, 4) for span in shown.syncs if span.finished]
    return go.Scatter(
        x=[value for at_s in published for value in (at_s, at_s, None)],
        y=[value for _ in published for value in (-0.6, row + 0.6, None)],
        name="new weights are out",
        legend="legend2",
        mode="lines",
        line={"color": INK, "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )


def _axes(figure: go.Figure, shown: Drawing, trainer_row: float, unit: str) -> None:
    every = 1 if len(shown.lanes) <= 16 else 4
    lanes = list(range(0, len(shown.lanes), every))
    figure.update_yaxes(
        tickvals=[*lanes, trainer_row],
        ticktext=[*(f"lane {number}" for number in lanes), "trainer"],
        range=[trainer_row + 0.8, -0.8],
        fixedrange=True,
        showgrid=False,
        tickfont={"size": 11, "color": MUTED},
    )
    figure.update_xaxes(title={"text": f"time ({unit})", "standoff": 8})
    figure.update_layout(bargap=0, uniformtext={"mode": "hide", "minsize": 9})


def _plot_px(shown: Drawing) -> int:
    return 20 * len(shown.lanes) + 56


def _legends(figure: go.Figure, plot_px: int) -> None:
    """Below the picture: the colours of the versions, and what else there is."""
    below = {"orientation": "h", "x": 0, "xanchor": "left", "yanchor": "top", "font": {"size": 12}}
    figure.update_layout(
        margin={"t": ABOVE_PX, "b": BELOW_PX},
        legend={**below, "y": -48 / plot_px, "title": {"text": "began with version  ", "font": {"size": 12}}},
        legend2={**below, "y": -94 / plot_px},  # the first one may need two rows
    )


def add_view_buttons(figure: go.Figure, views: Sequence[View]) -> None:
    figure.update_xaxes(range=views[0][1])
    figure.update_layout(
        updatemenus=[
            {
                "type": "buttons",
                "direction": "right",
                "x": 0,
                "xanchor": "left",
                "y": 1,
                "yanchor": "bottom",
                "pad": {"b": 6},
                "showactive": True,
                "font": {"size": 12},
                "bgcolor": "white",
                "bordercolor": "#cfd6dd",
                "buttons": [
                    {"label": label, "method": "relayout", "args": [{"xaxis.range": extent}]} for label, extent in views
                ],
            }
        ],
    )


View = tuple[str, list[float]]
"""A button's label, and the stretch of time [from, to] that it shows."""


def views(lines: Timeline, windows: Sequence[Window]) -> list[View]:
    """Of what is drawn of a timeline in these windows. The first one is shown at first."""
    ends = [span.ended_s for span in lines.syncs if span.finished]
    first, last = windows[0], windows[-1]
    whole = [0.0, last.ended_s]
    if len(ends) <= STEPS_IN_VIEW:
        return [("whole run", whole)]
    until_s = min(ends[STEPS_IN_VIEW - 1] * 1.02, first.ended_s)
    found = [
        (f"first {STEPS_IN_VIEW} steps", [_training_began_s(lines, until_s), until_s]),
        (f"last {STEPS_IN_VIEW} steps", [max(ends[-STEPS_IN_VIEW - 1], last.began_s), last.ended_s]),
    ]
    if len(windows) == 1:
        found.append(("whole run", whole))
    else:
        found.append(("whole beginning", [0.0, first.ended_s]))
        found.append(("whole end", [last.began_s, last.ended_s]))
    return found


def _training_began_s(lines: Timeline, until_s: float) -> float:
    """When the first rollout started that is no evaluation answer: those before the first step may take long."""
    began = (span.began_s for lane in lines.lanes for span in lane if not span.evaluation and span.began_s < until_s)
    return min(began, default=0.0)


def shown_note(run: RunRecord) -> str:
    """One sentence on what the figure leaves out; empty if it shows everything."""
    shown = drawing(run.timeline)
    parts: list[str] = []
    if shown.num_lanes > len(shown.lanes):
        parts.append(f"The first {len(shown.lanes)} of {shown.num_lanes} lanes are shown.")
    if shown.num_left_out:
        first, last = shown.windows
        parts.append(
            f"To keep the page small, {shown.num_bars:,} bars are drawn: all from 0 to {first.ended_s:.4g} {run.unit} "
            f"and all from {last.began_s:.4g} {run.unit} to the end; {shown.num_left_out:,} between are left out."
        )
    return " ".join(parts)
