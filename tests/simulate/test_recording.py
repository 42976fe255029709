"""What a trace says of durations, from traces written by hand; and what stands in for what it doesn't say."""

import pytest

from headway.simulate.randomness import uniforms
from headway.simulate.recording import Durations, Graded, Stay, read_recording, record
from headway.trace import Event
from headway.types import UserError


def started(at_s, rollout, group, member=0, *, kind="started", evaluation=False, version=0):
    return Event(
        kind,
        at_s,
        {
            "rollout": rollout,
            "group": group,
            "member": member,
            "lane": 0,
            "version": version,
            "evaluation": evaluation,
        },
    )


def generated(at_s, rollout, tokens=10, finish="stop"):
    return Event("generated", at_s, {"rollout": rollout, "tokens": tokens, "finish": finish})


def scored(at_s, rollout, reward=1.0, outcome="scored"):
    return Event("scored", at_s, {"rollout": rollout, "outcome": outcome, "reward": reward})


def paused(at_s, rollout):
    return Event("paused", at_s, {"rollout": rollout, "tokens": 1})


def aborted(at_s, rollout, lane=0):
    return Event("aborted", at_s, {"rollout": rollout, "lane": lane, "tokens": 1})


def versioned(kind, at_s, version):
    return Event(kind, at_s, {"version": version})


RUN = Event("run", 0.0, {"version": 0, "num_groups": 7})
WHOLE = [started(0.0, 0, group=0), generated(4.0, 0, tokens=8)]
"""Something to draw from."""


def test_every_duration_is_the_time_between_two_events():
    recording = record(
        [
            RUN,
            started(0.0, 0, group=0),
            started(0.5, 1, group=0, member=1),
            generated(3.0, 0, tokens=12),
            scored(3.25, 0),
            generated(4.5, 1, tokens=9),
            scored(6.5, 1, reward=None, outcome="grader_timeout"),
            versioned("taken", 7.0, 0),
            versioned("trained", 9.5, 1),
            versioned("publishing", 10.0, 1),
            versioned("published", 10.125, 1),
            versioned("saving", 10.5, 1),
            versioned("saved", 11.5, 1),
        ]
    )
    assert recording.rollouts.whole == {(0, 0): Stay(12, 3.0), (0, 1): Stay(9, 4.0)}
    assert recording.rollouts.graded == {
        (0, 0): Graded(0.25, "scored", 1.0),
        (0, 1): Graded(2.0, "grader_timeout", None),
    }
    assert (recording.train.seen_s, recording.sync.seen_s) == ({0: 2.5}, {1: 0.125})
    assert recording.save.seen_s == {1: 1.0}
    assert (recording.num_groups, recording.num_steps) == (7, 1)


def test_evaluation_answers_are_kept_by_version():
    events = [RUN, *WHOLE]
    for version, began_s, lasted_s in ((0, 10.0, 2.0), (20, 50.0, 3.0)):
        events += [
            started(began_s, -4, group=3, evaluation=True, version=version),
            generated(began_s + lasted_s, -4, tokens=5),
            scored(began_s + lasted_s + 1, -4, reward=0.0),
        ]
    recording = record(events)
    assert recording.answers.whole == {(0, 3): Stay(5, 2.0), (20, 3): Stay(5, 3.0)}
    assert recording.answers.graded[20, 3] == Graded(1.0, "scored", 0.0)
    assert recording.rollouts.whole == {(0, 0): Stay(8, 4.0)}


def test_the_stretches_of_a_paused_rollout_are_added():
    recording = record(
        [
            RUN,
            started(0.0, 0, group=0),
            paused(2.0, 0),
            started(10.0, 0, group=0, kind="resumed"),
            paused(11.0, 0),
            started(20.0, 0, group=0, kind="resumed"),
            generated(20.5, 0, tokens=7),
        ]
    )
    assert recording.rollouts.whole == {(0, 0): Stay(7, 3.5)}


def test_a_rollout_that_began_again_counts_from_there():
    recording = record([RUN, started(0.0, 0, group=0), aborted(3.0, 0), started(3.0, 1, group=0), generated(5.0, 1)])
    assert recording.rollouts.whole == {(0, 0): Stay(10, 2.0)}


def test_a_rollout_that_was_cut_short_was_at_least_that_long():
    recording = record(
        [
            RUN,
            started(0.0, 0, group=0),
            started(0.0, 1, group=1),
            started(0.0, 2, group=2),
            started(0.0, 3, group=3),
            generated(2.0, 0),
            generated(3.0, 1),
            aborted(2.5, 2),
            generated(4.0, 3, finish="interrupted"),
            started(4.0, 4, group=4),
            Event("lost", 9.0, {"rollout": 4}),
            started(9.0, 5, group=5),
            Event("ended", 9.5, {}),
        ]
    )
    rollouts = recording.rollouts
    assert set(rollouts.whole) == {(0, 0), (1, 0)}
    assert [rollouts.at_least[group, 0] for group in (2, 3, 4, 5)] == [2.5, 4.0, 0.0, 0.5]
    assert rollouts.stand_in((2, 0)) == (1, 0), "the only one that is longer"
    assert rollouts.stand_in((3, 0)) == (1, 0), "none is longer: the longest"
    assert rollouts.stand_in((5, 0)) in rollouts.whole


def test_what_the_trace_doesnt_know_is_drawn_by_identity():
    """Groups of two: both members fast, or both slow. A group that never started is like one that did."""
    events = [RUN]
    for group in range(40):
        seconds = 1.0 if group % 2 else 9.0
        for member in (0, 1):
            number = 2 * group + member
            events += [
                started(100.0 * number, number, group, member),
                generated(100.0 * number + seconds, number),
                scored(100.0 * number + seconds, number, reward=seconds),
            ]
    rollouts = record(events, seed=3).rollouts
    both = [(rollouts.stay((group, 0)), rollouts.stay((group, 1))) for group in range(40, 440)]
    assert all(first == second for first, second in both)
    assert sum(first.lane_s == 1.0 for first, _ in both) == pytest.approx(200, abs=40)
    assert all(
        rollouts.grade((group, 1)) == Graded(0.0, "scored", rollouts.stay((group, 1)).lane_s) for group in range(40, 80)
    )
    again, other = record(events, seed=3).rollouts, record(events, seed=4).rollouts
    assert [again.stay((group, 0)) for group in range(40, 440)] == [first for first, _ in both]
    assert [other.stay((group, 0)) for group in range(40, 440)] != [first for first, _ in both]
    assert rollouts.stay((3, 2)).lane_s in (1.0, 9.0), "a member that its group didn't have"


def test_times_of_versions_that_were_not_seen_are_drawn():
    durations = Durations(uniforms("train", 0), {0: 1.0, 1: 2.0, 2: 4.0})
    assert [durations(version) for version in range(3)] == [1.0, 2.0, 4.0]
    drawn = [durations(version) for version in range(3, 303)]
    assert all(drawn.count(seconds) == pytest.approx(100, abs=33) for seconds in (1.0, 2.0, 4.0))
    assert drawn == [durations(version) for version in range(3, 303)]
    assert Durations(uniforms("save", 0))(5) == 0.0


def test_a_resumed_run_is_one_run():
    """Version 1 is saved at 10, when r1 has held a lane for 3; step 2 is trained, and again after the kill at 30."""
    before = [
        RUN,
        *WHOLE,
        versioned("taken", 5.0, 0),
        versioned("trained", 6.0, 1),
        started(7.0, 1, group=1),
        started(8.0, 2, group=2),
        versioned("saving", 10.0, 1),
        versioned("saved", 10.5, 1),
        generated(11.0, 2),
        versioned("taken", 12.0, 1),
        versioned("trained", 20.0, 2),
        Event("scored", 30.0, {"rollout": 99, "outcome": "scored", "reward": 0.0}),
    ]
    after = [
        Event("run", 0.0, {"version": 1, "num_groups": 7}),
        started(1.0, 3, group=1, kind="resumed"),
        started(1.0, 4, group=2, kind="resumed"),
        generated(3.0, 3, tokens=20),
        versioned("taken", 4.0, 1),
        versioned("trained", 6.5, 2),
        generated(7.0, 4, tokens=30),
    ]
    recording = record([*before, *after])
    assert recording.train.seen_s == {0: 1.0, 1: 2.5}
    assert recording.rollouts.whole[1, 0] == Stay(20, 3.0 + 2.0)
    assert recording.rollouts.whole[2, 0] == Stay(30, 2.0 + 6.0)


def test_a_trace_without_a_whole_rollout_is_refused(tmp_path):
    (tmp_path / "trace.jsonl").write_text(RUN.to_json() + "\n" + started(0.0, 0, group=0).to_json() + "\n")
    with pytest.raises(UserError, match="no rollout of the trace ran to its end"):
        read_recording(tmp_path, seed=0)
    with pytest.raises(UserError, match=r"nowhere is no run: it holds no trace\.jsonl"):
        read_recording(tmp_path / "nowhere", seed=0)
