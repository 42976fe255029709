"""Sweeps: which runs they are made of, what is refused, and what each run's figures say."""

from __future__ import annotations

import pytest

from headway import config, simulation, sweep
from headway.types import UserError
from tests.summaries import summary_of

HAND_SIZED = ("--lanes", "2", "--batch-size", "2", "--steps", "2", "--lengths", "1,3,1")


def refusal(*words, overrides=()):
    with pytest.raises(UserError) as refused:
        sweep.jobs(None, overrides, sweep.parse(words))
    return str(refused.value)


def simulated(*words, overrides=HAND_SIZED):
    return sweep.simulate(sweep.jobs(None, overrides, sweep.parse(words)))


@pytest.mark.parametrize(
    ("word", "key", "values"),
    [
        ("run_ahead=0..3", "schedule.run_ahead", ("0", "1", "2", "3")),
        ("run-ahead=2..2", "schedule.run_ahead", ("2",)),
        ("window=1..64..20", "schedule.window", ("1", "21", "41", "61")),
        ("schedule.order=finished,started", "schedule.order", ("finished", "started")),
        ("train_time=0.5, 1,0.5", "simulate.train_time", ("0.5", "1")),
        ("lengths=lognormal:1,constant", "simulate.lengths", ("lognormal:1", "constant")),
    ],
)
def test_words_are_read(word, key, values):
    assert sweep.parse([word]) == [sweep.Sweep(key, values)]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("run_ahed=1", "unknown key --run_ahed; the nearest valid key is schedule.run_ahead"),
        ("run_ahead", "--sweep run_ahead is not understood; it may be KEY=a..b"),
        ("run_ahead=", "is not understood"),
        ("run_ahead=0.5..2", "is not understood; it may be KEY=a..b (whole numbers)"),
        ("run_ahead=3..1", "--sweep run_ahead=3..1 is an empty range"),
        ("run_ahead=0..8..0", "is an empty range; it goes up, as in run_ahead=0..8..2"),
        ("run_ahead=0,,1", "has an empty value"),
        ("run_ahead=0..1000000000", "asks for 1000000001 runs, and at most 200"),
        ("run_ahead=0,-1", "--sweep, at run_ahead -1: --schedule.run-ahead = '-1'"),
        ("order=finished,window", "--sweep, at order window: command line: order window needs a number of groups"),
    ],
)
def test_a_word_that_makes_no_sweep_is_refused_with_the_reason(word, said):
    assert said in refusal(word)


def test_a_product_that_is_too_large_is_refused():
    assert "asks for 210 runs" in refusal("run_ahead=0..20", "seed=1..10")


def test_a_key_is_swept_once():
    assert "--sweep schedule.run_ahead is given 2 times" in refusal("run_ahead=1", "run-ahead=2")


def test_several_sweeps_multiply_and_the_last_changes_first():
    found = sweep.choices(sweep.parse(["run_ahead=0,1", "order=finished,started"]))
    assert [tuple(choice.values()) for choice in found] == [
        ("0", "finished"),
        ("0", "started"),
        ("1", "finished"),
        ("1", "started"),
    ]


def test_each_row_is_the_run_that_the_command_gives_by_itself():
    for row in simulated("run_ahead=0..2", "order=finished,started"):
        words = [f"--{key}={value}" for key, value in row.choice.items()]
        alone = summary_of(simulation.simulate(config.resolve(None, [*HAND_SIZED, *words]).config))
        assert {name: row.figures[name] for name in alone if name not in ("batches", "lags")} == {
            name: value for name, value in alone.items() if name not in ("batches", "lags")
        }


def test_the_figures_of_the_hand_sized_example():
    """Six units of time without run_ahead, four with it. r4 and r5, of length 1, are started and not trained."""
    synchronous, ahead = simulated("run_ahead=0,1")
    assert (synchronous.figures["speedup"], ahead.figures["speedup"]) == (1.0, 1.5)
    assert (synchronous.figures["lag_bound"], ahead.figures["lag_bound"]) == (0, None)
    assert (ahead.figures["trained_length"], ahead.figures["true_length"]) == (1.5, 8 / 6)
    assert ahead.figures["length_ratio"] == pytest.approx(1.125)


def test_the_true_length_is_of_what_was_started_however_often_and_however_it_ended():
    """All but the first are 9 long and most are interrupted; each counts once, with the length it would have had."""
    words = ("--lanes", "2", "--batch-size", "1", "--steps", "3", "--lengths", "2,9", "--train-time", "1")
    stopped = ("--max-lag", "1", "--stragglers", "interrupt")
    (row,) = simulated("run_ahead=4", overrides=(*words, *stopped))
    assert row.figures["true_length"] > row.figures["trained_length"]
    events = simulation.simulate(config.resolve(None, [*words, *stopped, "--run-ahead", "4"]).config)
    num_started = len({event["group"] for event in events if event.kind == "started"})
    assert row.figures["true_length"] == pytest.approx((2 + 9 * (num_started - 1)) / num_started)


def test_a_cap_on_lengths_is_part_of_the_true_length():
    (row,) = simulated("run_ahead=0", overrides=(*HAND_SIZED, "--longest", "2"))
    assert row.figures["true_length"] == (1 + 2 + 1 + 1) / 4


def test_the_first_steps_can_be_left_out():
    whole, steady = simulated("skip_steps=0,1")
    assert (whole.figures["measured_from"], steady.figures["measured_from"]) == (0.0, 3.0)
    with pytest.raises(UserError, match=r"--sweep, at skip_steps 2: .*leave nothing to measure"):
        simulated("skip_steps=2")


def test_the_result_is_the_same_on_all_cores(monkeypatch):
    done = []
    expected = simulated("run_ahead=0,1", "seed=1,2")
    monkeypatch.setattr(sweep, "PARALLEL_FROM", 0)
    jobs = sweep.jobs(None, HAND_SIZED, sweep.parse(["run_ahead=0,1", "seed=1,2"]))
    assert sweep.simulate(jobs, lambda: done.append(1)) == expected
    assert len(done) == 4


def test_an_error_in_another_process_is_the_users_error(monkeypatch):
    monkeypatch.setattr(sweep, "PARALLEL_FROM", 0)
    with pytest.raises(UserError, match="at skip_steps 9: 9 skipped train steps"):
        simulated("skip_steps=0,9")


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        ((), {"schedule.run_ahead": "1", "schedule.order": "finished"}),
        (("--run-ahead", "0"), {"schedule.run_ahead": "0", "schedule.order": "finished"}),
        (("--run-ahead", "7", "--order", "started"), {"schedule.run_ahead": "0", "schedule.order": "started"}),
    ],
)
def test_the_run_that_is_most_like_the_one_without_a_sweep(overrides, chosen):
    jobs = sweep.jobs(None, overrides, sweep.parse(["run_ahead=0..2", "order=finished,started"]))
    assert jobs[sweep.without_sweep(jobs, None, overrides)].choice == chosen


def test_settings_that_are_valid_with_swept_values_alone():
    jobs = sweep.jobs(None, ("--window", "8"), sweep.parse(["order=window"]))
    assert sweep.without_sweep(jobs, None, ("--window", "8")) == 0


def test_orders_are_compared_with_a_window_that_is_for_one_of_them():
    swept = sweep.parse(["order=finished,started,window"])
    jobs = sweep.jobs(None, ["--lanes=8", "--batch-size=8", "--steps=3", "--window=4"], swept)
    assert [job.resolved.config.schedule.window for job in jobs] == [None, None, 4]
    assert [run.figures["lag_bound"] for run in sweep.simulate(jobs)] == [None, 1, 2]
