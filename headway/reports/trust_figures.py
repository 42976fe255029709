"""The curves of a run's page on whether its updates can be trusted: lag, mismatch, corrections, their cost, entropy.

One function per figure: record -> figure, or None where nothing of it was measured. `objectives.diagnostics` says what
each metric is, and its denominator. mu is the policy that sampled a token, pi the trainer's before the train step,
w = pi / mu.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from headway.reports.alarms import is_acted_share
from headway.reports.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
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
    line_through,
    log_axis,
    log_traces,
    panels,
    suffixes,
    x_steps,
)
from headway.reports.record import Row, RunRecord
from headway.reports.trust_numbers import SOURCE_NAMES, Bucket, by_bucket, lag_buckets, position_buckets, thirds

K3 = "mismatch_kl_k3"

SOURCES = (
    ("", "all trained tokens", "#c3cad1", "solid"),
    ("staleness", SOURCE_NAMES["staleness"], ORANGE, "solid"),
    ("stale_cache", SOURCE_NAMES["stale_cache"], PURPLE, "solid"),
    ("numerics", SOURCE_NAMES["numerics"], GREEN, "solid"),
)
"""All trained tokens, and their sources: suffix of the metrics, label, look."""

CANARY = ("canary_kl_k3", "canaries", "#35a894", "dot")
REASON_COLORS = (RED, BLUE, ORANGE, PURPLE, GREEN, GREY)
THIRD_COLORS = ("#a9c8ea", "#5b8fcc", "#1d4a86")
"""Light to dark: as the run goes on."""


def lag(run: RunRecord) -> go.Figure | None:
    """How old the trained tokens were, in versions, against the run_ahead that was allowed."""
    steps = run.drawn_steps
    if not steps:
        return None
    figure = go.Figure()
    figure.add_trace(line(steps, "lag_max", "oldest rollout", GREY, dash="dot"))
    figure.add_trace(line(steps, "lag_mean", "mean of the rollouts", BLUE))
    figure.add_trace(line(steps, "token_lag", "mean of the tokens", ORANGE))
    house_style(figure, 260)
    run_ahead = run.header.fields.get("run_ahead")
    if run_ahead is not None:
        figure.add_hline(
            y=run_ahead,
            line={"color": GREEN, "dash": "dash", "width": 1.5},
            annotation={"text": f"run_ahead {run_ahead:g}", "font": {"color": GREEN, "size": 12}},
            annotation_position="top right",
        )
    x_steps(figure, run)
    figure.update_yaxes(title={"text": "lag (versions)"}, rangemode="tozero")
    return figure


# ---- how big it is, and where it comes from


def mismatch(run: RunRecord) -> go.Figure | None:
    """k3 of all tokens, of each source and of canaries on one log axis; below, each source's share of the tokens."""
    steps = run.drawn_steps
    curves = [(f"{K3}/{name}" if name else K3, label, color, dash) for name, label, color, dash in SOURCES]
    shown = [curve for curve in (*curves, CANARY) if has(steps, curve[0])]
    if not shown:
        return None
    has_sources = has(steps, *(f"tokens/{name}" for name, *_ in SOURCES[1:]))
    options = {"rows": 2, "shared_xaxes": True, "row_heights": [0.74, 0.26], "vertical_spacing": 0.07}
    figure = panels([""], 460 if has_sources else 340, **(options if has_sources else {}))
    figure.update_layout(margin={"t": 34})
    traces = [
        line(steps, name, label, color, dash=dash, width=7 if name == K3 else 2) for name, label, color, dash in shown
    ]
    log_axis(figure, traces, row=1, col=1)
    for trace in log_traces(traces):
        add(figure, trace, 1)
    figure.update_yaxes(title={"text": "KL(mu, pi), k3"}, row=1, col=1)
    x_steps(figure, run, titled=not has_sources, bars=has_sources)
    if has_sources:
        _token_shares(figure, steps)
        x_steps(figure, run, bars=True, row=2, col=1)
    return figure


def _token_shares(figure: go.Figure, steps: Sequence[Row]) -> None:
    for name, label, color, _ in SOURCES[1:]:
        if has(steps, f"tokens/{name}"):
            shares: Column = [_share_of_tokens(row, name) for row in steps]
            bars = go.Bar(x=column(steps, "version"), y=shares, name=label, marker={"color": color}, showlegend=False)
            figure.add_trace(bars, 2, 1)
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_yaxes(title={"text": "of the tokens"}, tickformat=".0%", range=[0, 1.0], row=2, col=1)


def _share_of_tokens(row: Row, name: str) -> float | None:
    """A source that a step doesn't name had no token in it."""
    return (row.get(f"tokens/{name}") or 0.0) / row["tokens"] if row.get("tokens") else None


def buckets(run: RunRecord) -> go.Figure | None:
    """k3 against lag and against the place in the response, early and late in the run; below, the tokens of each."""
    shown = [
        (title, found)
        for title, found in (
            ("by lag", lag_buckets(run.steps)),
            ("by position in the response", position_buckets(run.steps)),
        )
        if len(found) > 1
    ]
    if not shown:
        return None
    figure = panels(
        [title for title, _ in shown], 420, rows=2, row_heights=[0.75, 0.25], vertical_spacing=0.06, shared_xaxes=True
    )
    for number, (_, found) in enumerate(shown, 1):
        _bucket_panel(figure, run, found, number)
    axis_titles = {"by lag": "lag (versions)", "by position in the response": "tokens from the start of the response"}
    for number, (title, _) in enumerate(shown, 1):
        figure.update_xaxes(type="category", row=1, col=number)
        figure.update_xaxes(type="category", title={"text": axis_titles[title], "standoff": 8}, row=2, col=number)
        figure.update_yaxes(tickformat=".0%", rangemode="tozero", row=2, col=number)
    figure.update_yaxes(title={"text": "KL(mu, pi), k3"}, row=1, col=1)
    figure.update_yaxes(title={"text": "of the tokens"}, row=2, col=1)
    return figure


def _bucket_panel(figure: go.Figure, run: RunRecord, found: Sequence[Bucket], number: int) -> None:
    x = [bucket.label for bucket in found]
    parts = thirds(run.steps)
    traces = [
        line_through(x, by_bucket(steps, K3, found), label, color, showlegend=number == 1)
        for color, (label, steps) in zip(THIRD_COLORS[-len(parts) :], parts, strict=True)
    ]
    log_axis(figure, traces, row=1, col=number)
    for trace in log_traces(traces):
        add(figure, trace, number)
    shares = [bucket.share for bucket in found]
    bars = go.Bar(x=x, y=shares, name="of the tokens", marker={"color": "#c9d1d9"}, showlegend=False)
    figure.add_trace(bars, 2, number)


def estimates(run: RunRecord) -> go.Figure | None:
    """The same divergence in both directions and by both estimators: where they part, a few tokens dominate."""
    steps = run.drawn_steps
    shown = [
        (title, f"mismatch_kl_{name}", f"mismatch_reverse_kl_{name}")
        for title, name in (("k1: mean of a log-ratio, noisy, may be negative", "k1"), ("k3: never negative", "k3"))
        if has(steps, f"mismatch_kl_{name}", f"mismatch_reverse_kl_{name}")
    ]
    if not shown:
        return None
    figure = panels([title for title, _, _ in shown], 290)
    for number, (_, forward, reverse) in enumerate(shown, 1):
        for name, label, color in ((forward, "KL(mu, pi)", BLUE), (reverse, "KL(pi, mu)", ORANGE)):
            if has(steps, name):
                add(figure, line(steps, name, label, color), number)
        figure.update_yaxes(exponentformat="power", row=1, col=number)
        if not any((*column(steps, forward), *column(steps, reverse))):
            figure.update_yaxes(range=[-1e-6, 1e-6], row=1, col=number)
    x_steps(figure, run)
    return figure


def ratios(run: RunRecord) -> go.Figure | None:
    """Trainer over behaviour probability of the trained tokens: nested quantile bands around 1."""
    steps = run.drawn_steps
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
    house_style(figure, 320)
    figure.add_hline(y=1, line={"color": INK, "width": 1, "dash": "dash"})
    x_steps(figure, run)
    figure.update_yaxes(title={"text": "w = pi / mu"})
    return figure


# ---- what was done about it, and what it costs


def corrections(run: RunRecord) -> go.Figure | None:
    """The share of tokens that each weight cut or masked, or a clip stopped: of all, and by the advantage's sign."""
    steps = run.drawn_steps
    reasons = acted_reasons(steps)
    shown = [
        (title, sign)
        for title, sign in (
            ("all trained tokens", ""),
            ("those with A > 0", "/positive"),
            ("those with A < 0", "/negative"),
        )
        if has(steps, *(f"acted_share/{reason}{sign}" for reason in reasons))
    ]
    if not shown:
        return None
    figure = panels([title for title, _ in shown], 290, shared_yaxes=True, horizontal_spacing=0.03)
    for number, (_, sign) in enumerate(shown, 1):
        for reason, color in zip(reasons, REASON_COLORS * len(reasons), strict=False):
            if has(steps, f"acted_share/{reason}{sign}"):
                trace = line(steps, f"acted_share/{reason}{sign}", reason, color, showlegend=number == 1)
                add(figure, trace, number)
    names = [f"acted_share/{reason}{sign}" for reason in reasons for _, sign in shown]
    figure.update_yaxes(range=[0, headroom(steps, names, 0.01)], tickformat=".3~%")
    figure.update_yaxes(title={"text": "share of the tokens"}, row=1, col=1)
    x_steps(figure, run)
    return figure


def acted_reasons(steps: Sequence[Row]) -> list[str]:
    """Names of the weights and clips of which the steps say how often they acted."""
    return [name for name in suffixes(steps, "acted_share/") if is_acted_share(f"acted_share/{name}")]


def cost(run: RunRecord) -> go.Figure | None:
    """The effective sample size, and the factor of variance that the ratios cost: of tokens, and of whole answers."""
    steps = run.drawn_steps
    factors = [
        (label, color, [None if value is None else 1 + value for value in column(steps, name)])
        for name, label, color in (("chi2_token", "of tokens", BLUE), ("chi2_sequence", "of whole answers", ORANGE))
        if has(steps, name)
    ]
    has_size = has(steps, "ess_share")
    titles = ["effective sample size"] * has_size + ["1 + chi^2 = mean of w^2, log axis"] * bool(factors)
    if not titles:
        return None
    figure = panels(titles, 290)
    if has_size:
        add(figure, line(steps, "ess_share", "of the trained tokens", GREEN), 1)
        figure.update_yaxes(tickformat=".0%", range=[0, 1.03], row=1, col=1)
    for label, color, values in factors:
        add(figure, line_through(column(steps, "version"), values, label, color), len(titles))
    if factors:
        highest = max(value for _, _, values in factors for value in values if value is not None)
        _factor_axis(figure, highest, len(titles))
    x_steps(figure, run)
    return figure


def _factor_axis(figure: go.Figure, highest: float, number: int) -> None:
    """From just below 1, where the ratios cost nothing, to the highest factor but at least 2."""
    top = math.log10(max(2.0, 1.2 * highest))
    named = {"tickvals": [1, 1.2, 1.5, 2, 3, 5, 10]} if top < 1 else {"dtick": math.ceil(top / 8)}
    figure.update_yaxes(
        {"type": "log", "exponentformat": "power", "range": [-0.02 * top, top], "tickfont": {"size": 11}, **named},
        row=1,
        col=number,
    )


def interpolation(run: RunRecord) -> go.Figure | None:
    """How far the guessed proximal policy was from the true one."""
    steps = run.drawn_steps
    names = ("interpolation_error_mean", "interpolation_error_max")
    if not has(steps, *names):
        return None
    figure = go.Figure()
    for name, label, color, dash in (
        (names[0], "mean of the tokens", BLUE, "solid"),
        (names[1], "largest", GREY, "dot"),
    ):
        if has(steps, name):
            figure.add_trace(line(steps, name, label, color, dash=dash))
    house_style(figure, 250)
    x_steps(figure, run)
    figure.update_yaxes(title={"text": "|log guess / true|"}, rangemode="tozero", exponentformat="power")
    return figure


def entropy(run: RunRecord) -> go.Figure | None:
    """The trainer's mean entropy: of all tokens, and by their place in the response."""
    steps = run.drawn_steps
    if not has(steps, "entropy"):
        return None
    figure = go.Figure()
    places = [bucket for bucket in position_buckets(steps) if has(steps, f"entropy/{bucket.name}")]
    shown = _ends_and_middle(places) if len(places) > 1 else []
    for bucket, color in zip(shown, THIRD_COLORS, strict=False):
        label = f"tokens {bucket.label} of the response"
        figure.add_trace(line(steps, f"entropy/{bucket.name}", label, color, width=1.5, dash="dot"))
    figure.add_trace(line(steps, "entropy", "all trained tokens", INK))
    house_style(figure, 260)
    x_steps(figure, run)
    names = ["entropy", *(f"entropy/{bucket.name}" for bucket in shown)]
    figure.update_yaxes(title={"text": "nats"}, range=[0, headroom(steps, names, 1e-3)])
    return figure


def _ends_and_middle(places: Sequence[Bucket]) -> list[Bucket]:
    return [places[number] for number in sorted({0, len(places) // 2, len(places) - 1})]
