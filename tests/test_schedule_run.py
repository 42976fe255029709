"""Whole runs of a tiny model under every policy of the schedule: each ends, keeps its bound, and leaves a page."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway import run
from headway.generate.episode import Episodes, generated
from headway.generate.torch_engine import TorchEngine
from headway.reports.summary import kept_steps
from headway.trace import Event, read_trace
from tests import runs

STEPS = 10


class Run:
    """What a run has left: its events, and its batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events = read_trace(folder / "trace.jsonl")
        self.steps = kept_steps(self.events)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def finishes(self) -> Counter[tuple[str, str | None]]:
        """How rollouts ended, and why the interrupted ones did."""
        return Counter((event["finish"], event.fields.get("why")) for event in self.of("generated"))

    def reasons(self, kind: str) -> Counter[str]:
        return Counter(event["reason"] for event in self.of(kind))


@pytest.fixture
def play(working_folder: Path, model_folder: Path):
    """Answers of 1 to 40 tokens in 8 lanes, batches of 2 groups of 2; an answer outlasts several train steps."""

    def play(**settings: Any) -> Run:
        own = {
            "generate__max_new_tokens": 40,
            "run__steps": STEPS,
            "data__size": 60,
            "schedule__run_ahead": 3,
            "checkpoint__every": 4,
        }
        folder = working_folder / "run"
        run.train(runs.resolved(model_folder, **{**own, **settings}), folder)
        played = Run(folder)
        check(played)
        return played

    return play


def check(played: Run) -> None:
    """What every run keeps: the steps it was asked for, its bound, each rollout trained once at most, and a page."""
    (began,), (ended,) = played.of("run"), played.of("ended")
    assert ended["reason"] == "steps done"
    assert [step.trained["version"] for step in played.steps] == list(range(1, began["steps"] + 1))
    lags = [lag for step in played.steps for lag in step.taken["lags"]]
    assert min(lags) >= 0
    if began["lag_bound"] is not None:
        assert max(lags) <= began["lag_bound"]
    trained = [rollout for step in played.steps for rollout in step.taken["rollouts"]]
    assert len(set(trained)) == len(trained)
    assert "page: " in run.report(played.folder)
    assert (played.folder / "index.html").stat().st_size > 1e5


# ---- the order of training


def test_in_order_of_start(play):
    played = play(schedule__order="started")
    assert played.of("run")[0]["lag_bound"] == 3
    assert [group for step in played.steps for group in step.taken["groups"]] == list(range(2 * STEPS))
    assert [max(step.taken["lags"]) for step in played.steps] == [0, 1, 2, *[3] * (STEPS - 3)]


def test_in_a_window(play):
    """Three batches ahead and 4 groups at 2 a batch: 3 + ceil(3 / 2)."""
    played = play(schedule__order="window", schedule__window=4)
    assert played.of("run")[0]["lag_bound"] == 5
    groups = [group for step in played.steps for group in step.taken["groups"]]
    waiting = list(range(max(groups) + 1))
    for group in groups:
        assert group in waiting[: waiting.index(waiting[0]) + 4]
        assert group < waiting[0] + 4
        waiting.remove(group)


# ---- stragglers


def test_what_is_above_max_lag_is_dropped(play):
    played = play(schedule__max_lag=1, schedule__stragglers="drop")
    assert played.of("run")[0]["lag_bound"] == 1
    dropped = played.of("dropped")
    assert dropped
    assert min(event["lag"] for event in dropped) >= 2
    in_steps = {group for step in played.steps for group in step.taken["groups"]}
    assert not in_steps & {event["group"] for event in dropped}


def test_what_comes_to_max_lag_is_interrupted_and_trained_as_it_is(play):
    played = play(schedule__max_lag=1, schedule__stragglers="interrupt")
    interrupted = [event for event in played.of("generated") if event["finish"] == "interrupted"]
    assert {event["why"] for event in interrupted} == {"max_lag"}
    assert all(event["tokens"] < 40 for event in interrupted)
    trained = {rollout for step in played.steps for rollout in step.taken["rollouts"]}
    assert trained & {event["rollout"] for event in interrupted}
    assert any(step.trained["metrics"]["interrupted_share"] > 0 for step in played.steps)


def test_what_comes_to_max_lag_begins_again_and_then_is_interrupted(play):
    """With drop behind it, so that there is a bound."""
    played = play(schedule__max_lag=1, schedule__stragglers="restart,drop", schedule__max_restarts=1)
    assert played.of("run")[0]["lag_bound"] == 1
    assert played.of("restarted")
    assert {event["num"] for event in played.of("restarted")} == {1}
    assert played.reasons("aborted")["max_lag"] > 0
    assert played.finishes()["interrupted", "max_lag"] > 0


# ---- new weights and rollouts in flight


def test_new_weights_with_a_new_cache(play, monkeypatch):
    in_flight = []
    load = TorchEngine._load

    def watched(engine: TorchEngine, weights: Any, version: int, recompute: bool) -> None:
        load(engine, weights, version, recompute)
        assert recompute
        in_flight.append(len(engine._lanes))
        assert all(lane.cached == 0 for lane in engine._lanes)

    monkeypatch.setattr(TorchEngine, "_load", watched)
    played = play(schedule__in_flight="recompute")
    assert sum(num > 0 for num in in_flight) >= STEPS // 2
    assert any(len(event["versions"]) > 1 for event in played.of("generated"))


def test_new_weights_wait_for_rollouts_in_flight(play):
    played = play(schedule__in_flight="drain")
    assert all(len(event["versions"]) == 1 for event in played.of("generated"))


def test_rollouts_in_flight_begin_again_under_new_weights(play):
    """But for those that end between the swap and its acknowledgement, a few tokens long at most."""
    played = play(schedule__in_flight="restart")
    assert played.reasons("aborted").keys() == {"new weights"}
    for event in played.of("generated"):
        (_, *newer) = event["versions"]
        assert sum(num for _, num in newer) <= 15


# ---- pauses, and more rollouts than are needed


def test_rollouts_pause_while_a_batch_is_trained(play):
    """APRIL: one batch and a half are begun, one is trained, and what is unfinished goes on afterwards."""
    played = play(schedule__run_ahead=0.5, schedule__overlap=False)
    assert played.reasons("paused").keys() == {"training"}
    assert 0 < len(played.of("resumed")) <= len(played.of("paused"))
    busy: set[int] = set()
    for event in played.events:
        if event.kind in ("started", "resumed"):
            busy.add(event["rollout"])
        elif event.kind in ("generated", "paused", "aborted"):
            busy.discard(event["rollout"])
        elif event.kind == "trained":
            assert not busy
    resumed = {event["rollout"] for event in played.of("resumed")}
    assert any(len(e["versions"]) > 1 for e in played.of("generated") if e["rollout"] in resumed)


def test_rollouts_pause_after_so_many_tokens(play):
    played = play(schedule__iteration_tokens=5)
    assert played.reasons("paused").keys() == {"iteration_tokens"}
    assert {event["tokens"] % 5 for event in played.of("paused")} == {0}
    stretches = Counter(event["rollout"] for event in played.of("paused"))
    assert max(stretches.values()) >= 3
    for event in played.of("generated"):
        assert 0 < event["tokens"] - 5 * stretches[event["rollout"]] <= 5


@pytest.mark.parametrize("surplus", ["abort", "keep"])
def test_redundant_members_are_aborted_or_kept(play, surplus):
    played = play(schedule__redundant=2, schedule__surplus=surplus)
    sizes = {len(step.taken["rollouts"]) for step in played.steps}
    if surplus == "abort":
        assert sizes == {4}
        assert played.reasons("aborted").keys() == {"redundant"}
    else:
        assert max(sizes) > 4
        assert max(sizes) <= 8


# ---- groups that teach nothing, and rollouts that take too long


def test_groups_of_equal_rewards_are_replaced(play):
    """Answers of one token earn 0 or 1/8."""
    played = play(schedule__dynamic_sampling=True, generate__max_new_tokens=1)
    filtered = {event["group"] for event in played.of("filtered")}
    assert filtered
    assert {event["reward"] for event in played.of("filtered")} <= {0.0, 0.125}
    assert not filtered & {group for step in played.steps for group in step.taken["groups"]}
    assert all(step.trained["metrics"]["zero_variance_groups"] == 0 for step in played.steps)


def test_rollouts_over_their_deadline_are_interrupted(play, monkeypatch):
    """Tokens of 2 ms, 50 ms for 40 of them."""
    next_tokens = TorchEngine._next_tokens

    def slowly(engine: TorchEngine) -> Any:
        time.sleep(0.002)
        return next_tokens(engine)

    monkeypatch.setattr(TorchEngine, "_next_tokens", slowly)
    played = play(schedule__deadline_s=0.05)
    assert played.finishes()["interrupted", "deadline"] > 0
    assert ("interrupted", "max_lag") not in played.finishes()


@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_rollouts_without_a_token_break_nothing(play, monkeypatch, objective):
    """Interrupted before their first token: all of every other batch, and half of the others."""
    generate = Episodes.generate

    async def some(episodes: Episodes, ticket: Any) -> Any:
        whole = await generate(episodes, ticket)
        empty = replace(whole.ref, tokens=(), logprobs=(), versions=(), mask=(), text="", finish="length")
        return generated(empty) if ticket.member or ticket.group % 4 < 2 else whole

    monkeypatch.setattr(Episodes, "generate", some)
    played = play(objective__name=objective, schedule__run_ahead=0, run__steps=5, report__rollouts_per_step=4)
    longest = [step.trained["metrics"]["response_tokens_max"] for step in played.steps]
    assert [length > 0 for length in longest] == [False, True, False, True, False]
    assert sum(step.trained["metrics"].get("grad_norm", 0) > 0 for step in played.steps) == 2
