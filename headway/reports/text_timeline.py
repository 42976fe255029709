"""The timeline of a small run as text: four columns per unit of time, one row per lane, one for the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from headway.reports.summary import Span, Timeline
from headway.types import UserError

COLUMNS_PER_UNIT = 4
MAX_COLUMNS = 400


def render(lines: Timeline) -> str:
    """A span [a, b) fills columns 4a to 4b-1 as `[` label `]`, its label centred and padded with `-`; idle is `.`.

    A rollout that goes on from an earlier span begins with `<`; one that pauses ends with `>`, one that is thrown away
    or lost with `x`, one that is interrupted for good with `!`. Ends are rounded to whole columns. Raises UserError
    when the run is too long to draw.
    """
    num_columns = round(COLUMNS_PER_UNIT * lines.total_s)
    if num_columns > MAX_COLUMNS:
        raise UserError(
            f"--timeline draws runs of at most {MAX_COLUMNS // COLUMNS_PER_UNIT} units of time and this one takes "
            f"{lines.total_s:g}: give fewer --steps, or leave --timeline out"
        )
    width = max(len("trainer"), len(f"lane {_lane_name(len(lines.lanes) - 1)}"))
    rows = [(f"lane {_lane_name(number)}", spans) for number, spans in enumerate(lines.lanes)]
    rows.append(("trainer", lines.trainer))
    drawn = [f"{label:<{width}}  {_row(spans, num_columns)}" for label, spans in rows]
    return "\n".join([*drawn, *_key(lines)])


def _lane_name(number: int) -> str:
    """A, B ... Z, AA, AB ..."""
    name = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        name = chr(ord("A") + letter) + name
    return name


def _row(spans: Sequence[Span], num_columns: int) -> str:
    row = ["."] * num_columns
    for span in spans:
        first, last = round(COLUMNS_PER_UNIT * span.began_s), round(COLUMNS_PER_UNIT * span.ended_s)
        row[first:last] = _box(span, last - first)
    return "".join(row)


def _box(span: Span, width: int) -> str:
    if width < 2:
        return "|" * width
    label, inner = span.name, width - 2
    middle = label.center(inner, "-") if len(label) <= inner else "-" * inner
    return ("<" if span.resumed else "[") + middle + _end(span)


def _end(span: Span) -> str:
    if span.ended_by == "paused":
        return ">"
    if span.ended_by in ("aborted", "lost"):
        return "x"
    return "!" if span.interrupted else "]"


_MEANINGS = {"<": "goes on", ">": "pauses", "x": "thrown away or lost", "!": "interrupted for good"}


def _key(lines: Timeline) -> list[str]:
    """What the unusual ends of boxes mean, where there are any."""
    spans = [span for lane in lines.lanes for span in lane]
    found = {_end(span) for span in spans} | {"<" for span in spans if span.resumed}
    said = [f"{mark} {meaning}" for mark, meaning in _MEANINGS.items() if mark in found]
    return [", ".join(said)] if said else []
