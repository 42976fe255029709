"""What fits of learning curves say, in the terminal: a column for each, then what isn't determined and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table

from headway.scaling.amount import figure
from headway.scaling.result import PARAMETERS, Comparison, Estimate, Fit

FILE_COLUMNS = 120
"""Of the table where nobody's terminal says it."""

COMPUTES = ("midpoint",)
"""Parameters that are amounts of compute."""

SAID = (
    "R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B). [ ]: 95 % intervals of these runs' curves, if they are sigmoids; "
    "another seed may differ by more (ScaleRL reports about 0.02 in A). (2x): twice the largest compute fitted"
)


AXES = {
    "trained_tokens": "tokens trained so far; --x seconds or steps count otherwise",
    "seconds": "since the run began, without what resumes lost; --x trained_tokens or steps count otherwise",
    "steps": "train steps; --x trained_tokens or seconds count otherwise",
    "greedy_accuracy": "greedy answers to held-out prompts",
    "reward_mean": "sampled answers to the prompts that are trained, by the weights that sampled them",
}
"""What the usual axes of a run are."""


def show(fits: Sequence[Fit], comparisons: Sequence[Comparison], stream: TextIO) -> None:
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else FILE_COLUMNS)
    console.print(axes(fits[0]))
    console.print(_table(fits))
    for words in (*whys(fits), *held_back(fits)):
        console.print(words)
    for words in (*notes(fits), SAID):
        console.print(words, style="dim")
    for words in compared(comparisons):
        console.print(words, style="bold")


def axes(fit: Fit) -> str:
    """What is fitted over what."""
    y, x = (f"{name} ({AXES[name]})" if name in AXES else name for name in (fit.y, fit.x))
    return f"{y} over {x}"


ROWS = {
    "points": lambda fit: _points(fit),
    "up to": lambda fit: figure(fit.reaches),
    **{
        f"{name} {letter}": lambda fit, name=name: estimate(fit.estimate(name), compute=name in COMPUTES)
        for name, letter in PARAMETERS.items()
    },
    "noise of a point": lambda fit: f"{fit.noise:.2g}",
}
"""Of the table."""


def rows(fits: Sequence[Fit]) -> list[list[str]]:
    """A title, and a word for each fit."""
    found = [[title, *(say(fit) for fit in fits)] for title, say in ROWS.items()]
    for number in range(max(len(fit.extrapolations) for fit in fits)):
        found.append([_foretold_title(fits, number), *(_foretold(fit, number) for fit in fits)])
    return found


def _foretold_title(fits: Sequence[Fit], number: int) -> str:
    """With the compute, where it is that of all."""
    computes = {fit.extrapolations[number].compute for fit in fits}
    return f"at {figure(computes.pop())}" if len(computes) == 1 else "at"


def _foretold(fit: Fit, number: int) -> str:
    one = fit.extrapolations[number]
    return f"{estimate(one.reward)} ({one.times:.2g}x)"


def _points(fit: Fit) -> str:
    others = [(fit.num("early"), "early left out"), (fit.num("later"), "held back")]
    return ", ".join([str(fit.num("fitted")), *(f"{num} {what}" for num, what in others if num)])


def estimate(one: Estimate, *, compute: bool = False) -> str:
    """
    >>> estimate(Estimate(0.6123, 0.598, 0.6312)), estimate(Estimate(2542.0, 2301.0, 2803.4), compute=True)
    ('0.612 [0.598, 0.631]', '2,542 [2,301, 2,803]')
    >>> estimate(Estimate(None, 0.55, None, "no plateau in sight")), estimate(Estimate(0.25, 0.25, 0.25, held=True))
    ('not determined [0.550, ...]', '0.250 (given)')
    """
    say = figure if compute else "{:.3f}".format
    low, high = ("..." if end is None else say(end) for end in (one.low, one.high))
    if one.held and one.value is not None:
        return f"{say(one.value)} (given)"
    return f"{'not determined' if one.value is None else say(one.value)} [{low}, {high}]"


def _table(fits: Sequence[Fit]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for fit in fits:
        table.add_column(fit.name, justify="left", overflow="fold")
    for row in rows(fits):
        table.add_row(*row)
    return table


def whys(fits: Sequence[Fit]) -> list[str]:
    """What the points don't determine, and why; parameters that share a reason are named together."""
    said: list[str] = []
    for fit in fits:
        reasons: dict[str, list[str]] = {}
        for name in PARAMETERS:
            one = fit.estimate(name)
            if one.value is None:
                reasons.setdefault(one.why, []).append(name)
        for one in fit.extrapolations:
            if one.reward.value is None:
                reasons.setdefault(one.reward.why, []).append(f"reward at {figure(one.compute)}")
        said += [f"{fit.name}: {_listed(names)} not determined: {why}" for why, names in reasons.items()]
    return said


def _listed(names: Sequence[str]) -> str:
    """
    >>> _listed(["asymptote", "midpoint", "start"])
    'asymptote, midpoint and start'
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def held_back(fits: Sequence[Fit]) -> list[str]:
    """How the extrapolations came out."""
    return [
        f"{fit.name}: of {one.num} points held back, {one.num_inside} came out within their 95 % interval; on average "
        f"they lie {abs(one.mean_miss):.3f} {'above' if one.mean_miss > 0 else 'below'} the curve (root mean square "
        f"{one.rms_miss:.3f})"
        for fit in fits
        if (one := fit.held_back)
    ]


def notes(fits: Sequence[Fit]) -> list[str]:
    return [f"{fit.name}: {note}" for fit in fits for note in fit.notes]


def compared(comparisons: Sequence[Comparison]) -> list[str]:
    return [difference.verdict for comparison in comparisons for difference in comparison.differences]


def told(comparisons: Sequence[Comparison]) -> list[str]:
    """What the points can tell apart."""
    return [one.verdict for comparison in comparisons for one in comparison.differences if one.told]
