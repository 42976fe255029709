"""Every second of every lane and every sampled token is in exactly one class."""

from __future__ import annotations

import pytest

from headway.reports import goodput, goodput_table
from headway.reports.summary import timeline
from headway.trace import Event
from headway.types import UserError
from tests.summaries import summary_of


def _told(events: list[Event]) -> float:
    """Sampled tokens by the trace itself: the last that it says of each rollout. Answers share their numbers."""
    total, last = 0.0, dict[int, float]()
    for event in events:
        if event.kind == "started":
            total += last.pop(event["rollout"], 0.0)
        elif event.kind in ("generated", "paused", "aborted"):
            last[event["rollout"]] = event["tokens"]
    return total + sum(last.values())


def test_the_classes_add_up_under_every_policy(hard_times) -> None:
    """Lengths are whole numbers here, so that the sums are exact."""
    figures = summary_of(hard_times)
    account, lines = figures["goodput"], timeline(hard_times)
    classes = account["classes"]
    assert set(classes) <= set(goodput.CLASSES)
    assert sum(amount["lane_time"] for amount in classes.values()) == len(lines.lanes) * lines.total_s
    assert account["lane_time"] == len(lines.lanes) * lines.total_s
    assert sum(amount["tokens"] for amount in classes.values()) == account["tokens"] == _told(hard_times)
    busy = sum(amount["lane_time"] for name, amount in classes.items() if name != "idle")
    assert busy / account["lane_time"] == pytest.approx(figures["lane_utilization"])
    for share in ("token_share", "lane_share"):
        assert sum(amount[share] for amount in classes.values()) == pytest.approx(1.0)
    assert classes["trained"]["rollouts"] == sum(map(len, figures["lags"]))


def test_a_window_adds_up_too(hard_times) -> None:
    figures, lines = summary_of(hard_times, skip_steps=2), timeline(hard_times)
    window_s = lines.total_s - figures["measured_from"]
    assert 0 < window_s < lines.total_s
    assert figures["goodput"]["lane_time"] == len(lines.lanes) * window_s
    assert len(figures["batches"]) == 4


def test_the_window_of_a_worked_run(simulated) -> None:
    """Without run_ahead: s0 ends at 4, then r2 and r3 (1 each), then s1 until 6."""
    words = "--lanes 2 --batch-size 2 --steps 2 --run-ahead 0 --lengths 1,3,1"
    figures = summary_of(simulated(*words.split()), skip_steps=1)
    assert (figures["total"], figures["measured_from"]) == (6.0, 4.0)
    assert (figures["lane_utilization"], figures["trainer_utilization"], figures["throughput"]) == (0.5, 0.5, 1.0)
    assert (figures["trained_length"], figures["started_length"]) == (1.0, 1.0)
    assert figures["batches"] == [[2, 3]]
    assert {name: amount["lane_time"] for name, amount in figures["goodput"]["classes"].items()} == {
        "trained": 2.0,
        "idle": 2.0,
    }


def test_a_warm_up_must_leave_something(simulated) -> None:
    with pytest.raises(UserError, match="2 skipped train steps leave nothing to measure of a run of 2"):
        summary_of(simulated(), skip_steps=2)


def test_what_was_cut_off_or_interrupted_is_counted_across_the_classes(simulated) -> None:
    words = "--lanes 2 --batch-size 2 --steps 2 --run-ahead 1 --lengths 1,9,1 --max-lag 1 --stragglers interrupt"
    events = [
        Event(event.kind, event.at_s, {**event.fields, "finish": "length"})
        if event.kind == "generated" and event["rollout"] == 0
        else event
        for event in simulated(*words.split())
    ]
    account = summary_of(events)["goodput"]
    assert account["of_all"]["truncated"]["tokens"] == 1.0
    assert (account["of_all"]["interrupted"]["tokens"], account["of_all"]["interrupted"]["rollouts"]) == (3.0, 1)
    assert account["classes"]["trained"]["rollouts"] == 4  # whatever their finish


def test_the_table_has_a_row_for_each_class_and_the_whole(simulated) -> None:
    words = "--lanes 2 --batch-size 2 --steps 2 --run-ahead 0 --lengths 1,3,1"
    table = goodput_table.table(summary_of(simulated(*words.split()))["goodput"], "units")
    assert "<td>trained</td><td>4</td><td>6</td><td>100.0 %</td><td>6</td><td>50.0 %</td>" in table
    assert "<td>lanes without a rollout</td><td></td><td></td><td></td><td>6</td><td>50.0 %</td>" in table
    assert "<td>all</td><td>4</td><td>6</td><td>100.0 %</td><td>12</td><td>100.0 %</td>" in table


def test_every_class_has_its_words() -> None:
    assert set(goodput_table.ROWS) == set(goodput.CLASSES)
    assert set(goodput_table.ACROSS) == set(goodput.OF_ALL.values())


def test_the_terminal_says_what_was_trained_and_what_became_of_the_rest(simulated) -> None:
    figures = summary_of(simulated())
    assert goodput_table.lines(figures["goodput"], (figures["trained_length"], figures["started_length"])) == [
        "goodput          75.0 % of the sampled tokens and 75.0 % of the lane time were trained",
        "                 (other lane time: waiting 25.0 %)",
        "mean length      1.5 trained, 1.333 of all that ended (ratio 1.12)",
    ]
