"""An engine and a trainer on one machine, by hand: who slows whom down, and for how long."""

import asyncio

import pytest

from headway import clock, simulation
from headway.config import resolve
from headway.reports.summary import summarise, timeline
from headway.simulate.contention import Contention
from headway.simulate.engines import Machine, Prefill, Roofline
from headway.types import UserError

SECOND = Machine(overhead_s=1.0, weight_bytes=1e-9, kv_bytes_per_token=0.0, bandwidth_bytes_per_s=1.0)
"""A decode step takes a second."""


def ends(*, tokens, train_at_s, train_s, slowdowns=(2.0, 2.0), units=1, prefill=None):
    """Of one rollout from 0 on, and of one train step -> when each ends."""

    async def program():
        contention = Contention(engine=slowdowns[0], trainer=slowdowns[1], units=units)
        engine = Roofline(SECOND, prefill or Prefill(), contention)
        time = asyncio.get_running_loop().time

        async def generate():
            await engine.decode(0, tokens, 0.0)
            return time()

        async def train():
            await asyncio.sleep(train_at_s)
            await contention.train(train_s)
            return time()

        return await asyncio.gather(generate(), train())

    return clock.run(program(), virtual=True)


def test_both_go_half_as_fast_while_both_work():
    """From 3 to 11 the trainer does its 4 s and the engine 4 tokens; the last 3 tokens take a second each."""
    assert ends(tokens=10, train_at_s=3, train_s=4) == pytest.approx([14, 11])


def test_a_micro_batch_keeps_the_share_that_it_began_with():
    """The engine's last 1.5 tokens take until 6. A train step of 3 s takes 6 as one micro-batch; of three, the last
    begins at 7, when the engine has ended.
    """
    assert ends(tokens=4.5, train_at_s=3, train_s=3) == pytest.approx([6, 9])
    assert ends(tokens=4.5, train_at_s=3, train_s=3, units=3) == pytest.approx([6, 8])


def test_what_is_being_prefilled_is_slowed_down_too():
    """A prompt of 6 s: 2 s are done when training begins, then 1 s of training takes 2 and so does the next of it."""
    prefill = Prefill(prompt_tokens=6.0, tokens_per_s=1.0)
    assert ends(tokens=1, train_at_s=2, train_s=1, prefill=prefill) == pytest.approx([8, 4])


def test_a_trainer_beside_an_idle_engine_is_not_slowed_down():
    assert ends(tokens=1, train_at_s=2, train_s=3) == pytest.approx([1, 5])


def test_each_has_a_slowdown_of_its_own():
    """Three seconds of training take 6; in those the engine gets 5 tokens, at 1.2 s each."""
    assert ends(tokens=10, train_at_s=0, train_s=3, slowdowns=(1.2, 2.0)) == pytest.approx([11, 6])


WORDS = (
    "--simulate.engine roofline --simulate.overhead-s 1 --simulate.weight-bytes 1 --simulate.kv-bytes-per-token 0 "
    "--simulate.bandwidth-bytes-per-s 1e9 --simulate.lengths constant --simulate.mean-length 8 --simulate.train-time 6 "
    "--schedule.batch-size 4 --schedule.group-size 1 --generate.lanes 4 --run.steps 40 --simulate.skip-steps 8"
)


SHARED = ("--simulate.engine-slowdown", "2", "--simulate.trainer-slowdown", "2")


def throughput(*words):
    events = simulation.simulate(resolve(None, [*WORDS.split(), *words]).config)
    return summarise(timeline(events), events)["throughput"]


@pytest.mark.parametrize(
    ("words", "step_s"),
    [
        (["--schedule.run-ahead", "0"], 14),
        (["--schedule.run-ahead", "0", *SHARED], 14),
        (["--schedule.run-ahead", "1"], 8),
        (["--schedule.run-ahead", "1", *SHARED], 14),
        (["--schedule.run-ahead", "1", "--simulate.engine-slowdown", "1.5", "--simulate.trainer-slowdown", "1.5"], 11),
    ],
    ids=["by turns", "by turns, shared", "overlapped", "overlapped, shared", "overlapped, partly shared"],
)
def test_on_a_shared_machine_overlap_gains_what_is_not_shared(words, step_s):
    """A batch takes 8 s to generate and 6 s to train: 14 by turns, 8 beside each other, and on one machine again 14;
    at 1.5 the 6 s of training and 6 of the 8 take 9, and 2 are left.
    """
    assert 4 / throughput(*words) == pytest.approx(step_s, rel=0.02)


def test_lanes_have_no_contention():
    with pytest.raises(UserError, match=r"simulate\.engine_slowdown does nothing with simulate\.engine lanes"):
        resolve(None, ["--simulate.engine-slowdown", "2"])
