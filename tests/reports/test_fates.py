"""What became of each rollout, in traces small enough to follow by hand and in scenarios full of faults."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from headway import simulation
from headway.reports.fates import read_fates
from headway.reports.goodput import account
from headway.reports.summary import continuous, kept_steps, timeline
from headway.simulate.faults import scenario
from headway.trace import Event


def _event(kind: str, at_s: float, **fields: object) -> Event:
    return Event(kind, at_s, fields)


def _held(kind: str, at_s: float, rollout: int, lane: int, version: int = 0, group: int | None = None) -> Event:
    group = rollout if group is None else group
    who = {"rollout": rollout, "group": group, "member": 0, "lane": lane, "version": version}
    return _event(kind, at_s, **who, evaluation=False)


def _generated(at_s: float, rollout: int, lane: int, tokens: float, **fields: object) -> Event:
    return _event("generated", at_s, rollout=rollout, lane=lane, tokens=tokens, **{"finish": "stop", **fields})


def _gone(kind: str, at_s: float, rollout: int, lane: int | None, **fields: object) -> Event:
    return _event(kind, at_s, rollout=rollout, group=rollout, lane=lane, reason="", **fields)


RUN = _event("run", 0.0, lanes=3, batch_size=1, group_size=1, version=0)
TAKEN = _event("taken", 3.0, version=0, groups=[0], rollouts=[0], lags=[0], token_lag=0.0)
TRAINED = _event("trained", 4.0, version=1, metrics={})

WORKED = [
    RUN,
    *(_held("started", 0.0, rollout, rollout) for rollout in range(3)),
    _event("paused", 1.0, rollout=0, lane=0, tokens=1.0, reason="training"),
    _gone("aborted", 1.0, 1, 1, tokens=1.0),
    _gone("lost", 1.0, 2, 2),
    _held("resumed", 2.0, 0, 1),
    _held("started", 2.0, 3, 0, group=2),
    _generated(3.0, 0, 1, tokens=2.0),
    TAKEN,
    _held("started", 3.0, 4, 1),
    TRAINED,
    _generated(4.5, 4, 1, tokens=1.5, finish="interrupted", why="max_lag"),
    _event("dropped", 4.5, group=4, prompt="p", rollouts=[4], tokens=1.5, reason="old", lag=2),
    _held("started", 4.5, 5, 1),
    _event("ended", 5.0, reason="steps done"),
]


def test_a_rollout_that_pauses_holds_lanes_in_several_stretches() -> None:
    life = read_fates(WORKED).lives[0]
    assert [(stretch.lane, stretch.began_s, stretch.ended_s, stretch.ended_by) for stretch in life.stretches] == [
        (0, 0.0, 1.0, "paused"),
        (1, 2.0, 3.0, "generated"),
    ]
    assert (life.tokens, life.lane_s, life.fate, life.fate_in) == (2.0, 2.0, "trained", 1)


def test_the_fates_of_a_worked_trace() -> None:
    lives = read_fates(WORKED).lives
    assert [life.fate for life in lives] == ["trained", "aborted", "lost", "in_flight", "dropped", "in_flight"]
    assert [life.tokens for life in lives] == [2.0, 1.0, 0.0, 0.0, 1.5, 0.0]
    assert [life.began_again for life in lives] == [False, False, True, False, False, False]
    assert [(life.started_in, life.fate_in) for life in lives] == [
        *[(1, 1), (1, 1), (1, 1), (1, None)],
        *[(1, 2), (2, None)],
    ]
    assert (lives[4].finish, lives[4].why, lives[4].ended_in) == ("interrupted", "max_lag", 2)


def test_lanes_hold_one_rollout_at_a_time_under_every_policy(hard_times) -> None:
    for lane in timeline(hard_times).lanes:
        for before, after in pairwise(lane):
            assert before.began_s <= before.ended_s <= after.began_s


def test_what_a_rollout_sampled_is_the_time_it_held_lanes_under_every_policy(hard_times) -> None:
    """In the lane model, where nothing is unknown but what is in flight at the end."""
    lives = read_fates(hard_times).lives
    assert {life.fate for life in lives} <= {"trained", "dropped", "aborted", "waiting", "in_flight", "evaluation"}
    assert all(life.tokens == life.lane_s for life in lives if life.fate != "in_flight")


def test_a_batch_that_is_never_trained_is_not_trained() -> None:
    killed = [*WORKED[: WORKED.index(TRAINED)], _held("started", 3.5, 6, 2)]
    assert read_fates(killed).lives[0].fate == "waiting"


def test_a_resume_forgets_what_its_checkpoint_did_not_hold_and_takes_over_what_it_did() -> None:
    """Killed at 6: version 1 was saved at 4, as rollout 3 had come to 1 token; it had 4 at its end."""
    before = [
        *WORKED[: WORKED.index(TRAINED) + 1],
        _event("saving", 4.0, version=1),
        _event("saved", 4.0, version=1),
        _generated(6.0, 3, 0, tokens=4.0),
    ]
    after = [
        _event("run", 0.0, lanes=3, batch_size=1, group_size=1, version=1),
        _event("restored", 0.0, rollout=5, group=2, member=0, tokens=1.0, finish=None, outcome=None),
        _held("resumed", 0.0, 5, 2, version=1, group=2),
        _generated(1.0, 5, 2, tokens=2.0),
        _event("taken", 1.0, version=1, groups=[2], rollouts=[5], lags=[1], token_lag=0.5),
        _event("trained", 2.0, version=2, metrics={}),
    ]
    lives = {life.rollout: life for life in read_fates(continuous([*before, *after])).lives}
    assert (lives[0].fate, lives[4].fate) == ("trained", "killed")
    assert (lives[3].fate, lives[3].tokens, lives[3].lane_s) == ("killed", 3.0, 0.0)
    assert (lives[5].fate, lives[5].tokens, lives[5].started_s) == ("trained", 2.0, 2.0)
    assert [(stretch.rollout, stretch.lane_s) for stretch in lives[5].stretches] == [(3, 4.0), (5, 1.0)]


def test_steps_trained_after_the_checkpoint_are_undone_by_a_resume() -> None:
    resumed = [_event("run", 0.0, lanes=3, batch_size=1, group_size=1, version=0), _held("started", 0.0, 0, 0)]
    assert read_fates(continuous([*WORKED[:-1], *resumed])).lives[0].fate == "killed"


def test_whatever_goes_wrong_every_trained_rollout_is_told_and_every_second_has_one_fate() -> None:
    """Kills, crashes, lost rollouts, every policy: each seed is a run with all of its resumes."""
    fates = Counter[str]()
    for seed in range(150):
        events = [event for life in simulation.play(scenario(seed)).lives for event in life.events]
        lines = timeline(events)
        found = account(lines.lives, len(lines.lanes), began_s=0.0, ended_s=lines.total_s)
        fates.update({name: amount.rollouts for name, amount in found.classes.items()})
        assert abs(found.lane_s - len(lines.lanes) * lines.total_s) < 1e-9 * lines.total_s, seed
        trained = [(life.group, life.member) for life in lines.lives if life.fate == "trained"]
        assert len(trained) == len(set(trained)), seed
        assert len(trained) == sum(len(step.taken["rollouts"]) for step in kept_steps(events)), seed
    assert min(fates[name] for name in ("killed", "lost", "aborted", "dropped", "filtered", "failed")) > 10
