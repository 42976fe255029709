"""Length bias: cohorts worked by hand, and the bias of orders and policies in steady state."""

from __future__ import annotations

import pytest

from headway.reports import fairness_figures, lengths
from headway.reports.metrics import StepMetrics
from headway.reports.record import read_run
from headway.reports.summary import timeline
from headway.trace import Event
from tests.summaries import summary_of

LONG_RUN = "--lengths exponential --lanes 16 --batch-size 16 --train-time 0.5 --run-ahead 1 --seed 3"


def _lives(events):
    return timeline(events).lives


def _row(events, version):
    (row,) = [row for row in lengths.cohorts(_lives(events)) if row["version"] == version]
    return row


def test_the_cohorts_of_the_hand_sized_example(simulated) -> None:
    """r0 (1) and r2 (1) are trained first; r1 (3) started with them and is trained with r3 (1) in the second step.

    r4 and r5 start when the first step has ended, and end with the run.
    """
    first, second = _row(simulated(), 1), _row(simulated(), 2)
    assert (first["trained"], first["started"]) == (1.0, (1 + 3 + 1 + 1) / 4)
    assert (second["trained"], second["started"]) == (2.0, 1.0)
    assert (second["trained_so_far"], second["started_so_far"]) == (6 / 4, 8 / 6)
    assert first["dropped"] is None
    assert first["interrupted_so_far"] is None


def test_interrupted_dropped_and_thrown_away_are_cohorts_too(simulated) -> None:
    """Lane B's rollout, 9 long, has lag 1 when the first step ends at 3; what becomes of it is the policy's word."""
    sizes = ("--lanes", "2", "--batch-size", "2", "--steps", "2", "--run-ahead", "1", "--lengths", "1,9,1")
    interrupted = simulated(*sizes, "--max-lag", "1", "--stragglers", "interrupt")
    assert _row(interrupted, 2)["interrupted"] == 3.0
    restarted = simulated(*sizes, "--max-lag", "1", "--stragglers", "restart")
    assert _row(restarted, 2)["aborted"] == 3.0
    dropped = simulated(*sizes, "--max-lag", "0", "--stragglers", "drop")
    assert _row(dropped, 2)["dropped"] == 1.0  # r3, done as the first step ends


def test_a_rollout_that_begins_again_counts_once_among_the_started(simulated) -> None:
    words = "--lanes 2 --batch-size 2 --steps 3 --run-ahead 1 --lengths 4 --max-lag 1 --stragglers restart"
    events = simulated(*words.split())
    assert any(event.kind == "aborted" for event in events)
    assert summary_of(events)["started_length"] == 4.0


def test_the_first_batches_of_order_finished_hold_the_short_ones(simulated) -> None:
    rows = lengths.cohorts(_lives(simulated(*LONG_RUN.split(), "--steps", "200")))
    ratios = [row["trained_so_far"] / row["started_so_far"] for row in rows]
    assert ratios[0] < 0.6
    assert ratios[-1] == pytest.approx(1.0, abs=0.02)


def test_order_started_has_no_bias(simulated) -> None:
    rows = lengths.cohorts(_lives(simulated(*LONG_RUN.split(), "--steps", "40", "--order", "started")))
    assert rows[0]["trained"] == rows[0]["trained_so_far"] == pytest.approx(rows[0]["started"], rel=0.35)
    assert rows[-1]["trained_so_far"] == pytest.approx(rows[-1]["started_so_far"], rel=0.05)


def test_dropping_makes_the_bias_permanent(simulated) -> None:
    """At N = B and max_lag 1 the trained ones come to two thirds of the true mean, those dropped to thrice of it."""
    words = "--lengths exponential --lanes 64 --batch-size 64 --train-time 0.5 --run-ahead 1 --steps 120"
    figures = summary_of(simulated(*words.split(), "--max-lag", "1", "--stragglers", "drop"), skip_steps=20)
    dropped = figures["goodput"]["classes"]["dropped"]
    assert figures["trained_length"] / figures["started_length"] == pytest.approx(0.65, abs=0.02)
    assert dropped["tokens"] / dropped["rollouts"] == pytest.approx(2.72, abs=0.15)


def test_the_histogram_s_lengths_are_those_of_all_that_ended(hard_times) -> None:
    lives = _lives(hard_times)
    found = lengths.by_fate(lives)
    assert sum(map(len, found.values())) == len(list(lengths.started(lives)))
    assert set(found) <= {"trained", "interrupted", "dropped", "aborted", "waiting"}


def test_rows_of_metrics_hold_the_same_lengths(hard_times) -> None:
    rows: list[dict] = []
    listener = StepMetrics(rows.append)
    for event in hard_times:
        listener(event)
    steps = [row for row in rows if "step_s" in row]
    cohorts = lengths.cohorts(_lives(hard_times))
    assert len(steps) == len(cohorts) > 0
    for row, cohort in zip(steps, cohorts, strict=True):
        for kind in ("trained", "dropped", "interrupted"):
            assert row.get(f"length_{kind}") == cohort[kind]
            assert row.get(f"length_{kind}_so_far") == cohort[f"{kind}_so_far"]


def test_rows_count_what_befell_the_others(simulated) -> None:
    rows: list[dict] = []
    listener = StepMetrics(rows.append)
    for event in simulated(*LONG_RUN.split(), "--steps", "20", "--max-lag", "1", "--stragglers", "drop"):
        listener(event)
    assert sum(row.get("dropped_groups", 0) for row in rows) > 0
    assert sum(row["over_max_lag"] for row in rows) == 0
    assert all("length_dropped" in row for row in rows if row.get("dropped_groups"))
    assert not any("filtered_groups" in row for row in rows)


def test_the_rate_of_sampling_counts_what_pauses_and_what_is_thrown_away(hard_times) -> None:
    rows: list[dict] = []
    listener = StepMetrics(rows.append)
    for event in hard_times:
        listener(event)
    sampled = sum(row["generated_tokens_per_s"] * row["step_s"] for row in rows if "step_s" in row)
    last = max(number for number, event in enumerate(hard_times) if event.kind == "trained")
    assert sampled == pytest.approx(sum(life.tokens for life in _lives(hard_times[: last + 1])))


@pytest.mark.parametrize("clock", ["wall", "virtual"])
def test_the_histogram_holds_every_length(hard_times, write_run, clock) -> None:
    """Whole tokens in a real run, each bin's middle on its token; lengths of any size in a simulation."""
    header = Event("run", 0.0, {**hard_times[0].fields, "clock": clock})
    run = read_run(write_run([header, *hard_times[1:]]))
    figure = fairness_figures.length_histogram(run)
    assert figure is not None
    assert sum(sum(bars.y) for bars in figure.data) == sum(map(len, lengths.by_fate(run.timeline.lives).values()))
    if clock == "wall":
        assert figure.data[0].x[:3] == (0.0, 1.0, 2.0)


def test_the_picture_draws_what_the_cohorts_say(simulated, write_run) -> None:
    words = "--lanes 2 --batch-size 2 --steps 2 --run-ahead 1 --lengths 1,9,1 --max-lag 1 --stragglers interrupt"
    figure = fairness_figures.trained_length(read_run(write_run(simulated(*words.split()))))
    assert figure is not None
    drawn = {trace.name: list(trace.y) for trace in figure.data}
    assert drawn["trained"] == [1.0, 2.0]
    assert drawn["interrupted"] == [None, 3.0]
    assert drawn["trained / started, of all steps so far"][1] == pytest.approx(1.5 / (8 / 6), rel=1e-4)


def test_nothing_is_drawn_of_a_run_without_a_train_step(simulated, write_run) -> None:
    run = read_run(write_run(simulated()[:3]))
    assert fairness_figures.trained_length(run) is None
    assert fairness_figures.length_histogram(run) is None
