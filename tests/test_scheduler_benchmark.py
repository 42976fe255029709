"""What `benchmarks/scheduler.py` compares is one schedule twice."""

import asyncio

import pytest

from benchmarks import scheduler
from headway import clock
from headway.config import resolve
from headway.program import drive, rules, sizes
from headway.simulate.doubles import Doubles, Times
from headway.simulate.workload import make_lengths
from headway.trace import Trace


@pytest.mark.parametrize("lanes", [1, 3, 16])
@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("run_ahead", [0, 1, 3])
@pytest.mark.parametrize("train_time", [0.125, 2.0])
def test_headway_and_the_model_in_simpy_take_the_same_batches_with_the_same_lags(
    lanes, batch_size, run_ahead, train_time
):
    case = scheduler.Case(lanes, batch_size, steps=12, run_ahead=run_ahead, train_time=train_time)
    taken = {}
    for name, simulate in scheduler.PROGRAMS.items():
        taken[name] = []
        simulate(case, lambda rollouts, lags, batches=taken[name]: batches.append((rollouts, lags)))
    assert len(taken["headway"]) == 12
    assert taken["headway"] == taken["simpy"]


@pytest.mark.parametrize("program", scheduler.PROGRAMS)
def test_the_benchmark_measures_each(program):
    measured = scheduler.measure(program, scheduler.Case(lanes=8, batch_size=8, steps=20))
    assert 20 * 8 <= measured["started"] <= 22 * 8
    assert measured["us"] == pytest.approx(measured["seconds"] / measured["started"] * 1e6)
    assert measured["seconds"] > 0


@pytest.mark.parametrize("rule", scheduler.RULES)
def test_every_rule_of_the_benchmark_runs(rule):
    words = tuple(word.format(batch=16) for word in scheduler.RULES[rule])
    batches = []
    scheduler.headway(
        scheduler.Case(lanes=16, batch_size=16, steps=5, run_ahead=2, rules=words),
        lambda rollouts, lags: batches.append(len(rollouts)),
    )
    assert batches == [16] * 5


RULES_THAT_KEEP_MUCH = ("--group-size=4", "--redundant=2", "--stragglers=drop", "--max-lag=2", "--deadline-s=50")


def test_nothing_grows_with_the_rollouts_that_were_trained():
    def held(steps):
        """How many things the ledger's collections and the loop's timers hold when a run of so many steps is over."""

        async def program():
            config = resolve(None, ["--lanes=24", "--batch-size=16", f"--steps={steps}", *RULES_THAT_KEEP_MUCH]).config
            settings = sizes(config)
            doubles = Doubles(make_lengths("exponential", 1.0, 0), Times(0.5), num_members=settings.num_members)
            ledger = await drive(
                config, doubles, settings, rules(config, simulated=True), Trace(), clock_name="virtual"
            )
            collections = [value for value in vars(ledger).values() if hasattr(value, "__len__")]
            heaps = [ledger.waiting._heap, asyncio.get_running_loop()._timers]
            return sum(map(len, [*collections, *heaps]))

        return clock.run(program(), virtual=True)

    assert held(400) < 1.5 * held(50) + 100
