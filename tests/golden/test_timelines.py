"""Worked schedules through the real command line, character for character and figure for figure."""

import json

import pytest
from typer.testing import CliRunner

from headway.cli import app

HAND_SIZED = "--lengths 1,3,1 --lanes 2 --batch-size 2 --steps 2"


def headway(words):
    result = CliRunner().invoke(app, words.split())
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def figures(words):
    return json.loads(headway(f"simulate {words} --json"))


# The hand-sized example


def test_the_timeline_without_run_ahead():
    assert headway(f"simulate {HAND_SIZED} --run-ahead 0 --timeline").splitlines()[:3] == [
        "lane A   [r0]............[r2]....",
        "lane B   [----r1----]....[r3]....",
        "trainer  ............[s0]....[s1]",
    ]


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_the_timeline_with_run_ahead(run_ahead):
    assert headway(f"simulate {HAND_SIZED} --run-ahead {run_ahead} --timeline").splitlines()[:3] == [
        "lane A   [r0][r2][r3][r4]",
        "lane B   [----r1----][r5]",
        "trainer  ........[s0][s1]",
    ]


def share(rollouts, tokens, token_share, lane_time, lane_share):
    names = ("rollouts", "tokens", "token_share", "lane_time", "lane_share")
    return dict(zip(names, (rollouts, tokens, token_share, lane_time, lane_share), strict=True))


def test_the_figures_without_run_ahead():
    """Lengths 1, 3, 1, 1; two lanes stand idle for 6 of 12."""
    assert figures(f"{HAND_SIZED} --run-ahead 0") == {
        "total": 6.0,
        "measured_from": 0.0,
        "lane_utilization": 0.5,
        "trainer_utilization": 2 / 6,
        "throughput": 4 / 6,
        "mean_lag": 0.0,
        "max_lag": 0,
        "token_lag": 0.0,
        "over_run_ahead": 0.0,
        "lag_bound": 0,
        "trained_length": 6 / 4,
        "started_length": 6 / 4,
        "goodput": {
            "tokens": 6.0,
            "lane_time": 12.0,
            "classes": {"trained": share(4, 6.0, 1.0, 6.0, 0.5), "idle": share(0, 0.0, 0.0, 6.0, 0.5)},
            "of_all": {},
        },
        "batches": [[0, 1], [2, 3]],
        "lags": [[0, 0], [0, 0]],
    }


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_the_figures_with_run_ahead(run_ahead):
    """r1 (3 long) and r3 (1) are trained at lag 1, r0 and r2 at 0; r4 and r5 are done as the run ends."""
    assert figures(f"{HAND_SIZED} --run-ahead {run_ahead}") == {
        "total": 4.0,
        "measured_from": 0.0,
        "lane_utilization": 1.0,
        "trainer_utilization": 0.5,
        "throughput": 1.0,
        "mean_lag": 0.5,
        "max_lag": 1,
        "token_lag": (3 + 1) / (1 + 1 + 3 + 1),
        "over_run_ahead": 0.0,
        "lag_bound": None,
        "trained_length": 6 / 4,
        "started_length": 8 / 6,
        "goodput": {
            "tokens": 8.0,
            "lane_time": 8.0,
            "classes": {"trained": share(4, 6.0, 0.75, 6.0, 0.75), "waiting": share(2, 2.0, 0.25, 2.0, 0.25)},
            "of_all": {},
        },
        "batches": [[0, 2], [1, 3]],
        "lags": [[0, 0], [1, 1]],
    }


def test_the_lines_for_people():
    assert headway(f"simulate {HAND_SIZED} --run-ahead 1").splitlines() == [
        "total 4  lane utilisation 100.0%  trainer utilisation 50.0%  throughput 1  lag mean 0.5 max 1",
        "lag has no bound (order finished: a rollout may be overtaken by any number of others); token-weighted mean "
        "0.667; above run_ahead in 0.0 % of the trained rollouts",
        "mean length trained 1.5, of all that ended 1.333 (ratio 1.125)",
        "tokens: trained 75.0 %, waiting 25.0 %",
        "lane time: trained 75.0 %, waiting 25.0 %",
    ]


def test_the_timeline_comes_before_the_figures():
    lines = headway(f"simulate {HAND_SIZED} --timeline").splitlines()
    assert lines[3].startswith("total 4 ")


# More cases, each: words, then per run_ahead: total, lane and trainer utilisation, mean and max lag, batches, lags

THREE_LANES = "--lanes 3 --batch-size 2 --train-time 1 --steps 4 --lengths 2,1,4,1,2,1,3,1"
LONG_STEPS = "--lanes 4 --batch-size 4 --train-time 2 --steps 3 --lengths 1,2,3,8,1"
STRAGGLER = "--lanes 3 --batch-size 2 --train-time 1 --steps 16 --lengths 1,1,20,1"
TRAINER_BOUND = "--lanes 4 --batch-size 2 --train-time 4 --steps 6 --lengths 1"

CASES = [
    (HAND_SIZED, 0, 6, 0.5000, 0.3333, 0.0000, 0, "0,1; 2,3", "0,0; 0,0"),
    (HAND_SIZED, 1, 4, 1.0000, 0.5000, 0.5000, 1, "0,2; 1,3", "0,0; 1,1"),
    (HAND_SIZED, 2, 4, 1.0000, 0.5000, 0.5000, 1, "0,2; 1,3", "0,0; 1,1"),
    (THREE_LANES, 0, 15, 0.3333, 0.2667, 0.0000, 0, "1,0; 3,2; 5,4; 7,6", "0,0; 0,0; 0,0; 0,0"),
    (THREE_LANES, 1, 8, 0.7083, 0.5000, 0.6250, 1, "1,0; 3,2; 5,4; 7,8", "0,0; 1,1; 1,1; 1,0"),
    (THREE_LANES, 2, 6, 1.0000, 0.6667, 1.0000, 2, "1,0; 3,5; 2,4; 7,8", "0,0; 1,1; 2,2; 1,1"),
    (THREE_LANES, 3, 6, 1.0000, 0.6667, 1.0000, 2, "1,0; 3,5; 2,4; 7,8", "0,0; 1,1; 2,2; 1,1"),
    (LONG_STEPS, 0, 16, 0.3438, 0.3750, 0.0, 0, "0,1,2,3; 4,5,6,7; 8,9,10,11", "0,0,0,0; 0,0,0,0; 0,0,0,0"),
    (LONG_STEPS, 1, 10, 0.6500, 0.6000, 0.6667, 2, "0,1,4,2; 5,6,7,8; 9,10,11,3", "0,0,0,0; 1,1,1,0; 1,1,1,2"),
    (LONG_STEPS, 2, 9, 0.8333, 0.6667, 0.9167, 2, "0,1,4,2; 5,6,7,8; 9,10,11,12", "0,0,0,0; 1,1,1,1; 2,2,2,1"),
    (
        STRAGGLER,
        0,
        *(51, 0.3333, 0.3137, 0.0000, 0),
        "0,1; 3,2; 4,5; 6,7; 8,9; 10,11; 12,13; 14,15; 16,17; 18,19; 20,21; 22,23; 24,25; 26,27; 28,29; 30,31",
        "0,0; 0,0; 0,0; 0,0; 0,0; 0,0; 0,0; 0,0; 0,0; 0,0; 0,0; 0,0; 0,0; 0,0; 0,0; 0,0",
    ),
    (
        STRAGGLER,
        1,
        *(26, 0.6795, 0.6154, 0.9375, 10),
        "0,1; 3,4; 5,6; 7,8; 9,10; 11,12; 13,14; 15,16; 17,18; 19,20; 21,2; 22,23; 24,25; 26,27; 28,29; 30,31",
        "0,0; 1,0; 1,0; 1,0; 1,0; 1,0; 1,0; 1,0; 1,0; 1,0; 1,10; 1,1; 1,1; 1,1; 1,1; 1,1",
    ),
    (
        STRAGGLER,
        2,
        *(17, 1.0000, 0.9412, 0.9375, 1),
        "0,1; 3,4; 5,6; 7,8; 9,10; 11,12; 13,14; 15,16; 17,18; 19,20; 21,22; 23,24; 25,26; 27,28; 29,30; 31,32",
        "0,0; 1,1; 1,1; 1,1; 1,1; 1,1; 1,1; 1,1; 1,1; 1,1; 1,1; 1,1; 1,1; 1,1; 1,1; 1,1",
    ),
    (TRAINER_BOUND, 0, 30, 0.1000, 0.8000, 0.0, 0, "0,1; 2,3; 4,5; 6,7; 8,9; 10,11", "0,0; 0,0; 0,0; 0,0; 0,0; 0,0"),
    (TRAINER_BOUND, 1, 25, 0.1400, 0.9600, 0.8333, 1, "0,1; 2,3; 4,5; 6,7; 8,9; 10,11", "0,0; 1,1; 1,1; 1,1; 1,1; 1,1"),
    (TRAINER_BOUND, 2, 25, 0.1600, 0.9600, 1.5000, 2, "0,1; 2,3; 4,5; 6,7; 8,9; 10,11", "0,0; 1,1; 2,2; 2,2; 2,2; 2,2"),
    (TRAINER_BOUND, 3, 25, 0.1800, 0.9600, 2.0000, 3, "0,1; 2,3; 4,5; 6,7; 8,9; 10,11", "0,0; 1,1; 2,2; 3,3; 3,3; 3,3"),
]


def table(text):
    return [[int(number) for number in step.split(",")] for step in text.split("; ")]


@pytest.mark.parametrize(
    ("words", "run_ahead", "total", "lanes", "trainer", "mean_lag", "max_lag", "batches", "lags"), CASES
)
def test_worked_schedules(words, run_ahead, total, lanes, trainer, mean_lag, max_lag, batches, lags):
    result = figures(f"{words} --run-ahead {run_ahead}")
    assert (result["total"], result["max_lag"]) == (total, max_lag)
    shares = [round(result[name], 4) for name in ("lane_utilization", "trainer_utilization", "mean_lag")]
    assert shares == [lanes, trainer, mean_lag]
    assert result["batches"] == table(batches)
    assert result["lags"] == table(lags)


# Long runs of exponential lengths against published figures of the model (64 lanes, batches of 64, steps of 0.5)


@pytest.mark.parametrize(
    ("run_ahead", "throughput", "mean_lag"), [(0, 12.14, 0.0), (1, 57.86, 1.0), (2, 63.99, 1.5), (4, 63.99, 1.5)]
)
def test_a_long_run_of_exponential_lengths(run_ahead, throughput, mean_lag):
    """Without run-ahead 64 / (H_64 + 0.5) = 12.2; saturated, 64 a unit of time at a mean lag of 64/64 + 0.5."""
    words = "--lanes 64 --batch-size 64 --train-time 0.5 --steps 100 --lengths exponential --seed 1"
    result = figures(f"{words} --run-ahead {run_ahead}")
    assert result["throughput"] == pytest.approx(throughput, rel=0.05)
    assert result["mean_lag"] == pytest.approx(mean_lag, rel=0.05)


# What a person can mend


def test_a_mistake_is_told_and_nothing_is_drawn(capsys):
    from headway.types import UserError

    for words, message in [
        ("simulate --run-ahed 1", "unknown key --run-ahed; the nearest valid key is schedule.run_ahead"),
        ("simulate --lengths 1,x", "simulate.lengths '1,x' is not understood"),
        ("simulate nowhere.toml", "there is no recipe nowhere.toml"),
        (f"simulate {HAND_SIZED} --steps 999 --timeline", "--timeline draws runs of at most 100 units of time"),
    ]:
        with pytest.raises(UserError, match=message):
            headway(words)
    assert capsys.readouterr().out == ""
