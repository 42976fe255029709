"""Engine models by hand: who gets on how fast, and what it costs to compute a cache again."""

import asyncio
import math
import random

import pytest

from headway import clock, simulation
from headway.config import resolve
from headway.simulate.engines import ConstantRate, Machine, Prefill, Roofline
from headway.types import UserError

UNIT = Machine(overhead_s=1.0, weight_bytes=2.0, kv_bytes_per_token=0.0, bandwidth_bytes_per_s=2.0)
"""A step takes 2 s, whatever is in flight."""

GROWING = Machine(overhead_s=1.0, weight_bytes=2.0, kv_bytes_per_token=1.0, bandwidth_bytes_per_s=2.0)
"""A step takes 2 s, and half a second for each token in the caches."""


def played(make_engine, starts, stops=(), recomputes=(), asked=()):
    """Rollouts (key, start time, tokens, context) -> {key: (end time, tokens sampled)}, and what `sampled` said at
    `asked` (time, key)."""
    said = []

    async def program():
        engine = make_engine()
        time = asyncio.get_running_loop().time
        ended = {}

        async def rollout(key, at_s, num_tokens, context):
            await asyncio.sleep(at_s)
            sampled = await engine.decode(key, num_tokens, context)
            ended[key] = (time(), sampled)

        async def stop(at_s, key):
            await asyncio.sleep(at_s)
            engine.stop(key)

        async def recompute(at_s):
            await asyncio.sleep(at_s)
            engine.recompute()

        async def ask(at_s, key):
            await asyncio.sleep(at_s)
            said.append(engine.sampled(key))

        await asyncio.gather(
            *(rollout(*start) for start in starts),
            *(stop(*what) for what in stops),
            *(recompute(at_s) for at_s in recomputes),
            *(ask(*what) for what in asked),
        )
        return ended

    return clock.run(program(), virtual=True), said


# Lanes


def test_a_lane_decodes_one_token_per_unit_of_time():
    ended, said = played(ConstantRate, [(0, 0, 3.0, 0), (1, 1, 5.0, 9)], asked=[(2.5, 0), (2.5, 1)])
    assert ended == {0: (3.0, 3.0), 1: (6.0, 5.0)}
    assert said == [2.5, 1.5]


def test_a_lane_may_have_a_pace_of_its_own():
    ended, said = played(lambda: ConstantRate(paces_s={1: 0.5}), [(0, 0, 4.0, 0), (1, 0, 4.0, 0)], asked=[(1.0, 1)])
    assert ended == {0: (4.0, 4.0), 1: (2.0, 4.0)}
    assert said == [2.0]


@pytest.mark.parametrize("make_engine", [ConstantRate, lambda: Roofline(GROWING)])
def test_a_stopped_rollout_returns_what_there_is_and_a_late_stop_does_nothing(make_engine):
    ended, said = played(make_engine, [(0, 0, 1.0, 0), (1, 0, 100.0, 0)], stops=[(4.0, 1), (40.0, 0), (41.0, 1)])
    assert ended[1][0] == 4.0
    assert 0 < ended[1][1] < 100
    assert said == []


def test_each_lane_prefills_its_own_context():
    """Prompt 4 and 2 tokens from before, at 4 tokens per unit of time: 1.5 before the first new token."""
    ended, said = played(lambda: ConstantRate(Prefill(4.0, 4.0)), [(0, 0, 3.0, 2.0)], asked=[(1.0, 0), (2.5, 0)])
    assert ended == {0: (4.5, 3.0)}
    assert said == [0.0, 1.0]


def test_a_lane_computes_its_cache_again():
    """From 1 on, 2 tokens at 3; then the prompt and these, 6 tokens, take 1.5, and the other 3 tokens follow."""
    ended, said = played(
        lambda: ConstantRate(Prefill(4.0, 4.0)), [(0, 0, 5.0, 0.0)], recomputes=[3.0], asked=[(3.0, 0), (4.5, 0)]
    )
    assert ended == {0: (7.5, 5.0)}
    assert said == [2.0, 2.0]


# Roofline


def test_the_time_of_steps_has_a_closed_form_and_an_inverse():
    """Two rollouts with 10 tokens in all: a step takes 1 + (2 + 10)/2 = 7, and one more for each step done."""
    assert GROWING.step_s(10, num_rollouts=2) == 7.0
    assert GROWING.decode_s(4, context_tokens=10, num_rollouts=2) == 4 * 7 + 1 * 4 * 4 / 2
    assert GROWING.steps_in(36.0, context_tokens=10, num_rollouts=2) == pytest.approx(4.0)
    assert UNIT.steps_in(36.0, context_tokens=10, num_rollouts=2) == 18.0


def test_steps_of_a_stretch_add_up_wherever_it_is_divided():
    rng = random.Random(0)
    for _ in range(100):
        machine = Machine(*(rng.uniform(0.1, 3) for _ in range(5)))
        first, second, context, n = rng.uniform(0, 50), rng.uniform(0, 50), rng.uniform(0, 500), rng.randint(1, 64)
        whole = machine.decode_s(first + second, context, n)
        parts = machine.decode_s(first, context, n) + machine.decode_s(second, context + n * first, n)
        assert whole == pytest.approx(parts)
        assert machine.steps_in(whole, context, n) == pytest.approx(first + second)


def test_a_rollout_may_take_time_of_its_own():
    """Three of them, half a second each, beside 1 s and (2 + 10) / 2 s."""
    machine = Machine(1.0, 2.0, 1.0, 2.0, rollout_s=0.5)
    assert machine.step_s(10, num_rollouts=3) == 8.5
    assert machine.steps_in(8.5 * 2, context_tokens=10, num_rollouts=0) > 2


def test_the_fluid_is_near_the_sum_over_whole_steps():
    """Half a token per rollout and step apart: sum over j < m of step_s(C + n j), against the integral."""
    steps, context, n = 1000, 64_000.0, 64
    machine = Machine(0.001, 3.09e9, 28_672, 2.68e12)
    summed = math.fsum(machine.step_s(context + n * step, n) for step in range(steps))
    half_tokens = machine.kv_bytes_per_token * n * steps / 2 / machine.bandwidth_bytes_per_s
    assert machine.decode_s(steps, context, n) == pytest.approx(summed + half_tokens, rel=1e-9)
    assert half_tokens / summed < 1e-3


def test_two_rollouts_by_hand():
    """r0 of 2 tokens and r1 of 4, from 0, no context. Both: m steps take 2 m + m^2 / 2, so r0 ends at 6.

    Then r1 alone has 2 tokens of context: 3 m + m^2 / 4 for its last two, 7 more.
    """
    ended, said = played(lambda: Roofline(GROWING), [(0, 0, 2.0, 0), (1, 0, 4.0, 0)], asked=[(2.5, 1)])
    assert ended == {0: (6.0, 2.0), 1: (13.0, 4.0)}
    assert said == [pytest.approx(1.0)]


def test_who_joins_slows_the_others():
    """r0 alone for its first token, 2 + 1/4; then r1 comes with 3 tokens of context.

    1 + 3 tokens: a step takes 4 s, and r0's other two end after 8 + 2; r1 goes on alone from 3 + 2 tokens.
    """
    ended, _ = played(lambda: Roofline(GROWING), [(0, 0, 3.0, 0), (1, 2.25, 3.0, 3.0)])
    assert ended[0] == (pytest.approx(12.25), 3.0)
    assert ended[1] == (pytest.approx(12.25 + 4.5 + 0.25), 3.0)


def test_who_is_stopped_frees_the_others():
    """Both sample 1 token in 2.5; then r1 is stopped, and r0 alone has 1 token: 2.5 m + m^2 / 4 for its last two."""
    ended, _ = played(lambda: Roofline(GROWING), [(0, 0, 3.0, 0), (1, 0, 9.0, 0)], stops=[(2.5, 1)])
    assert ended[1] == (2.5, pytest.approx(1.0))
    assert ended[0] == (pytest.approx(2.5 + 6.0), 3.0)


def test_a_prefill_has_the_engine_for_itself():
    """Constant steps of 2 s. r0 prefills 4 tokens in 1 s and has sampled 1 token at 3, when r1 needs 8 in 2 s.

    At 5 both go on; r0 ends at 7, r1 at 9.
    """
    engine = lambda: Roofline(UNIT, Prefill(4.0, 4.0))  # noqa: E731
    ended, said = played(engine, [(0, 0, 2.0, 0.0), (1, 3.0, 2.0, 4.0)], asked=[(0.5, 0), (4.0, 0), (5.0, 0)])
    assert ended == {0: (7.0, 2.0), 1: (9.0, 2.0)}
    assert said == [0.0, 1.0, 1.0]


def test_a_roofline_computes_all_caches_again():
    """Two rollouts at 5: 2 x (4 + 1) tokens at 4 per s take 2.5 s before the last token of each."""
    engine = lambda: Roofline(UNIT, Prefill(4.0, 4.0))  # noqa: E731
    ended, _ = played(engine, [(0, 0, 2.0, 0.0), (1, 0, 2.0, 0.0)], recomputes=[4.0])
    assert ended == {0: (8.5, 2.0), 1: (8.5, 2.0)}


def test_an_idle_roofline_starts_afresh():
    ended, _ = played(lambda: Roofline(GROWING), [(0, 0, 2.0, 0), (1, 100.0, 2.0, 0)])
    assert ended == {0: (5.0, 2.0), 1: (105.0, 2.0)}


def test_a_roofline_agrees_with_a_fine_grained_oracle():
    """Random arrivals, lengths and stops, against small steps of time."""
    rng = random.Random(1)
    machine = Machine(0.5, 1.0, 0.05, 2.0)
    starts = [(key, rng.uniform(0, 30), rng.uniform(1, 12), rng.uniform(0, 5)) for key in range(12)]
    stops = [(rng.uniform(5, 40), key) for key in range(4)]
    ended, _ = played(lambda: Roofline(machine), starts, stops)
    expected = _in_small_steps(machine, starts, {key: at_s for at_s, key in stops})
    for key, (at_s, sampled) in expected.items():
        assert ended[key][0] == pytest.approx(at_s, abs=0.02)
        assert ended[key][1] == pytest.approx(sampled, abs=0.02)


def _in_small_steps(machine, starts, stops, dt=0.002):
    sampled = {key: 0.0 for key, *_ in starts}
    ended, number = {}, 0
    while len(ended) < len(starts):
        now = number * dt
        for key, at_s, num_tokens, _ in starts:
            done = sampled[key] >= num_tokens or stops.get(key, math.inf) <= now
            if key not in ended and at_s <= now and done:
                ended[key] = (now, min(sampled[key], num_tokens))
        running = [(key, context) for key, at_s, _, context in starts if at_s <= now and key not in ended]
        step_s = machine.step_s(sum(context + sampled[key] for key, context in running), len(running))
        for key, _ in running:
            sampled[key] += dt / step_s
        number += 1
    return ended


# In a run


def simulated(words):
    return simulation.simulate(resolve(None, words.split()).config)


@pytest.mark.parametrize(
    "schedule", ["--run-ahead 0", "--run-ahead 1.5 --group-size 2", "--run-ahead 0.5 --overlap false"]
)
def test_without_a_cache_to_read_a_roofline_is_lanes(schedule):
    """A step of 1 s whatever is in flight: the same events, one by one."""
    words = f"--lanes 6 --batch-size 8 --steps 12 --lengths 1,3,2,5,0.5,4 --train-time 1.5 --sync-time 0.25 {schedule}"
    roofline = "--engine roofline --overhead-s 0.5 --weight-bytes 4 --bandwidth-bytes-per-s 8 --kv-bytes-per-token 0"
    assert simulated(f"{words} {roofline}") == simulated(words)


def test_new_weights_that_recompute_cost_a_prefill():
    """r0 ends at 4 and is trained by 5, when r1 has 5 of its 6 tokens: at 10 per unit of time they take 0.5."""
    words = "--lengths 4,6,20 --lanes 2 --batch-size 1 --steps 2 --run-ahead 1 --prefill-tokens-per-s 10"

    def end_of_r1(in_flight):
        events = simulated(f"{words} --in-flight {in_flight}")
        return next(event.at_s for event in events if event.kind == "generated" and event["rollout"] == 1)

    assert end_of_r1("keep") == 6.0
    assert end_of_r1("recompute") == 6.5


def test_a_rollout_that_goes_on_prefills_what_it_had():
    """It pauses at 2 and goes on with the next iteration: 2 tokens at 4 per unit of time before the other two."""
    words = "--lengths 4 --lanes 1 --batch-size 1 --steps 1 --run-ahead 0 --iteration-tokens 2 --train-time 1"
    assert simulated(words)[-1].at_s == 5.0
    assert simulated(f"{words} --prefill-tokens-per-s 4")[-1].at_s == 5.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--overhead-s 1", "simulate.overhead_s does nothing with simulate.engine lanes"),
        ("--weight-bytes 1 --engine lanes", "simulate.weight_bytes does nothing with simulate.engine lanes"),
        ("--prompt-tokens 5", "simulate.prompt_tokens does nothing with simulate.engine lanes"),
        ("--engine roofline --weight-bytes 0", "greater than 0"),
    ],
)
def test_what_an_engine_would_ignore_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        resolve(None, words.split())


def test_a_roofline_is_qwen_on_an_h100_unless_told():
    filled = resolve(None, ["--engine", "roofline", "--overhead-s", "0.015"]).config.simulate
    assert (filled.overhead_s, filled.weight_bytes, filled.kv_bytes_per_token) == (0.015, 2 * 1_543_714_304, 28_672)
    assert filled.bandwidth_bytes_per_s == pytest.approx(0.8 * 3.35e12)
    lanes = resolve(None, ["--prefill-tokens-per-s", "9", "--prompt-tokens", "5"]).config.simulate
    assert (lanes.prompt_tokens, lanes.overhead_s) == (5, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overhead_s", "sync", "april", "continuous"),
    [
        (0.001, 5_385, {1.25: 1.432, 1.5: 1.591, 2.0: 1.722}, 1.643),
        (0.015, 1_150, {1.25: 1.966, 1.5: 2.582, 2.0: 3.430}, 2.620),
    ],
)
def test_what_continuous_batching_and_april_give_over_static_batches(overhead_s, sync, april, continuous):
    """Tokens per second of Qwen2.5-1.5B on an H100 with 64 answers of mean 9,277 (sigma 0.8, cut at 27,648).

    Beside an independent step-by-step simulation of the same roofline. Over-sampling (APRIL, arXiv 2509.18521) goes on
    with a rollout in the next iteration, after a prefill: 160,000 tokens per second are half of 989 TFLOPS at 2 FLOP
    per parameter.
    """
    words = (
        f"--engine roofline --overhead-s {overhead_s} --lengths lognormal:0.8 --mean-length 9277 --longest 27648 "
        "--batch-size 64 --train-time 0 --prefill-tokens-per-s 160000"
    )

    def rate(schedule):
        events = simulated(f"{words} {schedule}")
        tokens = {event["rollout"]: event["tokens"] for event in events if event.kind == "generated"}
        trained = [tokens[rollout] for event in events if event.kind == "taken" for rollout in event["rollouts"]]
        return sum(trained) / events[-1].at_s

    static = rate("--lanes 64 --run-ahead 0 --steps 40")
    assert static == pytest.approx(sync, rel=0.07)
    assert rate("--lanes 64 --run-ahead 100 --steps 120") / static == pytest.approx(continuous, rel=0.05)
    for factor, gain in april.items():
        over = f"--lanes {64 * factor:g} --run-ahead {factor - 1} --overlap false --steps 100"
        assert rate(over) / static == pytest.approx(gain, rel=0.05)
