"""A run's page: one HTML file that holds all it shows. Everything that is shown is escaped."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from headway.reports import alarms, pictures, rollout_text, wording
from headway.reports.document import document
from headway.reports.interval import wilson
from headway.reports.outcome import last_steps, num_misplaced, reward_ends
from headway.reports.page_style import DRAW
from headway.reports.pictures import Picture
from headway.reports.record import MAX_POINTS, RunRecord
from headway.trace import Event

PAGE = "index.html"


def write_page(run: RunRecord, simulated: Sequence[Event] | str = ()) -> Path:
    """Write RUN/index.html -> its path.

    simulated: the trace of the same run, simulated from its own, or why there is none.
    """
    known = "not_simulated" if isinstance(simulated, str) else "simulated"
    path = run.folder / PAGE
    document = page(replace(run, **{known: simulated}))
    path.write_text(document, encoding="utf-8", errors="replace")  # a model may write half a surrogate pair
    return path


def page(run: RunRecord) -> str:
    """The whole document."""
    from headway.reports import goodput_table, trust_table

    plots: dict[str, Any] = {}
    goodput = goodput_table.table(run.figures["goodput"], run.unit)
    trust = {"before": trust_table.glance(run), "after": trust_table.table(run)}
    body = "\n".join(
        [
            _banner(run),
            _headline(run),
            _alarms(run),
            _notes(run),
            _cards(run),
            _tiles(run),
            _objective(run),
            _section("Is it learning?", pictures.learning(), run, plots),
            _section("Can the update be trusted?", pictures.trust(), run, plots, **trust),
            _rollouts(run),
            _section("Who was trained?", pictures.fairness(), run, plots),
            _section("Did the hardware wait?", pictures.hardware(run), run, plots, after=_not_simulated(run) + goodput),
            _settings(run),
        ]
    )
    title = f"unsound: {_name(run)}" if run.unsound else _name(run)
    return document(title, body, plots, DRAW, css=rollout_text.shade_css(), source="the run's trace")


# ---- the top of the page


def _name(run: RunRecord) -> str:
    name = run.setting("run.name")
    return str(name) if name and name != "run" else run.folder.resolve().name


def _banner(run: RunRecord) -> str:
    """Above all else on the page of a run that trained what is refused."""
    if not run.unsound:
        return ""
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in run.unsound)
    return (
        '<aside class="banner" role="note"><b>Unsound.</b> This run trained what Headway refuses, because '
        f"objective.unsound was set. Its results are no evidence for the objective that it names:"
        f"<ul>{reasons}</ul></aside>"
    )


def _alarms(run: RunRecord) -> str:
    said = (alarms.in_words(alarm, len(run.steps)) for alarm in run.alarms)
    return "".join(f'<p class="note alarm"><b>Warning:</b> {_unbroken(html.escape(text))}</p>' for text in said)


def _headline(run: RunRecord) -> str:
    chips = "".join(f"<li>{html.escape(label)} <b>{html.escape(value)}</b></li>" for label, value in _facts(run))
    return (
        f'<header><p class="what">A Headway run</p><h1>{html.escape(_name(run))}</h1>'
        f'<p class="lead">{_unbroken(html.escape(outcome(run)))}</p><ul class="chips">{chips}</ul></header>'
    )


def _unbroken(text: str) -> str:
    """No line break within an interval or before a percent sign."""
    return text.replace("–", "–\N{WORD JOINER}").replace(" %", "\N{NO-BREAK SPACE}%")


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    """What the run was, in a few words each; what isn't known is left out."""
    header = run.header.fields
    batch, group = header.get("batch_size"), header.get("group_size", 1)
    batch_text = f"{batch} rollouts" + (f" = {batch // group} prompts × {group}" if batch and group > 1 else "")
    facts = [
        ("model", run.setting("model.path")),
        ("task", run.setting("data.source")),
        ("objective", run.setting("objective.name")),
        ("corrections", ", ".join(run.setting("objective.corrections") or ()) or None),
        ("run_ahead", f"{header['run_ahead']:g}" if "run_ahead" in header else None),
        ("order", _order(header)),
        ("max_lag", _stragglers(header)),
        ("no trained lag above", header.get("lag_bound")),
        ("batch", batch_text if batch else None),
        ("lanes", header.get("lanes")),
        ("learning rate", run.setting("train.learning_rate")),
        ("token budget", run.setting("generate.max_new_tokens")),
        ("temperature", run.setting("generate.temperature")),
        ("seed", header.get("seed")),
        ("peak memory", _memory(run)),
    ]
    return [(label, str(value)) for label, value in facts if value is not None]


def _memory(run: RunRecord) -> str | None:
    peaks = [row["peak_memory_bytes"] for row in run.steps if row.get("peak_memory_bytes")]
    return f"{max(peaks) / 1e9:.2f} GB" if peaks else None


def _order(header: Mapping[str, Any]) -> str | None:
    order, window = header.get("order", "finished"), header.get("window")
    return None if order == "finished" else order + (f" of {window} groups" if window else "")


def _stragglers(header: Mapping[str, Any]) -> str | None:
    if header.get("max_lag") is None:
        return None
    return f"{header['max_lag']}: {', '.join(header.get('stragglers') or ['accept'])}"


def outcome(run: RunRecord) -> str:
    """The run in two sentences."""
    figures = run.figures
    num_steps = len(run.steps)
    if not num_steps:
        return f"No train step has ended yet, after {_time(run, figures['total'])}."
    steps = f"{num_steps} train step{'s' * (num_steps > 1)}"
    gains = [gain for gain in (_reward_gain(run), _accuracy_gain(run)) if gain]
    said = ", and ".join(gains) if gains else "no reward was recorded"
    rate = _tokens(run) / figures["total"] if figures["total"] else 0.0
    speed = f"{rate:,.0f} tokens per second" if run.unit == "s" else f"{figures['throughput']:.4g} rollouts per unit"
    return f"In {steps} and {_time(run, figures['total'])} ({speed}), {said}."


def _time(run: RunRecord, total: float) -> str:
    """Seconds while they are few, else as on a clock."""
    if run.unit != "s":
        return f"{total:.4g} units"
    return f"{total:.3g} s" if total < 60 else f"{wording.duration(total)} {'h' if total >= 3600 else 'min'}"


def _tokens(run: RunRecord) -> float:
    return sum(life.tokens for life in run.timeline.lives)


def _reward_gain(run: RunRecord) -> str:
    ends = reward_ends(run)
    return f"the sampled reward went from {ends[0]:.3g} to {ends[1]:.3g}" if ends else ""


def _evaluated(run: RunRecord) -> list[Event]:
    return [event for event in run.evaluations if event["num"]]


def _accuracy_gain(run: RunRecord) -> str:
    evaluated = _evaluated(run)
    if not evaluated:
        return ""
    first, last = evaluated[0], evaluated[-1]
    if first is last:
        return f"greedy accuracy at version {first['version']} was {_accuracy(first)}"
    before, after = (wording.percent(event["num_correct"] / event["num"]) for event in (first, last))
    return (
        f"greedy accuracy on held-out prompts went from {before} to {after} "
        f"(95 % intervals {wording.interval(first)} and {wording.interval(last)})"
    )


def _accuracy(event: Event) -> str:
    return f"{wording.percent(event['num_correct'] / event['num'])} (95 % interval {wording.interval(event)})"


def _notes(run: RunRecord) -> str:
    """What a reader must know before believing the rest."""
    notes = list(run.notes)
    if run.ended is None:
        notes.insert(0, "This run has not ended: it was stopped or killed, or still goes on. The page shows it so far.")
    num_resumed = len(run.timeline.resumed_s)
    if num_resumed:
        versions = ", ".join(str(event.fields.get("version")) for event in run.events[1:] if event.kind == "run")
        times = "once" if num_resumed == 1 else f"{num_resumed} times"
        notes.append(
            f"The run was resumed {times}, from version {versions}. Steps that were trained again are shown once, as "
            "they came out last; the time between stop and resume is not counted."
        )
    notes += _befell(run)
    skipped = max((row.get("skipped_steps") or 0 for row in run.steps), default=0)  # each row counts from the start
    if skipped:
        notes.append(f"{skipped:g} optimizer step(s) were skipped because a gradient was not finite.")
    not_finite = sum(row.get("nonfinite_tokens") or 0 for row in run.steps)
    if not_finite:
        notes.append(
            f"The log-ratio of {not_finite:,.0f} trained tokens was not finite: they are in no figure of the mismatch."
        )
    return "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)


def _befell(run: RunRecord) -> list[str]:
    """What became of groups and rollouts that were not simply trained."""
    num = Counter(event.kind for event in run.events)
    num["interrupted"] = sum(event.fields.get("finish") == "interrupted" for event in run.events)
    return [_plural(num[kind], *words) for kind, words in BEFELL.items() if num[kind]]


def _plural(num: int, noun: str, one: str, many: str) -> str:
    return f"{num:,} {noun}{'s' * (num > 1)} {one if num == 1 else many}."


BEFELL = {
    "failed": ("group", *["could not be trained: too few of the rollouts were scored"] * 2),
    "dropped": ("group", "was dropped: its lag was above max_lag", "were dropped: their lag was above max_lag"),
    "filtered": (
        "group",
        "was replaced, as all its rewards were the same",
        "were replaced, as all their rewards were the same",
    ),
    "restarted": ("group", *["began again under newer weights"] * 2),
    "interrupted": (
        "rollout",
        "was interrupted and counts as it was",
        "were interrupted and count as they were",
    ),
    "aborted": ("rollout", "was thrown away", "were thrown away"),
    "lost": (
        "rollout",
        "was lost by the engine and began again or was given up",
        "were lost by the engine and began again or were given up",
    ),
    "retired": ("prompt", *["came to be answered right so often that asking ended"] * 2),
}
"""Kind of event -> whom it befell, and what is said of one and of many."""


def _cards(run: RunRecord) -> str:
    cards = [card for card in (_accuracy_card(run), _reward_card(run)) if card]
    return f'<section class="cards" aria-label="before and after">{"".join(cards)}</section>' if cards else ""


def _accuracy_card(run: RunRecord) -> str:
    evaluated = _evaluated(run)
    if not evaluated:
        return ""
    first, last = evaluated[0], evaluated[-1]
    rows = [_accuracy_row("before" if first["version"] == 0 else f"v{first['version']}", first)]
    misplaced = num_misplaced(first, run.answers)
    if misplaced:
        share = (first["num_correct"] + misplaced) / first["num"]
        detail = f"{misplaced} wrong answers held the right result where it doesn't count"
        rows.append(_card_row("by format", share, wording.percent(share), detail))
    if last is not first:
        rows.append(_accuracy_row("after" if run.ended else f"v{last['version']}", last, "after"))
    return f'<div class="card"><h3>Greedy accuracy on held-out prompts</h3>{"".join(rows)}</div>'


def _accuracy_row(label: str, event: Event, css: str = "") -> str:
    share = event["num_correct"] / event["num"]
    low, high = wilson(event["num_correct"], event["num"])
    mark = f'<span class="interval" style="left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"></span>'
    detail = f"{event['num_correct']} of {event['num']} correct; 95 % interval {wording.interval(event)}"
    return _card_row(label, share, wording.percent(share), detail, css, mark)


def _reward_card(run: RunRecord) -> str:
    ends = reward_ends(run)
    if not ends:
        return ""
    first, last = ends
    lengths = [row["response_tokens_mean"] for row in run.steps if row.get("response_tokens_mean") is not None]
    width = last_steps(run)
    details = ["first step", "last step" if width == 1 else f"mean of the last {width} steps"]
    if lengths:
        means = (lengths[0], fmean(lengths[-width:]))
        details = [f"{detail}; {mean:.1f} tokens per rollout" for detail, mean in zip(details, means, strict=True)]
    rows = _card_row("before", first, f"{first:.3g}", details[0]) + _card_row(
        "after" if run.ended else "now", last, f"{last:.3g}", details[1], "after"
    )
    return f'<div class="card"><h3>Mean reward of sampled rollouts</h3>{rows}</div>'


def _card_row(label: str, share: float, value: str, detail: str, css: str = "", mark: str = "") -> str:
    """Label, a bar for what lies between 0 and 1, the value, and a line below."""
    track = (
        f'<div class="track"><span class="fill" style="width:{100 * share:.2f}%"></span>{mark}</div>'
        if 0 <= share <= 1
        else "<div></div>"
    )
    return (
        f'<div class="pair {css}"><span>{html.escape(label)}</span>{track}<span class="value">{html.escape(value)}'
        f'</span><span class="detail">{html.escape(detail)}</span></div>'
    )


def _tiles(run: RunRecord) -> str:
    figures = run.figures
    asked = run.header.fields.get("steps")
    tiles = [
        (f"{len(run.steps)}" + (f" of {asked}" if asked else ""), "train steps"),
        (_time(run, figures["total"]), "time"),
        (f"{sum(len(lags) for lags in figures['lags']):,}", "rollouts trained"),
        (wording.percent(figures["lane_utilization"]), "of lane time busy"),
        (wording.percent(figures["trainer_utilization"]), "of trainer time busy"),
        (f"{figures['mean_lag']:.2f} / {figures['max_lag']}", "mean / largest lag"),
    ]
    if run.unit == "s" and figures["total"]:
        tiles.insert(2, (f"{_tokens(run) / figures['total']:,.0f}", "tokens sampled per second"))
    cells = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>'
        for value, label in tiles
    )
    return f'<section class="tiles" aria-label="the run in numbers">{cells}</section>'


# ---- figures, rollouts, settings


def _objective(run: RunRecord) -> str:
    """What was trained, in the words of `objectives.describe`: a line at the margin begins a section."""
    lines = run.objective_text.splitlines()
    if not lines:
        return ""
    name, source = lines[0], lines[1].strip() if len(lines) > 1 else ""
    shown = "".join(
        f'<div style="margin-left:{_indent(line)}ch">{html.escape(line.strip())}</div>'
        if line.startswith(" ")
        else f"<h4>{html.escape(line)}</h4>"
        for line in lines[2:]
    )
    return (
        f"<details><summary>What was trained: {html.escape(name)}, its formula and what it needs</summary>"
        f'<div class="objective"><p>{html.escape(source)}</p>{shown}</div></details>'
    )


def _indent(line: str) -> int:
    """Of a section's line: the 4 spaces under its title are no indent."""
    return max(0, len(line) - len(line.lstrip()) - 4)


def _section(
    title: str,
    wanted: Sequence[Picture],
    run: RunRecord,
    plots: dict[str, Any],
    *,
    before: str = "",
    after: str = "",
) -> str:
    """The figures of one question; those with nothing to show are named in one line. Fills `plots`."""
    parts = [before]
    absent: list[str] = []
    for picture in wanted:
        drawn = picture.draw(run)
        if drawn is None:
            absent.append(picture.title.lower())
            continue
        name = f"figure-{picture.name}"
        plots[name] = drawn.to_plotly_json()
        parts.append(_figure(picture, name, drawn.layout.height, _cut_note(picture, run)))
    if absent:
        names = html.escape("; ".join(absent))
        parts.append(f'<p class="absent">Nothing to show in this run: {names}.</p>')
    parts.append(after)
    return f"<section><h2>{html.escape(title)}</h2>{''.join(parts)}</section>"


def _figure(picture: Picture, name: str, height: float, note: str) -> str:
    return (
        f"<figure><h3>{html.escape(picture.title)}</h3><figcaption>{html.escape(picture.caption)} "
        f"<b>Healthy:</b> {html.escape(picture.healthy)}{html.escape(note)}</figcaption>"
        f'<div class="plot" id="{name}" style="height:{height:g}px"></div></figure>'
    )


def _cut_note(picture: Picture, run: RunRecord) -> str:
    from headway.reports import gantt, simulated_timeline

    if picture.name == "timeline":
        note = gantt.shown_note(run)
        return f" {note}" if note else ""
    if picture.name == "simulated":
        return f" {simulated_timeline.comparison(run)}"
    num_steps = len(run.steps)
    if num_steps > MAX_POINTS:
        width = -(-num_steps // MAX_POINTS)
        return f" Each point joins {width} neighbouring steps."
    return ""


def _not_simulated(run: RunRecord) -> str:
    if not run.not_simulated:
        return ""
    return f'<p class="absent">The same run can\'t be simulated from its trace: {html.escape(run.not_simulated)}.</p>'


def _rollouts(run: RunRecord) -> str:
    if not run.rollouts:
        return '<section><h2>What it wrote</h2><p class="absent">No rollouts were kept in this run.</p></section>'
    early, late = rollout_text.early_and_late(run.rollouts)
    blocks = [("At the beginning", early), ("At the end", late)]
    shown = "".join(
        f'<h3>{title}</h3><div class="rollouts">{"".join(map(rollout_text.article, rollouts))}</div>'
        for title, rollouts in blocks
        if rollouts
    )
    return (
        "<section><h2>What it wrote</h2><p>Sampled answers, token by token. The background is the token's log-ratio: "
        "the trainer's log-prob minus the one it was sampled with; hover over a token for the number and for the "
        f"version that sampled it. {len(early) + len(late)} of {len(run.rollouts):,} kept rollouts are shown. "
        '<b class="good">Healthy:</b> white, or pale where a rollout lags.</p>'
        f"{rollout_text.legend()}{shown}</section>"
    )


def _settings(run: RunRecord) -> str:
    parts: list[str] = []
    if run.config_text:
        parts.append(
            "<details><summary>Effective configuration, each value with its origin</summary>"
            f"<pre>{html.escape(run.config_text)}</pre></details>"
        )
    if run.result:
        cells = "".join(
            f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(_plain(value))}</td></tr>"
            for name, value in run.result.items()
        )
        parts.append(f"<details><summary>Result, as in run.json</summary><table>{cells}</table></details>")
    return f"<section><h2>Settings</h2>{''.join(parts) or '<p class=absent>None were kept.</p>'}</section>"


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2000 else text[:2000] + " …"
