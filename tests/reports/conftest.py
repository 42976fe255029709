"""Small runs: the hand-sized example, and run folders written from any list of events."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway import config, simulation
from headway.trace import Event

HAND_SIZED = ("--lanes", "2", "--batch-size", "2", "--steps", "2", "--run-ahead", "1", "--lengths", "1,3,1")


HARD_TIMES = {
    "accepted": "",
    "dropped": "--max-lag 1 --stragglers drop",
    "interrupted": "--max-lag 1 --stragglers interrupt --in-flight keep",
    "restarted": "--max-lag 1 --stragglers restart",
    "dropped behind interrupted": "--run-ahead 2 --max-lag 2 --stragglers drop,interrupt",
    "drained": "--in-flight drain",
    "begun again": "--in-flight restart",
    "paused": "--iteration-tokens 2 --in-flight keep",
    "without overlap": "--overlap false --run-ahead 0.5 --in-flight keep",
    "redundant": "--redundant 1",
    "redundant and kept": "--redundant 2 --surplus keep",
    "with a deadline": "--deadline-s 3",
    "in order": "--order started",
    "in a window": "--order window --window 3",
    "evaluated": "--evaluate.size 3 --evaluate.every 2",
}
"""A name -> override words: every way in which a rollout may end, one or two at a time."""

UNEVEN = "--lengths 1,2,7,1,3,5,2,1,1,9,4,2,1,6,1,3,2,8,1,1,2 --lanes 5 --batch-size 4 --group-size 2 --steps 6"


@pytest.fixture(params=HARD_TIMES.values(), ids=list(HARD_TIMES))
def hard_times(request: pytest.FixtureRequest, simulated: Callable[..., list[Event]]) -> list[Event]:
    """A simulated run of whole lengths under each policy. A lane samples one token per unit of time."""
    return simulated(*UNEVEN.split(), *request.param.split())


@pytest.fixture
def simulated() -> Callable[..., list[Event]]:
    """Override words -> the trace of a simulated run; without words, of the hand-sized example."""

    def simulate(*words: str) -> list[Event]:
        return simulation.simulate(config.resolve(None, words or HAND_SIZED).config)

    return simulate


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Events (and rows, rollouts, configuration, objective) -> a run folder that holds them."""

    def write(
        events: Sequence[Event],
        *,
        name: str = "a-run",
        metrics: Sequence[dict[str, Any]] = (),
        rollouts: Sequence[dict[str, Any]] = (),
        words: Sequence[str] = HAND_SIZED,
        objective: str = "",
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "trace.jsonl").write_text("".join(event.to_json() + "\n" for event in events))
        (folder / "config.toml").write_text(config.resolve(None, words).to_toml())
        if objective:
            (folder / "objective.txt").write_text(objective)
        for file, rows in (("metrics.jsonl", metrics), ("rollouts.jsonl", rollouts)):
            if rows:
                (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write


def began(version: int, **fields: Any) -> Event:
    """The `run` event of a run of two lanes whose batches are two groups of one."""
    sizes = {"lanes": 2, "batch_size": 2, "group_size": 1, "run_ahead": 1.0, "steps": 2, "max_lag": None}
    return Event("run", 0.0, {**sizes, "seed": 0, "clock": "wall", "version": version, **fields})


def rollout_began(at_s: float, rollout: int, lane: int, version: int) -> Event:
    fields = {"rollout": rollout, "group": rollout, "member": 0, "lane": lane, "version": version}
    return Event("started", at_s, {**fields, "evaluation": False})


def rollout_ended(at_s: float, rollout: int, lane: int, tokens: int = 10) -> Event:
    return Event("generated", at_s, {"rollout": rollout, "lane": lane, "tokens": tokens})


def step(began_s: float, ended_s: float, version: int, lags: list[int], **metrics: float) -> list[Event]:
    """The events of a train step on the weights `version`, whose new weights are out at once."""
    taken = {"version": version, "groups": [0, 1], "rollouts": [0, 1], "lags": lags, "token_lag": sum(lags) / len(lags)}
    return [
        Event("taken", began_s, taken),
        Event("trained", ended_s, {"version": version + 1, "metrics": metrics}),
        Event("publishing", ended_s, {"version": version + 1}),
        Event("published", ended_s, {"version": version + 1}),
    ]


def evaluated(at_s: float, version: int, num_correct: int, num: int) -> Event:
    rest = {"num_unscored": 0, "mean_reward": num_correct / num}
    return Event("evaluated", at_s, {"version": version, "num": num, "num_correct": num_correct, **rest})


@pytest.fixture
def make() -> SimpleNamespace:
    """The builders of events above, for a test's own trace."""
    return SimpleNamespace(began=began, evaluated=evaluated, step=step)


@pytest.fixture
def resumed() -> list[Event]:
    """Killed at 5 s in its second step's sequel, resumed from version 1, done 3 s later."""
    return [
        began(0),
        rollout_began(0.0, 0, 0, 0),
        rollout_ended(1.0, 0, 0),
        *step(1.0, 2.0, 0, [0, 0], reward_mean=0.1),
        *step(3.0, 4.0, 1, [1, 1], reward_mean=0.2),
        evaluated(4.5, 2, 1, 10),
        rollout_began(5.0, 4, 0, 2),
        began(1),
        rollout_began(0.0, 2, 1, 1),
        rollout_ended(1.0, 2, 1),
        *step(1.0, 2.0, 1, [0, 1], reward_mean=0.3),
        evaluated(2.5, 2, 9, 10),
        Event("ended", 3.0, {"reason": "steps done"}),
    ]
