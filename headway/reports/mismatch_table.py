"""What the probe has measured: its figures, the table for people, the last line, and JSON."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headway.reports.trust_table import figure
from headway.reports.wording import percent

QUANTILES = {"min": 0.0, "q01": 0.01, "q05": 0.05, "q50": 0.5, "q95": 0.95, "q99": 0.99, "max": 1.0}

LENGTHS = (100, 1_000, 10_000)
"""Tokens of answers whose weights are told."""

ROUNDING = 2.0**-16
"""A relative difference that the order of sums in float32 does not explain: 128 times the spacing of its numbers."""

HARMLESS = 0.01
"""A weight of 1,000 tokens that is off by less than this is no cause of anything."""


@dataclass(frozen=True)
class Figures:
    """Of one source, over the tokens of all rollouts; w = pi / mu is the trainer's probability over the engine's.

    kl_k1, kl_k3: KL(mu, pi) per token, and their standard errors; ratio: quantiles of w, by the names of `QUANTILES`;
    unequal_share: of tokens whose two log-probs differ in any bit. log_ratio_mean, log_ratio_deviation: of log w per
    token. spread: how far the log-ratios of whole rollouts lie apart, over what independent tokens would give; None
    where nothing differs, or there is but one.
    """

    num_tokens: int
    num_rollouts: int
    kl_k1: float
    kl_k1_error: float
    kl_k3: float
    kl_k3_error: float
    ratio: Mapping[str, float]
    unequal_share: float
    log_ratio_mean: float
    log_ratio_deviation: float
    spread: float | None

    @property
    def kl(self) -> float:
        """The steadier estimate of KL(mu, pi) per token: k3, or k1 where the two sides differ in what is possible."""
        return 0.0 - self.log_ratio_mean

    def over(self, num_tokens: int) -> Compounded:
        """If log-ratios of tokens are independent: means add up, and so do variances."""
        return Compounded(num_tokens * self.log_ratio_mean, math.sqrt(num_tokens) * self.log_ratio_deviation)

    @property
    def kl_error(self) -> float:
        """The standard error of `kl`."""
        return self.kl_k3_error if self.log_ratio_mean == -self.kl_k3 else self.kl_k1_error

    @property
    def is_harmless(self) -> bool:
        compounded = self.over(1_000)
        return max(abs(compounded.low - 1), abs(compounded.high - 1)) < HARMLESS


@dataclass(frozen=True)
class Compounded:
    """The log-ratio of a whole answer: its mean and standard deviation over answers."""

    mean: float
    deviation: float

    @property
    def low(self) -> float:
        """The answer's weight, one standard deviation below the mean of its log."""
        return _exp(self.mean - self.deviation)

    @property
    def high(self) -> float:
        return _exp(self.mean + self.deviation)


def _exp(value: float) -> float:
    return math.exp(max(-700.0, min(value, 700.0)))


@dataclass(frozen=True)
class Stage:
    """One stage of the model's forward pass, of the same tokens on both sides.

    max_abs: the largest difference of any number in it; relative: that of a token's whole state, to the trainer's.
    """

    name: str
    max_abs: float
    relative: float


@dataclass(frozen=True)
class Source:
    """One thing that an engine does otherwise than the trainer, and what comes of it.

    detail: how it was tried; given: the user's own engine does it; cure: what takes it away; why_not: it could not be
    measured, and there are no figures.
    """

    name: str
    title: str
    detail: str
    given: bool
    cure: str
    figures: Figures | None = None
    stages: Sequence[Stage] = ()
    why_not: str = ""

    @property
    def parts_at(self) -> str | None:
        """The first stage that differs in any bit."""
        return next((stage.name for stage in self.stages if stage.max_abs > 0), None)

    @property
    def beyond_rounding(self) -> str | None:
        """The first stage that differs by more than float32 rounds."""
        return next((stage.name for stage in self.stages if stage.relative > ROUNDING), None)

    def to_json(self) -> dict[str, Any]:
        facts = {name: value for name, value in asdict(self).items() if name not in ("figures", "stages")}
        facts |= {"parts_at": self.parts_at, "beyond_rounding": self.beyond_rounding}
        facts["stages"] = [asdict(stage) for stage in self.stages]
        facts["figures"] = None if self.figures is None else _figures_json(self.figures)
        return facts


def _figures_json(figures: Figures) -> dict[str, Any]:
    weights = {}
    for num_tokens in LENGTHS:
        compounded = figures.over(num_tokens)
        weights[str(num_tokens)] = {
            "log_ratio_mean": compounded.mean,
            "log_ratio_deviation": compounded.deviation,
            "weight_low": compounded.low,
            "weight_high": compounded.high,
        }
    return {**asdict(figures), "over_tokens": weights}


CONTROL, ALL_GIVEN = "control", "given"
"""Names of two sources that are none: nothing done otherwise, and all that the user's engine does at once."""


@dataclass(frozen=True)
class Probe:
    """What was asked, in words, and the sources in the order in which they were tried."""

    asked: str
    sources: Sequence[Source]

    def ranked(self, *, given: bool) -> list[Source]:
        """Measured sources with the largest divergence first, of those the user's engine has, or of the others."""
        measured = [one for one in self.sources if one.figures and one.name not in (CONTROL, ALL_GIVEN)]
        chosen = [one for one in measured if one.given == given]
        return sorted(chosen, key=lambda one: _figures(one).kl, reverse=True)

    def notes(self) -> list[str]:
        """What else must be said: of what could not be measured, of a control that is not clean, of few tokens."""
        control = next((one.figures for one in self.sources if one.name == CONTROL), None)
        said = [f"{one.title}: not measured, {one.why_not}" for one in self.sources if one.why_not]
        if control and control.unequal_share:
            said.append(
                "with this model on this machine no two passes have the same bits: "
                f"KL {figure(control.kl)} is in every row"
            )
        if vague := [one for one in self.sources if one.figures and _is_vague(one.figures)]:
            fewest = min(vague, key=lambda one: _figures(one).num_tokens)
            said.append(
                f"half of the KL or more may be chance in {len(vague)} of the rows, {_named(fewest)} with "
                f"{_figures(fewest).num_tokens} tokens among them: give a larger --batch or --new-tokens"
            )
        return said

    def to_json(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "verdict": self.verdict(),
            "sources": [source.to_json() for source in self.sources],
        }

    def verdict(self) -> str:
        """The largest source in plain words, and what cures it."""
        said = []
        given, others = self.ranked(given=True), self.ranked(given=False)
        matters = bool(given) and not _figures(given[0]).is_harmless
        if matters:
            said.append(f"Largest source: {_told(given[0])}. Cure: {given[0].cure}.")
        elif given:
            said.append(f"Nothing that your engine does matters: the largest source is {_told(given[0])}.")
        else:
            said.append("Your engine does nothing otherwise than the trainer.")
        if not matters and others and not _figures(others[0]).is_harmless:
            said.append(f"What would matter most, if it did it: {_told(others[0])}. Cure: {others[0].cure}.")
        return " ".join(said)


def _is_vague(figures: Figures) -> bool:
    """A divergence that might matter, and half of it or more is chance; one token says nothing of chance."""
    return not figures.is_harmless and (figures.num_tokens == 1 or 2 * figures.kl_error > abs(figures.kl))


def _figures(source: Source) -> Figures:
    assert source.figures is not None
    return source.figures


def _told(source: Source) -> str:
    figures = _figures(source)
    weights = _weights(figures.over(1_000))
    return f"{_named(source)}, KL {figure(figures.kl)} per token, which over 1,000 tokens is a weight of {weights}"


def _weights(compounded: Compounded) -> str:
    """
    >>> _weights(Compounded(-0.5, 1.0)), _weights(Compounded(-5e-9, 1e-4)), _weights(Compounded(0.0, 0.0))
    ('0.223 to 1.65', '1 ± 1e-4', '1')
    >>> _weights(Compounded(-5e-11, 0.0))  # of a single token
    '1 ± 5e-11'
    """
    if compounded.deviation == 0 and compounded.mean == 0:
        return "1"
    if max(abs(compounded.mean), compounded.deviation) < 1e-3:
        return f"1 ± {_short(compounded.deviation or abs(compounded.mean))}"
    return f"{_weight(compounded.low)} to {_weight(compounded.high)}"


def _short(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


def _weight(weight: float) -> str:
    """
    >>> [_weight(weight) for weight in (0.93434, 31.4159, 3.2e-9, 1e300)]
    ['0.934', '31.4', '3.2e-9', '1.0e+300']
    """
    return f"{weight:.3g}" if 1e-3 <= weight < 1e3 else f"{weight:.1e}".replace("e-0", "e-")


def show(probe: Probe, stream: TextIO) -> None:
    """Three tables over the same sources, what each was tried with, and the verdict."""
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else FILE_COLUMNS)
    console.print(probe.asked)
    for title, columns in TABLES:
        console.print()
        console.print(_table(title, columns, probe.sources))
    for words in probe.notes():
        console.print(words, style="dim")
    console.print(f"\n{SAID}", style="dim")
    console.print(f"\n{probe.verdict()}", style="bold")


FILE_COLUMNS = 120
"""Of the tables where nobody's terminal says it."""

SAID = (
    "*: your engine does it; the others are what it would bring. Each row does one thing otherwise than the trainer, "
    "and all else alike. KL: of the engine's from the trainer's distribution, per token; k1 estimates it with more "
    "noise. not equal: tokens whose two log-probs differ in any bit; parts at: the first stage of the model in which "
    "anything differs; clearly at: by more than float32 rounds. ratio: the trainer's probability of a token over the "
    "engine's; weight: that of a whole answer, one standard deviation below and above the mean of its log, if its "
    "tokens are independent; spread: how far whole answers lay apart, over what independent tokens give"
)


def _ratio(name: str) -> Callable[[Source], str]:
    return lambda source: _near_one(_figures(source).ratio[name])


def _near_one(ratio: float) -> str:
    """
    >>> _near_one(1.0), _near_one(0.99999981), _near_one(1.0312), _near_one(37.2)
    ('1', '1-1.9e-7', '1.031', '37.2')
    """
    off = ratio - 1
    if off == 0:
        return "1"
    if abs(off) < 1e-3:
        return f"1{'+' if off > 0 else '-'}{abs(off):.1e}".replace("e-0", "e-")
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.3g}"


def _over(num_tokens: int) -> Callable[[Source], str]:
    return lambda source: _weights(_figures(source).over(num_tokens))


Column = tuple[str, Callable[[Source], str]]

TABLES: tuple[tuple[str, tuple[Column, ...]], ...] = (
    (
        "how much, and where",
        (
            ("tokens", lambda source: str(_figures(source).num_tokens)),
            ("KL", lambda source: figure(_figures(source).kl)),
            ("k1", lambda source: figure(_figures(source).kl_k1)),
            ("k3", lambda source: figure(_figures(source).kl_k3)),
            ("not equal", lambda source: percent(_figures(source).unequal_share)),
            ("parts at", lambda source: source.parts_at or "-"),
            ("clearly at", lambda source: source.beyond_rounding or "-"),
        ),
    ),
    ("ratio of a token", tuple((share, _ratio(name)) for name, share in {
        "q01": "1 %", "q05": "5 %", "q50": "50 %", "q95": "95 %", "q99": "99 %", "max": "max",
    }.items())),
    (
        "weight of an answer",
        (
            *((f"{num_tokens:,} tokens", _over(num_tokens)) for num_tokens in LENGTHS),
            ("spread", lambda source: "-" if (spread := _figures(source).spread) is None else f"{spread:.2f}"),
        ),
    ),
)  # fmt: skip


def _table(title: str, columns: Sequence[Column], sources: Sequence[Source]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(title)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for source in sources:
        if source.figures is not None:
            table.add_row(label(source), *(say(source) for _, say in columns))
    return table


def label(source: Source) -> str:
    """With a star for what the user's own engine does."""
    return f"{'* ' if source.given else '  '}{_named(source)}"


def _named(source: Source) -> str:
    return f"{source.title} ({source.detail})" if source.detail else source.title


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """On standard error, what is being measured: a live line, or plain ones where nobody can look at one.

    -> to be called as something begins: what it is, how many things came before it, and of how many.
    """
    if not sys.stderr.isatty():
        yield lambda what, done, total: print(what, file=sys.stderr, flush=True)
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as line:
        task = line.add_task("", total=None)
        yield lambda what, done, total: line.update(task, description=what, completed=done, total=total)
