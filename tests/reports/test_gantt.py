"""What the timeline draws, and what it leaves out."""

from __future__ import annotations

from headway.reports import gantt
from headway.reports.record import read_run
from headway.reports.summary import Span, Timeline, timeline


def _bars(figure) -> dict[str, list[tuple[float, float, float]]]:
    """(row, began, duration) of each bar, by the trace's name."""
    return {
        trace.name: list(zip(trace.y, trace.base, trace.x, strict=True)) for trace in figure.data if trace.type == "bar"
    }


def test_the_hand_sized_example_bar_by_bar(simulated, write_run) -> None:
    figure = gantt.gantt(read_run(write_run(simulated())))
    bars = _bars(figure)
    assert bars["0"] == [(0, 0.0, 1.0), (0, 1.0, 1.0), (0, 2.0, 1.0), (1, 0.0, 3.0)]
    assert bars["1"] == [(0, 3.0, 1.0), (1, 3.0, 1.0)]
    assert bars["train step, with the version it made"] == [(2.6, 2.0, 1.0), (2.6, 3.0, 1.0)]
    assert list(figure.layout.xaxis.range) == [0.0, 4.0]


def test_a_long_run_is_cut_to_its_beginning_and_its_end(simulated) -> None:
    events = simulated("--lanes", "40", "--batch-size", "64", "--steps", "50", "--sync-time", "0.1")
    lines = timeline(events)
    shown = gantt.drawing(lines, max_bars=400)
    assert len(shown.lanes) == gantt.MAX_LANES
    assert 300 < shown.num_bars <= 400
    first, last = shown.windows
    assert first.began_s == 0.0
    assert last.ended_s == lines.total_s
    whole = [span for lane in lines.lanes[: gantt.MAX_LANES] for span in lane if span.began_s < first.ended_s]
    drawn = [span for lane in shown.lanes for span in lane if span.began_s < first.ended_s]
    assert drawn == whole  # contiguous: no bar of the window is missing
    all_bars = sum(map(len, lines.lanes[: gantt.MAX_LANES])) + len(lines.trainer) + len(lines.syncs)
    assert shown.num_left_out == all_bars - shown.num_bars


def test_the_page_says_what_is_cut(simulated, write_run, monkeypatch) -> None:
    words = ("--lanes", "40", "--batch-size", "64", "--steps", "20")
    run = read_run(write_run(simulated(*words), words=words))
    monkeypatch.setattr(gantt, "MAX_BARS", 400)
    note = gantt.shown_note(run)
    assert "The first 32 of 40 lanes are shown." in note
    assert "between are left out" in note
    figure = gantt.gantt(run)
    assert figure is not None
    assert sum(len(bars) for bars in _bars(figure).values()) <= 400


def test_unfinished_bars_and_resumes_are_marked(resumed, write_run) -> None:
    figure = gantt.gantt(read_run(write_run(resumed)))
    assert figure is not None
    assert any("unfinished" in text for trace in figure.data for text in trace.hovertext or ())
    assert [annotation.text for annotation in figure.layout.annotations] == ["resumed"]


def test_buttons_show_beginning_end_and_whole() -> None:
    syncs = [Span(f"v{n}", 2.0 * n, 2.0 * n + 1, n) for n in range(1, 11)]
    lines = Timeline([[]], [], 21.0, syncs)
    assert gantt.views(lines, gantt.drawing(lines).windows) == [
        ("first 6 steps", [0.0, 13 * 1.02]),
        ("last 6 steps", [9.0, 21.0]),
        ("whole run", [0.0, 21.0]),
    ]


def test_the_first_steps_are_shown_from_their_first_rollout_on() -> None:
    """The evaluation before them took 5; a long one leaves no bar of theirs in the beginning that is drawn."""
    syncs = [Span(f"v{n}", 10.0 * n, 10.0 * n + 1, n) for n in range(1, 8)]
    lines = Timeline([[Span("e0", 0.0, 5.0, 0, evaluation=True), Span("r0", 5.0, 9.0, 0)]], [], 80.0, syncs)
    assert gantt.views(lines, [gantt.Window(0.0, 80.0)])[0] == ("first 6 steps", [5.0, 61 * 1.02])
    assert gantt.views(lines, [gantt.Window(0.0, 4.0), gantt.Window(70.0, 80.0)])[0][1] == [0.0, 4.0]


def test_stretches_are_marked_by_what_became_of_them(simulated, write_run) -> None:
    words = "--lanes 2 --batch-size 2 --steps 3 --run-ahead 1 --lengths 1,9,1 --iteration-tokens 2"
    figure = gantt.gantt(read_run(write_run(simulated(*words.split()))))
    (paused,) = [trace for trace in figure.data if trace.name == "paused, goes on later"]
    assert paused.legend == "legend2"
    version_0 = next(trace for trace in figure.data if trace.name == "0")
    stretches = dict(zip(version_0.hovertext, version_0.marker.opacity, strict=True))
    assert {opacity for text, opacity in stretches.items() if ", paused" in text} == {gantt.PAUSED.opacity}
    assert {opacity for text, opacity in stretches.items() if ", paused" not in text} == {1.0}


def test_every_way_to_end_has_its_look() -> None:
    def look(**fields) -> gantt.Look:
        return gantt._look(Span("r0", 0, 1, 0, **fields))

    assert look(fate="trained", ended_by="generated") is gantt.PLAIN
    assert look(fate="trained", ended_by="paused") is gantt.PAUSED
    assert look(fate="trained", ended_by="generated", interrupted=True) is gantt.INTERRUPTED
    assert look(fate="dropped", ended_by="generated") is gantt.RELEASED
    assert look(fate="aborted", ended_by="aborted") is gantt.THROWN_AWAY
    assert look(fate="lost", ended_by="lost") is gantt.THROWN_AWAY
