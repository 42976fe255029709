"""The timeline as text: four columns per unit of time."""

from itertools import pairwise

import pytest

from headway.reports.summary import Span, Timeline
from headway.reports.text_timeline import render
from headway.types import UserError


def span(name, began_s, ended_s):
    return Span(name, began_s, ended_s, version=0)


def lane(*spans, total_s=None):
    """How one lane is drawn, without its label."""
    total_s = max((each.ended_s for each in spans), default=0.0) if total_s is None else total_s
    return render(Timeline([list(spans)], [], total_s)).splitlines()[0].removeprefix("lane A   ")


def test_a_worked_timeline():
    lanes = [[span("r0", 0, 1), span("r2", 1.5, 3)], [span("r1", 0, 2.5)]]
    assert render(Timeline(lanes, [span("s0", 2, 3)], 3.0)).splitlines() == [
        "lane A   [r0]..[-r2-]",
        "lane B   [---r1---]..",
        "trainer  ........[s0]",
    ]


@pytest.mark.parametrize(
    ("name", "length", "drawn"),
    [
        ("r1", 1, "[r1]"),
        ("r1", 1.25, "[-r1]"),
        ("r1", 1.5, "[-r1-]"),
        ("r1", 3, "[----r1----]"),
        ("r10", 1.25, "[r10]"),
        ("r10", 1.5, "[r10-]"),
        ("r10", 1, "[--]"),  # no room for its name
        ("r1", 0.75, "[-]"),
        ("r1", 0.5, "[]"),
        ("r1", 0.25, "|"),
        ("r1", 0.1, ""),
    ],
)
def test_labels_are_centred_padded_and_left_out(name, length, drawn):
    assert lane(span(name, 0, length)) == drawn


@pytest.mark.parametrize("length", [quarter / 4 for quarter in range(2, 60)])
def test_a_span_fills_its_columns(length):
    drawn = lane(span("r7", 1, 1 + length), total_s=20)
    assert drawn == "...." + drawn[4 : 4 + round(4 * length)] + "." * (76 - round(4 * length))
    assert drawn[4] == "["
    assert drawn[3 + round(4 * length)] == "]"
    assert set(drawn[5 : 3 + round(4 * length)]) <= set("-r7")


def test_neighbours_share_a_rounded_edge():
    """0.3 units are 1.2 columns and 0.7 are 2.8: no gap, no overlap, and every row is as long as the run."""
    ends = [0.0, 0.3, 0.7, 1.45, 1.5, 2.9]
    spans = [span(f"r{number}", *edges) for number, edges in enumerate(pairwise(ends))]
    assert lane(*spans) == "|[][-][-r4-]"


def test_an_idle_lane_and_an_idle_trainer():
    assert render(Timeline([[]], [], 2.0)).splitlines() == ["lane A   ........", "trainer  ........"]


def test_many_lanes_are_named_like_columns_of_a_sheet():
    rows = render(Timeline([[span("r0", 0, 1)] for _ in range(704)], [span("s0", 0, 1)], 1.0)).splitlines()
    names = [row.removesuffix("[r0]").split()[1] for row in rows[:-1]]
    some = [names[number] for number in (0, 25, 26, 27, 51, 52, 701, 702)]
    assert some == ["A", "Z", "AA", "AB", "AZ", "BA", "ZZ", "AAA"]
    assert len(set(names)) == 704
    assert {len(row) for row in rows} == {len("lane AAA  [r0]")}
    assert rows[-1] == "trainer   [s0]"


def test_a_run_of_a_hundred_units_is_drawn_and_a_longer_one_is_not():
    assert len(lane(span("r0", 0, 100))) == 400
    with pytest.raises(UserError, match=r"at most 100 units of time and this one takes 100.25: give fewer --steps"):
        lane(span("r0", 0, 100.25))


def test_the_ends_of_a_box_say_how_it_goes_on():
    """A pause and its sequel, an interruption, and what was thrown away."""
    spans = [
        Span("r0", 0, 1, 0, ended_by="paused"),
        Span("r1", 1, 2, 0, ended_by="generated", interrupted=True),
        Span("r0", 2, 3, 0, ended_by="generated", resumed=True),
        Span("r2", 3, 4, 0, ended_by="aborted"),
    ]
    assert lane(*spans) == "[r0>[r1!<r0][r2x"
