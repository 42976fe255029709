"""The doubles alone, and what their receipts say in a run."""

import asyncio

import pytest

from headway import clock, simulation
from headway.config import resolve
from headway.schedule.groups import RolloutTicket
from headway.simulate.doubles import Doubles, Times
from headway.types import VersionRun

TIMES = Times(train=2.0, sync=0.5, score=0.25, save=0.125)


def doubles(times=TIMES, **options):
    return Doubles(lambda identity: 4.0 + identity, times, **options)


def ticket(index=0, version=0, evaluation=False, **fields):
    return RolloutTicket(index, index, 0, 0, version, 0.0, evaluation=evaluation, **fields)


def timed(coroutine):
    """Its result, and how long it took on virtual time."""

    async def program():
        result = await coroutine
        return result, asyncio.get_running_loop().time()

    return clock.run(program(), virtual=True)


def simulated(words):
    return simulation.simulate(resolve(None, words.split()).config)


# Each verb takes its time


def test_generating_takes_the_length():
    generated, took = timed(doubles().generate(ticket(3)))
    assert took == generated.receipt.num_tokens == 7.0
    assert generated.receipt.version_runs == (VersionRun(0, 7.0),)
    assert (generated.receipt.prompt_uid, generated.receipt.finish) == ("prompt 3", "stop")


def test_the_other_verbs_take_their_times():
    assert timed(doubles().score(ticket(), "ref"))[1] == 0.25
    assert timed(doubles().train("batch"))[1] == 2.0
    assert timed(doubles().sync(None, 1))[1] == 0.5
    assert timed(doubles().prepare([["ref"]], 7))[1] == 0.0
    assert timed(doubles().save({"version": 1}, []))[1] == 0.125


def test_a_time_may_depend_on_the_version_or_on_the_rollout():
    times = Times(
        train=lambda version: 10.0 + version,
        sync=lambda version: 20.0 + version,
        save=lambda version: 30.0 + version,
        score=lambda ticket: 40.0 + ticket.index,
    )

    async def step(stages, version):
        return await stages.train(await stages.prepare([["ref"]], version))

    assert timed(step(doubles(times), 3))[1] == 13.0
    assert timed(doubles(times).sync(None, 4))[1] == 24.0
    assert timed(doubles(times).save({"version": 4}, []))[1] == 34.0
    assert timed(doubles(times).score(ticket(5), "ref"))[1] == 45.0


def test_a_length_is_keyed_by_group_and_member():
    stages = doubles(num_members=8)
    assert timed(stages.generate(RolloutTicket(99, 3, 5, 0, 0, 0.0)))[1] == 4.0 + 3 * 8 + 5


@pytest.mark.parametrize(("longest", "took", "finish"), [(3.0, 3.0, "length"), (4.0, 4.0, "stop"), (9.0, 4.0, "stop")])
def test_a_rollout_ends_at_the_longest(longest, took, finish):
    generated, took_s = timed(doubles(longest=longest).generate(ticket()))
    assert (took_s, generated.receipt.num_tokens, generated.receipt.finish) == (took, took, finish)


def test_a_rollout_pauses_and_goes_on_where_it_was():
    """Of 4 tokens, 1.5 under version 0 and the rest under version 2."""
    paused, took = timed(doubles().generate(ticket(max_tokens=1.5)))
    assert (took, paused.receipt.finish) == (1.5, "interrupted")
    whole, took = timed(doubles().generate(ticket(version=2, ref=paused.ref)))
    assert (took, whole.receipt.finish) == (2.5, "stop")
    assert whole.receipt.version_runs == (VersionRun(0, 1.5), VersionRun(2, 2.5))


def test_a_score_is_a_score():
    scored, _ = timed(doubles().score(ticket(), "ref"))
    assert (scored.ref, scored.outcome) == ("ref", "scored")
    assert timed(doubles().score(ticket(evaluation=True), "ref"))[0].reward == 0.0


# New weights while a rollout is in flight


def rollout_and_publishes(in_flight, *published):
    """A rollout of length 4 that starts at 1 under version 0; each of `published` is (time, version)."""

    async def program():
        stages = doubles(Times(train=1.0), pinned=in_flight == "pinned")

        async def publish(at_s, version):
            await asyncio.sleep(at_s)
            await stages.sync(None, version)

        publishing = [asyncio.create_task(publish(*what)) for what in published]
        await asyncio.sleep(1)
        generated = await stages.generate(ticket())
        await asyncio.gather(*publishing)
        return [(part.version, part.num_tokens) for part in generated.receipt.version_runs]

    return clock.run(program(), virtual=True)


@pytest.mark.parametrize(
    ("published", "runs"),
    [
        ([], [(0, 4.0)]),
        ([(2.0, 1)], [(0, 1.0), (1, 3.0)]),
        ([(2.0, 1), (4.5, 2)], [(0, 1.0), (1, 2.5), (2, 0.5)]),
        ([(0.5, 0)], [(0, 4.0)]),  # what it started with
        ([(1.0, 1)], [(1, 4.0)]),  # as it starts: no token was sampled before
        ([(5.0, 1)], [(0, 4.0)]),  # as it ends
        ([(2.0, 1), (2.0, 2)], [(0, 1.0), (2, 3.0)]),  # nothing was sampled in between
    ],
)
def test_keep_takes_new_weights_at_once(published, runs):
    assert rollout_and_publishes("keep", *published) == runs


def test_pinned_keeps_the_weights_it_began_with():
    assert rollout_and_publishes("pinned", (2.0, 1), (4.5, 2)) == [(0, 4.0)]


@pytest.mark.parametrize(
    ("in_flight", "runs", "token_lag"), [("keep", [[0, 2], [1, 2]], 0.5), ("pinned", [[0, 4]], 1.0)]
)
def test_the_token_lag_of_a_rollout_across_one_publish(in_flight, runs, token_lag):
    """r0 has length 1, r1 length 4, from 0 on. Version 1 is published at 2, half-way through r1; at 4 r1 is taken.

    Its oldest token is one version behind either way. With `keep` half of its tokens are not.
    """
    events = simulated(f"--lengths 1,4 --lanes 2 --batch-size 1 --steps 2 --run-ahead 1 --in-flight {in_flight}")
    generated = {event["rollout"]: event["versions"] for event in events if event.kind == "generated"}
    assert generated[1] == runs
    _, second = (event for event in events if event.kind == "taken")
    assert (second.at_s, second["rollouts"], second["lags"], second["token_lag"]) == (4.0, [1], [1], token_lag)


def test_keep_changes_no_time_and_no_batch():
    words = "--lanes 8 --batch-size 4 --steps 30 --run-ahead 2 --train-time 0.4 --sync-time 0.1"
    taken = {
        in_flight: [
            (event.at_s, event["rollouts"], event["token_lag"])
            for event in simulated(f"{words} --in-flight {in_flight}")
            if event.kind == "taken"
        ]
        for in_flight in ("pinned", "keep")
    }
    assert [what[:2] for what in taken["keep"]] == [what[:2] for what in taken["pinned"]]
    assert sum(what[2] for what in taken["keep"]) < sum(what[2] for what in taken["pinned"])


def test_the_parts_of_a_rollout_add_up_and_its_versions_rise():
    words = "--lanes 8 --batch-size 2 --steps 40 --run-ahead 3 --train-time 0.1 --in-flight keep"
    for event in simulated(words):
        if event.kind == "generated":
            versions = [version for version, _ in event["versions"]]
            assert versions == sorted(set(versions))
            assert all(tokens > 0 for _, tokens in event["versions"])
            assert sum(tokens for _, tokens in event["versions"]) == pytest.approx(event["tokens"])


# A simulated run


def test_a_simulated_run_is_told_from_beginning_to_end():
    events = simulated("--lengths 1 --lanes 2 --batch-size 2 --steps 1 --run-ahead 0 --evaluate.size 1")
    kinds = [event.kind for event in events]
    assert kinds[0] == "run"
    assert kinds[-1] == "ended"
    assert kinds.count("evaluated") == 2
    header = events[0].fields
    assert (header["lanes"], header["batch_size"], header["run_ahead"], header["steps"]) == (2, 2, 0.0, 1)
    assert (header["clock"], header["version"], header["in_flight"], header["lag_bound"]) == ("virtual", 0, "pinned", 0)


def test_two_simulations_of_one_configuration_are_one():
    words = "--lanes 8 --batch-size 4 --group-size 2 --steps 20 --run-ahead 1.5 --lengths lognormal:1"
    assert simulated(words) == simulated(words)
    assert simulated(words) != simulated(f"{words} --seed 1")


def test_two_schedules_meet_the_same_rollouts():
    lengths = {
        run_ahead: {
            event["rollout"]: event["tokens"]
            for event in simulated(f"--lanes 8 --batch-size 8 --steps 10 --run-ahead {run_ahead}")
            if event.kind == "generated"
        }
        for run_ahead in (0, 2)
    }
    both = lengths[0].keys() & lengths[2].keys()
    assert len(both) > 70
    assert all(lengths[2][rollout] == lengths[0][rollout] for rollout in both)
