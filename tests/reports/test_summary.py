"""Time, utilisation and lags of traces small enough to work out by hand."""

from __future__ import annotations

import pytest

from headway.reports.summary import Span, continuous, kept_evaluations, kept_steps, timeline
from headway.trace import Event
from tests.summaries import summary_of


def test_the_hand_sized_example(simulated) -> None:
    figures = summary_of(simulated())
    assert (figures["total"], figures["lane_utilization"], figures["trainer_utilization"]) == (4.0, 1.0, 0.5)
    assert figures["batches"] == [[0, 2], [1, 3]]
    assert figures["lags"] == [[0, 0], [1, 1]]


def test_timeline_names_spans_and_marks_what_did_not_finish(simulated) -> None:
    lines = timeline(simulated())
    assert [span.name for span in lines.lanes[1]] == ["r1", "r5"]
    assert [(span.began_s, span.ended_s, span.version) for span in lines.trainer] == [(2, 3, 0), (3, 4, 1)]
    assert [(span.name, span.began_s) for span in lines.syncs] == [("v1", 3.0), ("v2", 4.0)]
    assert lines.resumed_s == []


def test_evaluation_answers_are_marked(simulated) -> None:
    lines = timeline(simulated("--lanes", "2", "--batch-size", "2", "--steps", "1", "--evaluate.size", "1"))
    answers = [span for lane in lines.lanes for span in lane if span.evaluation]
    assert [span.name for span in answers] == ["e0", "e0"]
    assert [span.version for span in answers] == [0, 1]


def test_a_resumed_run_follows_what_was_before(resumed: list[Event]) -> None:
    events = continuous(resumed)
    assert [event.at_s for event in events if event.kind == "run"] == [0.0, 5.0]
    assert events[-1].at_s == 8.0
    assert continuous(events) == events


def test_a_resumed_run_keeps_the_steps_behind_its_newest_weights(resumed: list[Event]) -> None:
    assert [step.trained["metrics"]["reward_mean"] for step in kept_steps(resumed)] == [0.1, 0.3]
    assert [event["num_correct"] for event in kept_evaluations(resumed)] == [9]
    figures = summary_of(resumed)
    assert figures["lags"] == [[0, 0], [0, 1]]
    assert figures["mean_lag"] == 0.25
    assert figures["trainer_utilization"] == pytest.approx(3 / 8)  # the step that was lost took its second too
    assert figures["lane_utilization"] == pytest.approx(2 / 16)


def test_a_kill_cuts_what_was_open(resumed: list[Event]) -> None:
    lines = timeline(resumed)
    assert lines.lanes[0] == [
        Span("r0", 0.0, 1.0, 0, tokens=10, fate="trained", ended_by="generated"),
        Span("r4", 5.0, 5.0, 2, finished=False, fate="killed", ended_by="cut"),
    ]
    assert lines.lanes[1] == [Span("r2", 5.0, 6.0, 1, tokens=10, fate="waiting", ended_by="generated")]
    assert lines.resumed_s == [5.0]


def test_steps_lost_in_a_kill_and_not_trained_again_are_gone(resumed: list[Event]) -> None:
    second_run = next(number for number, event in enumerate(resumed) if number and event.kind == "run")
    killed_again = resumed[: second_run + 3]
    assert [step.trained["version"] for step in kept_steps(killed_again)] == [1]
    assert kept_evaluations(killed_again) == []
