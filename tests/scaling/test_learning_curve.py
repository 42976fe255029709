"""Learning curves as they are read: what a run's metrics mean, which rows a resume took back, what tables hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.reports.metrics import JsonLines, StepMetrics
from headway.scaling.amount import Amount, parse_amount, parse_number
from headway.scaling.learning_curve import LearningCurve, read
from headway.trace import Event
from headway.types import UserError

TOKENS = 100


def step(version: int, reward: float = 0.5, lag: float = 0.0, **more) -> dict:
    facts = {"version": version, "at_s": 2.0 * version, "step_s": 2.0, "token_lag": lag, "trained_tokens": TOKENS}
    return {**facts, "reward_mean": reward, "reward_std": 0.4, "num_rollouts": 64, **more}


def evaluation(version: int, accuracy: float = 0.5, num: int = 100) -> dict:
    return {"version": version, "at_s": 2.0 * version, "evaluated": num, "greedy_accuracy": accuracy}


def write_run(folder: Path, rows: list[dict], ending: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows) + ending
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def points(curve: LearningCurve) -> list[tuple[float, float]]:
    return [(point.compute, point.reward) for point in curve.points]


def refusal(*paths: Path, **axes: str) -> str:
    with pytest.raises(UserError) as refused:
        read(paths, **axes)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ---- runs


def test_a_run_as_headway_writes_it(tmp_path):
    """Its rows come from the writer of every run, so that neither side can change alone."""
    rows = JsonLines(tmp_path / "metrics.jsonl")
    listener = StepMetrics(rows)
    listener(Event("run", 0.0, {"max_lag": None}))
    listener(Event("evaluated", 0.5, {"version": 0, "num": 4, "num_correct": 1, "mean_reward": 0.25}))
    for version in range(1, 8):
        listener(Event("taken", version - 0.5, {"lags": [0], "token_lag": 0.0, "rollouts": []}))
        metrics = {"trained_tokens": 10, "reward_mean": version / 10, "reward_std": 0.1, "num_rollouts": 4}
        listener(Event("trained", float(version), {"version": version, "metrics": metrics}))
    rows.close()
    (curve,) = read([tmp_path])
    assert (curve.x, curve.y, curve.ceiling) == ("trained_tokens", "reward_mean", None)
    assert points(curve) == [(10.0 * before, (before + 1) / 10) for before in range(7)]
    (held_out,) = read([tmp_path], y="greedy_accuracy", x="seconds")
    assert (points(held_out), held_out.ceiling) == ([(0.0, 0.25)], 1.0)


def test_held_out_accuracy_is_the_default_if_every_run_was_evaluated_often_enough(tmp_path):
    often = write_run(
        tmp_path / "often", [evaluation(0), *(row for v in range(1, 6) for row in (step(v), evaluation(v)))]
    )
    seldom = write_run(tmp_path / "seldom", [evaluation(0), *map(step, range(1, 8))])
    assert [curve.y for curve in read([often])] == ["greedy_accuracy"]
    assert [curve.y for curve in read([often, seldom])] == ["reward_mean", "reward_mean"]


def test_a_reward_belongs_to_the_weights_that_sampled_it(tmp_path):
    """The batch of step 3 is taken at version 2 and lags by half a version: 1.5 steps of 100 tokens were trained."""
    run = write_run(tmp_path / "run", [step(1, 0.1), step(2, 0.2, lag=1.0), step(3, 0.3, lag=0.5)])
    (curve,) = read([run], y="reward_mean")
    assert points(curve) == [(0.0, 0.1), (0.0, 0.2), (150.0, 0.3)]


@pytest.mark.parametrize(("x", "last"), [("trained_tokens", 300.0), ("seconds", 6.0), ("steps", 3.0)])
def test_what_counts_as_compute(tmp_path, x, last):
    run = write_run(tmp_path / "run", [*map(step, range(1, 4)), evaluation(3)])
    (curve,) = read([run], x=x, y="greedy_accuracy")
    assert points(curve) == [(last, 0.5)]


def test_what_a_resume_took_back_is_left_out(tmp_path):
    """Killed after version 4, resumed from 2; its time goes on from there."""
    before = [evaluation(0, 0.1), step(1), step(2), evaluation(2, 0.2), step(3), step(4), evaluation(4, 0.9)]
    after = [evaluation(2, 0.25), step(3, at_s=2.0), step(4, at_s=4.0), evaluation(4, 0.4)]
    (curve,) = read([write_run(tmp_path / "run", before + after)], x="seconds", y="greedy_accuracy")
    assert points(curve) == [(0.0, 0.1), (4.0, 0.25), (8.0, 0.4)]


def test_an_evaluation_may_end_after_the_next_step(tmp_path):
    rows = [step(1), step(2), step(3), evaluation(2, 0.3), step(4), evaluation(4, 0.4)]
    (curve,) = read([write_run(tmp_path / "run", rows)], x="steps", y="greedy_accuracy")
    assert points(curve) == [(2.0, 0.3), (4.0, 0.4)]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", [step(1), step(2)], ending='{"version": 3, "at')
    assert len(read([run], y="reward_mean")[0].points) == 2
    assert len(read([run / "metrics.jsonl"], y="reward_mean")[0].points) == 2


def test_the_noise_of_a_point_is_told_from_the_answers_beside_it(tmp_path):
    """10 and 50 of 100 right, 20 of 400: variances 0.09, 0.25 and 0.0475, whose mean 4 more answers have."""
    rows = [evaluation(0, 0.1), step(1), evaluation(1, 0.5), step(2), evaluation(2, 0.05, num=400)]
    (curve,) = read([write_run(tmp_path / "run", rows)], y="greedy_accuracy")
    usual = (0.09 + 0.25 + 0.0475) / 3
    beside = [(100 * 0.25 + 400 * 0.0475, 500), (100 * 0.09 + 400 * 0.0475, 500), (100 * 0.09 + 100 * 0.25, 200)]
    expected = [
        (total + 4 * usual) / (num + 4) / own for (total, num), own in zip(beside, (100, 100, 400), strict=True)
    ]
    assert [point.spread**2 for point in curve.points] == pytest.approx(expected)


def test_a_points_own_luck_does_not_make_it_surer(tmp_path):
    """With weights from their own answers, the intervals of a plateau near 1 hold it in half of the runs."""

    def spreads(lucky: float) -> list[float]:
        rows = [row for version in range(1, 9) for row in (step(version), evaluation(version, 0.97))]
        rows[7]["greedy_accuracy"] = lucky
        (curve,) = read([write_run(tmp_path / "run", rows)], y="greedy_accuracy")
        return [point.spread for point in curve.points]

    assert spreads(1.0)[3] == pytest.approx(spreads(0.94)[3], rel=0.02), "but for what it has in the usual variance"
    assert spreads(1.0)[2] < spreads(0.94)[2]


def test_rewards_of_steps_have_their_own_spread(tmp_path):
    rows = [step(1, reward_std=0.5), step(2, reward_std=0.1, num_rollouts=16), step(3, reward_std=0.5)]
    (curve,) = read([write_run(tmp_path / "run", rows)], y="reward_mean")
    usual = (0.25 + 0.01 + 0.25) / 3
    assert curve.points[1].spread ** 2 == pytest.approx((128 * 0.25 + 4 * usual) / 132 / 16)
    (other,) = read([tmp_path / "run"], y="token_lag")
    assert {point.spread for point in other.points} == {1.0}


def test_points_without_any_spread_count_alike(tmp_path):
    rows = [evaluation(0, 0.0), step(1), evaluation(1, 1.0)]
    curves = read([write_run(tmp_path / "run", rows)], y="greedy_accuracy")
    assert [point.spread for point in curves[0].points] == [1.0, 1.0]


def test_what_a_run_has_not(tmp_path):
    run = write_run(tmp_path / "run", [step(1), step(2)])
    assert "has no metric reward_men; did you mean reward_mean?" in refusal(run, y="reward_men")
    assert "counted in trained_tokens, seconds, steps; did you mean seconds?" in refusal(run, x="second")
    bare = write_run(tmp_path / "bare", [{"version": 1, "at_s": 1.0, "step_s": 1.0, "reward_mean": 0.1}])
    assert "the step of version 1 has no trained_tokens; give another --x" in refusal(bare)
    assert "is empty: the run has trained nothing yet" in refusal(write_run(tmp_path / "new", []))
    assert "holds no metrics.jsonl, so it is no run folder" in refusal(tmp_path / "run" / "..")
    (tmp_path / "other").mkdir()
    assert f"there is no learning curve {tmp_path / 'rum'}; did you mean {run}?" in refusal(tmp_path / "rum")


# ---- tables


def table(tmp_path: Path, text: str, name: str = "curve.csv") -> Path:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


def test_a_table_of_columns(tmp_path):
    (curve,) = read([table(tmp_path, "\ufeffreward, compute ,note\n0.4,20,\n\n0.3,1e1,x\n,30,no reward\n")])
    assert (curve.x, curve.y) == ("compute", "reward")
    assert points(curve) == [(10.0, 0.3), (20.0, 0.4)]
    assert {point.spread for point in curve.points} == {1.0}


def test_json_lines_with_columns_of_their_own(tmp_path):
    path = table(tmp_path, '{"gpu_hours": 1, "pass_rate": 0.2}\n{"gpu_hours": 2, "pass_rate": null}\n', "a.jsonl")
    assert points(read([path], x="gpu_hours", y="pass_rate")[0]) == [(1.0, 0.2)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; a table has a header, for instance compute,reward"),
        ("compute,reward\n", "has no row with both compute and reward"),
        ("compute,rewards\n1,2\n", "has no column reward; did you mean rewards?; name one by --y"),
        ("hours,score\n1,2\n", "has no column compute; it has hours, score; name one by --x"),
        ("compute,reward\n1,high\n", "row 1: reward = 'high' is no finite number"),
        ("compute,reward\n1,0.5\n2,nan\n", "row 2: reward = 'nan' is no finite number"),
        ("compute,reward\n-1,0.5\n", "compute = -1 is below 0, which no compute is"),
        ("compute,reward\n1,2,3\n", "row 1 has 3 values for 2 columns"),
        ('compute,reward\n1,"2\n', "is no CSV table"),
        ('{"compute": 1, "reward": true}\n', "row 1: reward = True is no finite number"),
        ('{"compute": 1, "reward": 1}\nno\n{"compute": 2, "reward": 1}\n', "line 2 is no JSON object"),
        ('{"compute": 1, "reward": 1}\n[]\n', "line 2 is no JSON object"),
    ],
)
def test_a_table_that_can_not_be_read_says_where(tmp_path, text, said):
    path = table(tmp_path, text)
    message = refusal(path)
    assert said in message
    assert str(path) in message


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"compute,reward\n\xff\n")
    assert "is no text in UTF-8" in refusal(tmp_path / "a.csv")


def test_curves_over_different_things_are_not_compared(tmp_path):
    run = write_run(tmp_path / "run", [step(1), step(2)])
    one = table(tmp_path, "compute,reward\n1,2\n")
    assert "on its x axis, which can't be compared" in refusal(run, one)
    assert "a learning curve is given twice" in refusal(one, one)


# ---- amounts on the command line


def test_amounts():
    assert parse_amount("--at", " 1e4 ") == Amount(10_000.0, is_share=False)
    assert parse_amount("--skip", "10%").of(50.0) == 5.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lots", "--skip lots is no number; it is an amount of compute, or a share of it as in 10%"),
        ("nan", "--skip nan is no number"),
        ("-3", "--skip -3 is no amount of compute: give one above 0"),
        ("0%", "--skip 0% is no amount of compute: give one above 0"),
    ],
)
def test_what_is_no_amount(text, said):
    with pytest.raises(UserError, match=r"^--skip") as refused:
        parse_amount("--skip", text)
    assert said in str(refused.value)


def test_what_is_no_number():
    with pytest.raises(UserError, match="--start x is no number; it is a reward"):
        parse_number("--start", "x", "a reward")
