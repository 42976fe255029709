"""A run again, on virtual time, as its trace says how long things took."""

import random
from dataclasses import replace

import pytest

from headway import clock, program, simulation
from headway.config import resolve
from headway.simulate.doubles import Doubles, Times
from headway.simulate.workload import make_lengths
from headway.trace import Event, Trace
from headway.types import UserError

SCHEDULES = (
    "--run-ahead 1",
    "--run-ahead 0 --evaluate.size 3 --evaluate.every 4",
    "--run-ahead 2 --order started --score-time 0.5",
    "--run-ahead 0.5 --overlap false --sync-time 0.25 --evaluate.size 5",
    "--run-ahead 1 --redundant 1 --iteration-tokens 2",
    "--run-ahead 2 --max-lag 1 --stragglers drop,interrupt",
    "--run-ahead 2 --in-flight drain",
)


@pytest.fixture
def kept(tmp_path):
    """Keeps a trace, and the configuration behind it, as a run's folder."""

    def keep(words, events):
        (tmp_path / "config.toml").write_text(resolve(None, words.split()).to_toml())
        (tmp_path / "trace.jsonl").write_text("".join(event.to_json() + "\n" for event in events))
        return tmp_path

    return keep


def simulated(words):
    return simulation.simulate(resolve(None, words.split()).config)


def as_read(events):
    return [Event.from_json(event.to_json()) for event in events]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_of_fixed_times_replays_event_by_event(kept, schedule):
    """Lengths of a few quarters, so that no time is rounded. A constant length where a rollout begins again."""
    words = f"--lanes 6 --batch-size 8 --group-size 2 --steps 15 --train-time 1.5 --in-flight keep {schedule}"
    words += (
        " --lengths constant --mean-length 4"
        if "stragglers" in schedule or "redundant" in schedule
        else (" --lengths 1,3,2.5,0.5,4,0.25,8,2")
    )
    events = simulated(words)
    assert as_read(simulation.replay(kept(words, events))) == as_read(events)


def jittery(words):
    """The trace of a simulated run whose train steps, syncs, scores and rewards all differ."""
    rng = random.Random(7)
    config = resolve(None, words.split()).config
    settings, rules = program.sizes(config), program.rules(config, simulated=True)
    times = Times(*(lambda what, top=top: rng.uniform(0.1, top) for top in (3.0, 0.5, 0.5, 1.0)))
    lengths = make_lengths("lognormal:0.7", 5.0, 0)

    class Graded(Doubles):
        def grade(self, ticket):
            if ticket.group % 5 == 0 and not ticket.evaluation:
                return "grader_error", None
            return "scored", float(ticket.member) if ticket.group % 3 else 1.0

    doubles = Graded(lengths, times, num_members=settings.num_members, pinned=False)
    events = []
    clock.run(program.drive(config, doubles, settings, rules, Trace(events.append), clock_name="virtual"), virtual=True)
    return events


JITTERY = (
    "--lanes 8 --batch-size 8 --group-size 2 --steps 30 --run-ahead 1 --in-flight keep --evaluate.size 4 "
    "--evaluate.every 10 --dynamic-sampling true --checkpoint.every 7"
)


def test_times_scores_and_rewards_are_those_of_the_run(kept):
    """Up to rounding: the same batches at the same times, failed and filtered groups included."""
    events = jittery(JITTERY)
    again = simulation.replay(kept(JITTERY, events))
    assert {event.kind for event in events} >= {"failed", "filtered", "evaluated", "saved"}
    for kind in ("taken", "trained", "published", "saved", "failed", "filtered", "evaluated", "ended"):
        theirs, ours = ([event for event in trace if event.kind == kind] for trace in (events, again))
        assert [event.at_s for event in ours] == pytest.approx([event.at_s for event in theirs], rel=1e-9)
        for name in ("rollouts", "group", "mean_reward", "version"):
            assert [event.fields.get(name) for event in ours] == [event.fields.get(name) for event in theirs]


def test_another_schedule_meets_the_same_rollouts(kept):
    folder = kept(JITTERY, jittery(JITTERY))
    synchronous = simulation.replay(folder, ["--schedule.run-ahead", "0"])
    ahead = simulation.replay(folder, ["--run-ahead", "4", "--lanes", "32"])
    assert ahead[-1].at_s < simulation.replay(folder)[-1].at_s < synchronous[-1].at_s
    assert {lag for event in synchronous if event.kind == "taken" for lag in event["lags"]} == {0}
    lengths = []
    for trace in (synchronous, ahead):
        places = {event["rollout"]: (event["group"], event["member"]) for event in trace if event.kind == "started"}
        whole = [event for event in trace if event.kind == "generated" and event["rollout"] >= 0]
        lengths.append({places[event["rollout"]]: event["tokens"] for event in whole})
    both = lengths[0].keys() & lengths[1].keys()
    assert len(both) > 200
    assert [lengths[0][place] for place in both] == pytest.approx([lengths[1][place] for place in both])


def test_a_longer_run_draws_what_was_not_recorded(kept):
    folder = kept(JITTERY, jittery(JITTERY))
    longer = simulation.replay(folder, ["--steps", "90"])
    trained = [event.at_s for event in longer if event.kind == "trained"]
    assert len(trained) == 90
    assert trained[-1] - trained[29] == pytest.approx(2 * trained[29], rel=0.25)


def test_paused_rollouts_keep_their_pace(kept):
    """4 tokens in 8 s; replayed with 2 tokens per iteration, the other two wait for new weights."""
    words = "--lengths 4 --lanes 1 --batch-size 1 --steps 2 --run-ahead 0 --in-flight keep"
    slowed = [replace(event, at_s=2 * event.at_s) for event in simulated(words)]
    folder = kept(words, slowed)
    again = simulation.replay(folder, ["--iteration-tokens", "2"])
    assert [event.at_s for event in again if event.kind == "paused"] == [4.0, 14.0]
    assert [event["tokens"] for event in again if event.kind == "generated"] == [4.0, 4.0]
    assert again[-1].at_s == slowed[-1].at_s == 20.0


def test_a_run_whose_data_ended_ends_again(kept):
    words = "--lengths 1,3,2 --lanes 2 --batch-size 2 --steps 50 --run-ahead 1 --in-flight keep"
    config = resolve(None, words.split()).config
    settings, rules = program.sizes(config, num_groups=9), program.rules(config, simulated=True)
    events = []
    doubles = Doubles(make_lengths("1,3,2", 1.0, 0), Times(1.0), pinned=False)
    clock.run(program.drive(config, doubles, settings, rules, Trace(events.append), clock_name="virtual"), virtual=True)
    assert events[-1]["reason"] == "data ended"
    assert as_read(simulation.replay(kept(words, events))) == as_read(events)


def test_what_a_replay_cant_do_is_said(kept, tmp_path):
    words = "--lengths 1,3 --lanes 2 --batch-size 2 --steps 3 --run-ahead 1"
    events = simulated(words)
    folder = kept(words, events)
    with pytest.raises(UserError, match=r"train-time does nothing in a replay, which looks at run\.seed, run\.steps"):
        simulation.replay(folder, ["--simulate.train-time", "3"])
    kept(words, [event for event in events if event.at_s < 2])
    with pytest.raises(UserError, match="no train step of the run has ended"):
        simulation.replay(folder)
    (folder / "config.toml").unlink()
    with pytest.raises(UserError, match=r"holds no config\.toml"):
        simulation.replay(folder)
