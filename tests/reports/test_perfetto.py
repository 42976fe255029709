"""The Chrome trace: what ui.perfetto.dev asks of the format, and that it shows what happened."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from headway import simulation
from headway.cli import app
from headway.reports.perfetto import GENERATE, SCORE, STEPS, SYNC, TRAIN, trace_events, write_perfetto
from headway.reports.record import read_run
from headway.simulate.faults import scenario
from tests.summaries import summary_of

REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "bp", "ts", "pid", "tid"},
}
"""Phase -> fields, as the Trace Event Format names them."""


def _valid(events: list[dict]) -> dict[tuple[int, int], list[dict]]:
    """What takes time, by thread, after every rule of the format has been asked for."""
    threads: dict[tuple[int, int], list[dict]] = defaultdict(list)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys(), event
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append(event)
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    assert threads.keys() <= named
    for thread in threads.values():
        for before, after in pairwise(thread):
            assert before["ts"] + before["dur"] <= after["ts"], (before, after)
    _valid_flows(events, threads)
    return threads


def _valid_flows(events: list[dict], threads: dict[tuple[int, int], list[dict]]) -> None:
    """Each arrow has two ends in order of time, and each end lies within something."""
    ends: dict[int, dict[str, dict]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = event
            spans = threads[event["pid"], event["tid"]]
            assert any(span["ts"] <= event["ts"] <= span["ts"] + span["dur"] for span in spans), event
    for both in ends.values():
        assert both.keys() == {"s", "f"}
        assert both["s"]["ts"] <= both["f"]["ts"]


def _exported(folder) -> list[dict]:
    return trace_events(read_run(folder))


def test_every_policy_s_trace_is_valid(hard_times, write_run) -> None:
    events = _exported(write_run(hard_times))
    _valid(events)
    arrows = sum(event["ph"] == "s" for event in events)
    assert arrows == sum(map(len, summary_of(hard_times)["lags"]))


def test_traces_of_killed_and_resumed_runs_are_valid(write_run) -> None:
    for seed in range(25):
        events = [event for life in simulation.play(scenario(seed)).lives for event in life.events]
        _valid(_exported(write_run(events, name=f"run-{seed}")))


def test_the_hand_sized_example(simulated, write_run) -> None:
    events = _exported(write_run(simulated()))
    threads = _valid(events)
    lane_b = [(event["name"], event["ts"], event["dur"]) for event in threads[GENERATE, 2]]
    assert lane_b == [("rollout 1", 0, 3_000_000), ("rollout 5", 3_000_000, 1_000_000)]
    assert [(event["name"], event["ts"]) for event in threads[TRAIN, STEPS]] == [
        ("train step 1", 2_000_000),
        ("train step 2", 3_000_000),
    ]
    assert [event["name"] for event in threads[SYNC, 1]] == ["sync of version 1", "sync of version 2"]
    first = threads[GENERATE, 1][0]["args"]
    assert (first["group"], first["member"], first["version"], first["tokens"], first["finish"]) == (
        0,
        0,
        0,
        1.0,
        "stop",
    )
    lags = [event["args"] for event in events if event["name"] == "lag"]
    assert lags == [{"mean": 0.0, "max": 0}, {"mean": 1.0, "max": 1}]
    in_flight = [event["args"]["running"] for event in events if event["name"] == "rollouts in flight"]
    assert max(in_flight) == 2
    ready = [event["args"]["groups"] for event in events if event["name"] == "ready groups"]
    assert (ready[0], max(ready)) == (1, 2)


def test_evaluations_checkpoints_and_scores_have_their_rows(simulated, write_run) -> None:
    words = "--lanes 3 --batch-size 2 --steps 4 --evaluate.size 2 --score-time 0.5 --lengths 1,2,1"
    threads = _valid(_exported(write_run(simulated(*words.split()))))
    names = {event["name"] for thread in threads.values() for event in thread}
    assert {"evaluation of version 0", "evaluation of version 4", "evaluation answer 1", "checkpoint 4"} <= names
    scores = [event for (pid, _), thread in threads.items() if pid == SCORE for event in thread]
    assert {event["dur"] for event in scores if event["name"].startswith("score of rollout")} == {500_000}


def test_what_befell_groups_is_a_moment(simulated, write_run) -> None:
    """r3 is done as the first step ends, under older weights."""
    words = "--lanes 2 --batch-size 2 --steps 2 --run-ahead 1 --lengths 1,9,1 --max-lag 0 --stragglers drop"
    events = _exported(write_run(simulated(*words.split())))
    first = next(event for event in events if event["ph"] == "i")
    assert (first["name"], first["ts"]) == ("dropped: group 3", 3_000_000)
    assert first["args"]["reason"] == "its lag of 1 is above max_lag"


@pytest.mark.parametrize("words", [[], ["--perfetto", "elsewhere.json"]])
def test_the_command_writes_the_file(simulated, write_run, monkeypatch, tmp_path, words) -> None:
    folder = write_run(simulated())
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["export", str(folder), *words])
    assert result.exit_code == 0, result.output
    path = tmp_path / "elsewhere.json" if words else folder / "trace.perfetto.json"
    document = json.loads(path.read_text())
    assert document["otherData"]["run_ahead"] == 1.0
    assert len(document["traceEvents"]) == len(_exported(folder))
    assert write_perfetto(folder, path) == path
