"""Alarms: at which figure, after how many steps, in which words."""

from __future__ import annotations

from typing import Any

import pytest

from headway.reports import outcome
from headway.reports.alarms import CONSECUTIVE_STEPS, Watch, alarms, in_words, zero_variance_share
from headway.reports.record import read_run


def _rows(name: str, *values: float | None, **others: Any) -> list[dict[str, Any]]:
    return [{"version": version, name: value, **others} for version, value in enumerate(values, 1)]


def _raised(rows: list[dict[str, Any]], group_size: int = 8) -> list[list[str]]:
    """Keys of the alarms that each step raised."""
    watch = Watch()
    return [[alarm.key for alarm in watch.add(row, group_size)] for row in rows]


@pytest.mark.parametrize(
    ("name", "healthy", "sick"),
    [
        ("truncated_share", 0.89, 0.9),
        ("zero_variance_groups", 18, 19),  # of 20 groups
        ("acted_share/tis", 0.49, 0.5),
        ("canary_kl_k3", 9e-5, 1e-4),
        ("preempted_share", 0.49, 0.5),
        ("ess_share", 0.31, 0.3),
    ],
)
def test_the_limits(name: str, healthy: float, sick: float) -> None:
    key = "zero_variance_share" if name == "zero_variance_groups" else name
    assert _raised(_rows(name, sick, sick, sick, num_rollouts=160)) == [[], [], [key]]
    assert not any(_raised(_rows(name, *[healthy] * 5, num_rollouts=160)))


@pytest.mark.parametrize("between", [0.2, None, float("nan"), "text", True])
def test_only_steps_in_a_row_raise_an_alarm(between: Any) -> None:
    assert not any(_raised(_rows("truncated_share", 1.0, 1.0, between, 1.0, 1.0, between, 1.0)))


def test_an_alarm_that_stands_is_raised_once_and_again_after_it_ceased() -> None:
    key = ["truncated_share"]
    assert _raised(_rows("truncated_share", *[1.0] * 5, 0.0, *[1.0] * 3)) == [[], [], key, [], [], [], [], [], key]


def test_buckets_of_a_share_raise_nothing_by_themselves() -> None:
    names = ("acted_share/tis/positive", "acted_share/tis/lag_3", "ess_share/lag_2", "canary_kl_k1")
    for name in names:
        assert not any(_raised(_rows(name, *[0.7 if "acted" in name else 0.1] * 4)))


def test_a_group_of_one_has_no_variance_to_lack() -> None:
    rows = _rows("zero_variance_groups", 4, 4, 4, num_rollouts=4)
    assert not any(_raised(rows, group_size=1))
    assert zero_variance_share(rows[0], 1) is None
    assert zero_variance_share(rows[0], 2) == 2 * 4 / 4


def test_a_run_s_alarm_is_of_its_last_stretch_and_counts_all_of_them() -> None:
    (alarm,) = alarms(_rows("acted_share/icepop", 0.6, 0.7, 0.8, 0.9, 0.1, 0.6, 0.1, 0.6, 0.7, 0.55), 8)
    assert (alarm.first, alarm.last, alarm.num_steps) == (8, 10, 4 + CONSECUTIVE_STEPS)
    assert in_words(alarm, 10) == (
        "icepop cut or masked 55.0 % of the trained tokens: the update is that of another batch "
        "(7 of 10 train steps, the last in steps 8 to 10)"
    )


def test_every_figure_is_in_its_sentence() -> None:
    row = {
        "truncated_share": 0.95,
        "zero_variance_groups": 20,
        "num_rollouts": 160,
        "acted_share/clip": 0.6,
        "canary_kl_k3": 3e-4,
        "ess_share": 0.12,
    }
    said = {alarm.key: alarm.says for alarm in alarms([{"version": n, **row} for n in (1, 2, 3)], 8)}
    figures = {
        "truncated_share": "95.0 % of the answers",
        "zero_variance_share": "100.0 % of the groups",
        "acted_share/clip": "clip cut or masked 60.0 %",
        "canary_kl_k3": "of 0.0003",
        "ess_share": "12.0 % of the trained tokens",
    }
    assert said.keys() == figures.keys()
    for key, figure in figures.items():
        assert figure in said[key]


def test_the_summary_ends_with_what_is_wrong(write_run, make) -> None:
    metrics = {"mismatch_kl_k3": 2e-3, "canary_kl_k3": 2e-4, "ess_share": 0.5, "entropy": 0.25}
    steps = [event for n in range(4) for event in make.step(n + 0.5, n + 1.0, n, [0, 0], **metrics)]
    figures = outcome.outcome(read_run(write_run([make.began(0, unsound=["it is biased"]), *steps])))
    assert figures["trust"] == pytest.approx({**metrics, "entropy_first": 0.25})
    assert outcome.describe(figures).splitlines() == [
        "4 steps in 0:04",
        "mismatch KL      0.002, numerics alone 0.0002; effective sample size 50.0 % (mean of the last 2)",
        "entropy          0.25 (first step) -> 0.25",
        "warning: engine and trainer disagree under the same weights, by a KL (k3, of canaries) of 0.0002: that is "
        "numerics (4 of 4 train steps, the last in steps 1 to 4)",
        "warning: unsound, and trained all the same: it is biased",
    ]


def test_a_run_that_measured_nothing_has_a_summary(write_run, make) -> None:
    figures = outcome.outcome(read_run(write_run([make.began(0)])))
    assert (figures["trust"], figures["alarms"], figures["unsound"]) == ({}, [], [])
    assert outcome.describe(figures) == "0 steps in 0:00"


def test_one_token_that_is_off_under_bitwise_parity_is_an_alarm_at_once() -> None:
    assert _raised(_rows("unequal_tokens", 0, 1, 1, 0, 2)) == [[], ["unequal_tokens"], [], [], ["unequal_tokens"]]
    (alarm,) = alarms(_rows("unequal_tokens", 0, 1, 1, 0, 2), 8)
    assert (alarm.first, alarm.last, alarm.num_steps) == (5, 5, 3)
    assert alarm.says.startswith("2 tokens that were sampled by the weights they train have other log-probs there")
