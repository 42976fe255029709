"""The figures of a sweep, one row per run: in the terminal, in a file, as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from headway.config import last_word
from headway.reports.wording import percent


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep.

    choice: the swept keys and their values, as on the command line; figures: as `summary.summarise`, without what it
    says of single steps, and speedup (its throughput over that of the first run), true_length (the mean length that
    the started rollouts have if nobody ends them early), length_ratio (trained_length over that) and why (what holds
    lag_bound, in words); seen: what a page draws of it.
    """

    choice: Mapping[str, str]
    figures: Mapping[str, Any]
    seen: Any = None

    def to_json(self) -> dict[str, Any]:
        return {**self.choice, **self.figures}


@dataclass(frozen=True)
class Column:
    """name: the figure's; title: of the column; say: the figure as people read it."""

    name: str
    title: str
    say: Callable[[Any], str]

    def text(self, figures: Mapping[str, Any]) -> str:
        value = figures[self.name]
        return self.say(value) if value is not None else "none"


def _times(value: float) -> str:
    return f"{value:.2f}x"


def _three(value: float) -> str:
    return f"{value:.3g}"


COLUMNS = (
    Column("throughput", "throughput", "{:.4g}".format),
    Column("speedup", "speed-up", _times),
    Column("lane_utilization", "lanes busy", percent),
    Column("trainer_utilization", "trainer busy", percent),
    Column("mean_lag", "mean lag", _three),
    Column("token_lag", "token lag", _three),
    Column("max_lag", "max lag", str),
    Column("over_run_ahead", "beyond run_ahead", percent),
    Column("length_ratio", "trained/true length", "{:.3f}".format),
    Column("lag_bound", "lag bound", str),
)
"""Of the table; in COLUMNS_SAID what their titles mean."""

COLUMNS_SAID = (
    "throughput: trained rollouts per unit of time; speed-up: against the first row; token lag: mean lag over the "
    "trained tokens; beyond run_ahead: trained rollouts with a larger lag; trained/true length: mean length of what "
    "was trained over that of all rollouts as they would be if none were ended early or left out"
)


def show(runs: Sequence[SweptRun], stream: TextIO) -> None:
    """Print a table for people, where they look and it fits; else one for programs: six figures, no ornaments."""
    console = Console(file=stream, highlight=False)
    table = _table(runs)
    if stream.isatty() and table.__rich_measure__(console, console.options.update(width=1000)).maximum <= console.width:
        console.print(table)
        console.print(COLUMNS_SAID, style="dim")
    else:
        print(plain(runs), file=stream)


def _table(runs: Sequence[SweptRun]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for key in runs[0].choice:
        table.add_column(last_word(key), justify="right", no_wrap=True, style="bold")
    for column in COLUMNS:
        table.add_column(column.title.replace(" ", "\n"), justify="right", no_wrap=True, vertical="bottom")
    for run in runs:
        table.add_row(*run.choice.values(), *(column.text(run.figures) for column in COLUMNS))
    return table


def plain(runs: Sequence[SweptRun]) -> str:
    """Columns of words without spaces, named as in the JSON; what is not there is `none`."""
    names = [last_word(key) for key in runs[0].choice] + [column.name for column in COLUMNS]
    rows = [names, *([*run.choice.values(), *(_exact(run.figures[column.name]) for column in COLUMNS)] for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _exact(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


@contextmanager
def progress(num_runs: int) -> Iterator[Callable[[], None]]:
    """A line on standard error while they are simulated, where somebody can see it -> to be called as each ends."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as line:
        task = line.add_task("", total=num_runs)
        yield lambda: line.advance(task)
