"""The record of a run: what is written is read back, and a kill costs at most the last line."""

import pytest

from headway.trace import Event, Trace, TraceFile, read_trace
from headway.types import UserError

EVENTS = [
    Event("run", 0.0, {"lanes": 2, "max_lag": None, "clock": "wall"}),
    Event(
        "generated", 0.1 + 0.2, {"rollout": 3, "versions": [[0, 3], [1, 2.5]], "prompt": "ä\n\u2028?", "finish": "stop"}
    ),
    Event("trained", 1e-9, {"version": 1, "metrics": {"loss": -0.25, "kl/lag_1": 0.0}}),
]


def written(path, *events):
    file = TraceFile(path)
    for event in events:
        file(event)
    file.close()
    return path


def test_one_event_is_one_line():
    line = Event("trained", 2.5, {"version": 1}).to_json()
    assert line == '{"kind":"trained","at_s":2.5,"version":1}'
    assert Event.from_json(line) == Event("trained", 2.5, {"version": 1})
    assert "\n" not in EVENTS[1].to_json()


def test_what_is_written_is_read_back_exactly(tmp_path):
    assert read_trace(written(tmp_path / "runs" / "trace.jsonl", *EVENTS)) == EVENTS


def test_fields_are_read_by_name():
    assert EVENTS[0]["lanes"] == 2
    with pytest.raises(KeyError):
        EVENTS[0]["version"]


def test_everyone_who_listens_is_told_in_the_order_they_came():
    heard = []
    trace = Trace(lambda event: heard.append(("first", event.kind)))
    trace.subscribe(lambda event: heard.append(("second", event["version"])))
    trace.emit("published", 3.0, version=1)
    assert heard == [("first", "published"), ("second", 1)]


def test_every_event_is_on_disk_at_once(tmp_path):
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path)
    for number, event in enumerate(EVENTS, 1):
        file(event)
        assert read_trace(path) == EVENTS[:number]
    file.close()


# Killed runs


def test_a_last_line_cut_short_at_any_place_is_left_out(tmp_path):
    path = written(tmp_path / "trace.jsonl", *EVENTS)
    whole = path.read_bytes()
    last_line = EVENTS[-1].to_json().encode()
    for cut in range(1, len(last_line)):
        path.write_bytes(whole[: -1 - cut])
        assert read_trace(path) == EVENTS[:-1]


def test_a_whole_last_line_without_its_end_counts(tmp_path):
    path = written(tmp_path / "trace.jsonl", *EVENTS)
    path.write_bytes(path.read_bytes()[:-1])
    assert read_trace(path) == EVENTS


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_resumed_run_goes_on_after_the_last_whole_line(tmp_path, cut):
    path = written(tmp_path / "trace.jsonl", *EVENTS)
    path.write_bytes(path.read_bytes()[:-cut])
    written(path, *EVENTS)
    assert read_trace(path) == EVENTS[:-1] + EVENTS


def test_a_run_that_was_closed_goes_on_at_its_end(tmp_path):
    path = written(tmp_path / "trace.jsonl", *EVENTS)
    assert read_trace(written(path, *EVENTS)) == EVENTS + EVENTS


def test_a_file_that_was_killed_in_its_first_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"kind":"ru')
    assert read_trace(path) == []
    assert read_trace(written(path, *EVENTS)) == EVENTS


def test_an_empty_trace(tmp_path):
    assert read_trace(written(tmp_path / "trace.jsonl")) == []


# Other files


@pytest.mark.parametrize("line", ["{", '{"kind":"run"}', '{"at_s":1.0}', "5", "[]", '"text"', "null", "[1, 2]"])
def test_a_bad_line_elsewhere_names_file_and_line(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{EVENTS[0].to_json()}\n{line}\n{EVENTS[2].to_json()}\n")
    with pytest.raises(UserError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2 is not a trace event")
    assert "\n" not in str(caught.value)


def test_a_bad_last_line_that_was_written_whole_is_an_error_too(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{EVENTS[0].to_json()}\nhello\n")
    with pytest.raises(UserError, match=r"trace.jsonl:2 is not a trace event"):
        read_trace(path)
