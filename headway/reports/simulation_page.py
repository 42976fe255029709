"""The page of a sweep: pictures of every run, and controls that choose among them.

All runs were simulated beforehand, by the scheduler; the script looks the chosen one up.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from headway.config import KEYS, Config, Resolved, last_word
from headway.reports import simulation_pictures
from headway.reports.document import document
from headway.reports.simulation_pictures import SweptRuns, numbers
from headway.reports.simulation_style import CSS, SCRIPT
from headway.reports.sweep_table import COLUMNS, COLUMNS_SAID, SweptRun
from headway.reports.wording import percent

MAX_RADIOS = 4
"""More choices than these are a list to choose from."""

Draw = Callable[[SweptRuns, SweptRun], go.Figure]


@dataclass(frozen=True)
class Picture:
    """caption: what it shows, with its denominators; css: of its place in the row."""

    name: str
    title: str
    caption: str
    draw: Draw


def _over(axis: str) -> list[Picture]:
    pictures = simulation_pictures
    return [
        Picture("throughput", "Throughput", f"Over {axis}; the ring is the chosen run.", pictures.throughput),
        Picture("lag", "Mean lag", "Over the trained rollouts, and weighed by their tokens.", pictures.lags),
        Picture("max-lag", "Largest lag", "Of any trained rollout, and what the schedule proves.", pictures.max_lag),
    ]


def _histograms() -> list[Picture]:
    pictures = simulation_pictures
    return [
        Picture("lags", "How stale the training data are", "Share of the trained rollouts.", pictures.lag_histogram),
        Picture(
            "lengths",
            "Which rollouts were trained",
            "Share of the trained rollouts, and of all as they would be if none were ended early or left out.",
            pictures.length_histogram,
        ),
    ]


def _lanes(run: SweptRun) -> Picture:
    shown = run.seen.drawing
    what = "All lanes" if len(shown.lanes) == shown.num_lanes else f"{len(shown.lanes)} of {shown.num_lanes} lanes"
    caption = (
        f"{what} and the trainer from the beginning of the run, the same time for every choice; drag to move on. "
        "Colours are the version that a rollout began with; white is a lane that waits."
    )
    return Picture("lanes", "Who was busy, and with which weights", caption, simulation_pictures.lanes)


def _early() -> Picture:
    caption = (
        "Mean length of the rollouts that each of the first train steps took. First finished, first trained means "
        "short ones first: the early batches are too short until the long ones have caught up."
    )
    return Picture("steps", "The bias of early batches", caption, simulation_pictures.step_lengths)


def write(
    path: Path, runs: Sequence[SweptRun], chosen: int, resolved: Resolved, *, replayed: Path | None = None
) -> None:
    """Write the page of a sweep. Arguments as of `page`."""
    path.write_text(page(runs, chosen, resolved, replayed=replayed), encoding="utf-8", errors="replace")


def page(runs: Sequence[SweptRun], chosen: int, resolved: Resolved, *, replayed: Path | None = None) -> str:
    """The whole document.

    chosen: the run shown at first; resolved: its configuration; replayed: the run of which all are replays.
    """
    sweep, run = SweptRuns(list(runs)), runs[chosen]
    curves, histograms, lanes, early = _over(sweep.axis_name), _histograms(), _lanes(run), _early()
    body = "\n".join(
        [
            _header(sweep, resolved, replayed),
            f'<div class="chooser">{_controls(sweep, run)}<p class="says" id="says" aria-live="polite">'
            f"{html.escape(says(sweep, run))}</p></div>",
            "<noscript><p class='note'>The pictures need JavaScript; the table below does not.</p></noscript>",
            _tiles(run),
            _section("What running ahead gives, and costs", _grid(curves, "grid")),
            _section("On the lanes", _figure(lanes)),
            _section("What is trained", _grid([*histograms], "grid two") + _figure(early)),
            _section("All runs", _table(sweep, chosen)),
            _settings(resolved),
        ]
    )
    pictures = [*curves, lanes, *histograms, early]
    figures = {"controls": _control_values(sweep), "runs": [_shown(sweep, run, pictures) for run in sweep.runs]}
    return document(_title(replayed), body, figures, SCRIPT, css=CSS, source=f"{len(sweep.runs)} simulated runs")


def _shown(sweep: SweptRuns, run: SweptRun, pictures: Sequence[Picture]) -> dict[str, Any]:
    """All that changes with the choice."""
    return {
        "says": says(sweep, run),
        "tiles": {f"tile-{column.name}": column.text(run.figures) for column in COLUMNS},
        "figures": {picture.name: picture.draw(sweep, run).to_plotly_json() for picture in pictures},
    }


# ---- in words


def says(sweep: SweptRuns, run: SweptRun) -> str:
    """The run in a sentence."""
    figures = run.figures
    choice = ", ".join(f"{last_word(key)} {value}" for key, value in run.choice.items())
    bound = figures["lag_bound"]
    proved = "there is no bound" if bound is None else f"never more than {bound}"
    return (
        f"At {choice} the lanes are busy {percent(figures['lane_utilization'])} of the time{_compared(sweep, run)}; "
        f"trained rollouts lag {_versions(figures['mean_lag'])} on average, {figures['max_lag']} at most; {proved} "
        f"({figures['why']})."
    )


def _compared(sweep: SweptRuns, run: SweptRun) -> str:
    """Its throughput beside that of the synchronous run, or of the first."""
    synchronous = [other for other in sweep.curves[sweep.others(run)] if other.figures["run_ahead"] == 0]
    base = synchronous[0] if synchronous else sweep.runs[0]
    if base is run:
        return ", which all else is compared with" if synchronous else ""
    if not base.figures["throughput"]:
        return ""
    times = f"{run.figures['throughput'] / base.figures['throughput']:.1f} times the"
    return f", {times} synchronous throughput" if synchronous else f", {times} throughput of the first run"


def _versions(lag: float) -> str:
    return f"{lag:.1f} version{'' if f'{lag:.1f}' == '1.0' else 's'}"


# ---- the parts of the page


def _title(replayed: Path | None) -> str:
    return f"{replayed.resolve().name} under other schedules" if replayed else "Simulated schedules"


def _header(sweep: SweptRuns, resolved: Resolved, replayed: Path | None) -> str:
    facts = _facts(sweep, resolved, replayed=replayed is not None)
    chips = "".join(f"<li>{html.escape(name)} <b>{html.escape(value)}</b></li>" for name, value in facts)
    what = "replays of one run, with the lengths and times of its trace" if replayed else "runs of one workload"
    return (
        f'<header><p class="what">A Headway simulation</p><h1>{html.escape(_title(replayed))}</h1><p class="lead">'
        f"{len(sweep.runs)} {what}, on virtual time, each under another schedule. Choose one:</p>"
        f'<ul class="chips">{chips}</ul></header>'
    )


_OF_A_REPLAY = ("run.steps", "generate.lanes", "schedule.batch_size", "schedule.group_size", "run.seed")
_OF_A_SIMULATION = (*_OF_A_REPLAY, "simulate.lengths", "simulate.mean_length", "simulate.train_time")


def _facts(sweep: SweptRuns, resolved: Resolved, *, replayed: bool) -> list[tuple[str, str]]:
    """The workload, and what was set of the schedule; not what is swept."""
    always = _OF_A_REPLAY if replayed else _OF_A_SIMULATION
    sections = ("schedule",) if replayed else ("schedule", "simulate", "evaluate")
    default = Config()
    changed = [
        key for key in KEYS if key.split(".")[0] in sections and _value(resolved.config, key) != _value(default, key)
    ]
    facts = [
        (_name(key), _value(resolved.config, key))
        for key in dict.fromkeys([*always, *changed])
        if key not in sweep.values
    ]
    return [(name, value) for name, value in facts if value]


def _name(key: str) -> str:
    """Its last word, with the section where that says more."""
    section, name = key.split(".")
    return (f"evaluation {name}" if section == "evaluate" else name).replace("_", " ")


def _value(config: Config, key: str) -> str:
    value = config.setting(key)
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)


def _controls(sweep: SweptRuns, run: SweptRun) -> str:
    controls = [
        _control(number, last_word(key), values, values.index(run.choice[key]))
        for number, (key, values) in enumerate(sweep.values.items())
    ]
    return f'<div class="controls" role="group" aria-label="choose a run">{"".join(controls)}</div>'


def _control(number: int, name: str, values: Sequence[str], chosen: int) -> str:
    if numbers(values) and len(values) > 2:
        return _slider(number, name, values, chosen)
    return (_radios if len(values) <= MAX_RADIOS else _list)(number, name, values, chosen)


def _slider(number: int, name: str, values: Sequence[str], chosen: int) -> str:
    ident, value = f"control-{number}", html.escape(values[chosen])
    return (
        f'<div class="control slider"><label for="{ident}">{html.escape(name)}</label>'
        f'<input type="range" id="{ident}" data-control="{number}" min="0" max="{len(values) - 1}" step="1" '
        f'value="{chosen}" aria-valuetext="{value}" autocomplete="off">'
        f'<output id="{ident}-value" for="{ident}">{value}</output></div>'
    )


def _radios(number: int, name: str, values: Sequence[str], chosen: int) -> str:
    options = "".join(
        f'<label><input type="radio" name="control-{number}" data-control="{number}" value="{at}" autocomplete="off"'
        f"{' checked' * (at == chosen)}>{html.escape(value)}</label>"
        for at, value in enumerate(values)
    )
    legend = f"<legend>{html.escape(name)}</legend>"
    return f'<fieldset class="control">{legend}<span class="options">{options}</span></fieldset>'


def _list(number: int, name: str, values: Sequence[str], chosen: int) -> str:
    options = "".join(
        f'<option value="{at}"{" selected" * (at == chosen)}>{html.escape(value)}</option>'
        for at, value in enumerate(values)
    )
    return (
        f'<div class="control"><label for="control-{number}">{html.escape(name)}</label>'
        f'<select id="control-{number}" data-control="{number}" autocomplete="off">{options}</select></div>'
    )


def _control_values(sweep: SweptRuns) -> list[dict[str, Any]]:
    return [{"name": last_word(key), "values": list(values)} for key, values in sweep.values.items()]


def _tiles(run: SweptRun) -> str:
    cells = "".join(
        f'<div class="tile"><b id="tile-{column.name}">{html.escape(column.text(run.figures))}</b>'
        f"<span>{html.escape(column.title)}</span></div>"
        for column in COLUMNS
    )
    return f'<section class="tiles" aria-label="the chosen run in numbers">{cells}</section>'


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{inner}</section>"


def _grid(pictures: Sequence[Picture], css: str) -> str:
    return f'<div class="{css}">{"".join(_figure(picture) for picture in pictures)}</div>'


def _figure(picture: Picture) -> str:
    return (
        f"<figure><h3>{html.escape(picture.title)}</h3><figcaption>{html.escape(picture.caption)}</figcaption>"
        f'<div class="plot" id="{picture.name}"></div></figure>'
    )


def _table(sweep: SweptRuns, chosen: int) -> str:
    titles = [*(last_word(key) for key in sweep.values), *(column.title for column in COLUMNS)]
    head = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in titles)
    rows = "".join(_row(number, run, number == chosen) for number, run in enumerate(sweep.runs))
    return (
        f'<p class="over">{html.escape(COLUMNS_SAID[0].upper() + COLUMNS_SAID[1:])}.</p><div class="wide" tabindex="0" '
        f'role="region" aria-label="all runs"><table class="numbers"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(number: int, run: SweptRun, chosen: bool) -> str:
    cells = [*run.choice.values(), *(column.text(run.figures) for column in COLUMNS)]
    marked = ' class="chosen" aria-current="true"' if chosen else ""
    return f'<tr data-run="{number}"{marked}>{"".join(f"<td>{html.escape(cell)}</td>" for cell in cells)}</tr>'


def _settings(resolved: Resolved) -> str:
    return (
        "<details><summary>Effective configuration of the run shown at first, each value with its origin</summary>"
        f"<pre>{html.escape(resolved.to_toml())}</pre></details>"
    )
