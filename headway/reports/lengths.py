"""Length bias: how long the rollouts are that are trained, beside those that were started.

Every rule that lets some rollouts overtake others, or ends them, acts on the long ones. `finished` trains the short
ones first: the batches of the first few steps are too short, and once the long ones have caught up the bias is gone;
dropping them, or ending the run, makes it permanent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from headway.reports.fates import Life

KINDS = ("started", "trained", "dropped", "filtered", "interrupted", "aborted")
"""Whose mean length is measured. An interrupted rollout is trained, or whatever else becomes of it, as well."""

Row = dict[str, float | None]


def mean(lives: Iterable[Life]) -> float | None:
    """Mean length in tokens (in the lane model, units); None of nobody."""
    tokens = [life.tokens for life in lives]
    return fmean(tokens) if tokens else None


def trained(lives: Iterable[Life], *, after_step: int = 0) -> Iterator[Life]:
    """Those that the train steps after `after_step` took."""
    return (life for life in lives if life.fate == "trained" and (life.fate_in or 0) > after_step)


def started(lives: Iterable[Life], *, after_s: float = 0.0) -> Iterator[Life]:
    """Those whose length became final after this moment, whatever became of them.

    One that was thrown away counts with what it had come to, unless another answers in its place.
    """
    return (life for life in lives if life.has_length and (life.ended_s or 0.0) >= after_s)


def cohorts(lives: Sequence[Life]) -> list[Row]:
    """A row per train step (`version`, from 1 on): the mean length of each of KINDS, and as `KIND_so_far` that of all
    steps up to it; None where there is none.

    started: the rollouts that started between the end of the step before and the end of this one, of those that have
    ended; trained: those that the step took; the others: those to which it happened meanwhile.
    """
    of_step: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for life in lives:
        for kind, step in _memberships(life):
            of_step[step][kind].append(life.tokens)
    last = max((life.fate_in or 0 for life in lives if life.fate == "trained"), default=0)
    totals: dict[str, tuple[int, float]] = dict.fromkeys(KINDS, (0, 0.0))
    rows: list[Row] = []
    for step in range(1, last + 1):
        row: Row = {"version": step}
        for kind in KINDS:
            lengths = of_step[step][kind]
            num, tokens = totals[kind][0] + len(lengths), totals[kind][1] + sum(lengths)
            totals[kind] = num, tokens
            row[kind] = fmean(lengths) if lengths else None
            row[f"{kind}_so_far"] = tokens / num if num else None
        rows.append(row)
    return rows


def _memberships(life: Life) -> Iterator[tuple[str, int]]:
    """In which cohorts a rollout is counted: (kind, train step)."""
    if life.evaluation or life.fate == "killed":
        return
    if life.has_length:
        yield "started", life.started_in
    if life.finish == "interrupted" and life.ended_in is not None:
        yield "interrupted", life.ended_in
    if life.fate in KINDS and life.fate_in is not None:
        yield life.fate, life.fate_in


def by_fate(lives: Iterable[Life]) -> dict[str, list[float]]:
    """The lengths of all that have ended, by what became of them; an interrupted one only as that."""
    found: dict[str, list[float]] = defaultdict(list)
    for life in lives:
        if life.has_length:
            found["interrupted" if life.finish == "interrupted" else life.fate].append(life.tokens)
    return dict(found)
