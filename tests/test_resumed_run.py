"""Runs that were killed while rollouts were in flight: what a checkpoint holds of them is not sampled again."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import cli, run
from headway.checkpoint import newest_checkpoint
from headway.models.weights import fingerprint
from headway.reports.folder import CHECKPOINTS
from headway.reports.summary import kept_steps
from headway.trace import Event, read_trace
from headway.types import Rollout, UserError
from tests.runs import DRAINED, Killed, Watched, killed_and_resumed, resolved

AHEAD = {**DRAINED, "schedule__run_ahead": 2, "generate__max_new_tokens": 40}
"""Answers of 1 to 40 tokens, 12 of them in flight or waiting for the trainer."""


def rows(folder: Path, version: int) -> list[dict[str, Any]]:
    lines = (folder / CHECKPOINTS / f"version-{version:08d}" / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def killed(settings: Any, out: Path, watched: Watched) -> None:
    with pytest.raises(Killed):
        run.train(settings, out)
    assert watched.batches.keys() == {0, 1, 2}
    del watched.batches[2]


def ended(row: dict[str, Any]) -> bool:
    return row["finish"] != "interrupted"


# ---- what is kept


def test_what_a_checkpoint_holds_is_trained_as_it_was(working_folder: Path, model_folder: Path, monkeypatch):
    """Finished rollouts token by token, partial ones as the beginning of what is trained, all with their log-probs."""
    watched, out = Watched(monkeypatch, kill_at=3), working_folder / "run"
    settings = resolved(model_folder, **AHEAD)
    killed(settings, out, watched)
    kept = rows(out, 2)
    assert len(kept) > 4
    assert {ended(row) for row in kept} == {True, False}
    run.train(settings, out, resume=True)
    trained = {(r.prompt.uid, r.member): r for batch in watched.batches.values() for r in batch.rollouts}
    assert len(trained) == 24
    uid_of = prompts_by_group(read_trace(out / "trace.jsonl"))
    for row in kept:
        assert_begins_with(trained[uid_of[row["group"]], row["member"]], row)


def assert_begins_with(rollout: Rollout, row: dict[str, Any]) -> None:
    length = len(row["tokens"])
    assert length > 0
    for name in ("tokens", "logprobs", "versions"):
        assert list(getattr(rollout, name)[:length]) == row[name]
    if ended(row):
        assert (len(rollout.tokens), rollout.finish, rollout.text) == (length, row["finish"], row["text"])
    else:
        assert min(rollout.versions[length:], default=2) >= 2, (
            "it went on under the checkpoint's weights, or newer ones"
        )


def prompts_by_group(events: Sequence[Event]) -> dict[int, str]:
    group_of = {event["rollout"]: event["group"] for event in events if event.kind in ("started", "resumed")}
    return {group_of[event["rollout"]]: event["prompt"] for event in events if event.kind == "generated"}


def test_scores_are_kept_and_not_asked_for_again(working_folder: Path, model_folder: Path, monkeypatch):
    watched, out = Watched(monkeypatch, kill_at=3), working_folder / "run"
    settings = resolved(model_folder, **AHEAD)
    killed(settings, out, watched)
    scored = [row for row in rows(out, 2) if "outcome" in row]
    assert scored
    assert {(row["outcome"], row["detail"], row["misplaced"]) for row in scored} == {("scored", "", None)}
    for row in scored:
        assert row["reward"] == sum(map(str.isdigit, row["text"])) / 8
    before = len(read_trace(out / "trace.jsonl"))
    run.train(settings, out, resume=True)
    after = read_trace(out / "trace.jsonl")[before:]
    assert sum(event.kind == "scored" for event in after) == 24 - 8 - len(scored)


def test_a_synchronous_run_has_nothing_in_flight_when_it_saves(working_folder: Path, model_folder: Path):
    run.train(resolved(model_folder, schedule__run_ahead=0), working_folder / "run")
    assert rows(working_folder / "run", 2) == rows(working_folder / "run", 4) == []


@pytest.mark.parametrize(
    "policy",
    [
        {"schedule__iteration_tokens": 5},
        {"schedule__overlap": False, "schedule__run_ahead": 0.5},
        {"schedule__redundant": 1},
        {"schedule__order": "started"},
        {"schedule__order": "window", "schedule__window": 3},
        {"schedule__max_lag": 1, "schedule__stragglers": "interrupt"},
        {"schedule__max_lag": 1, "schedule__stragglers": "restart"},
        {"schedule__in_flight": "recompute"},
        {"schedule__in_flight": "drain"},
        {"schedule__in_flight": "restart"},
        {"adapter__kind": "lora"},
    ],
    ids=lambda policy: " ".join(f"{name.split('__')[1]}={value}" for name, value in policy.items()),
)
def test_under_every_policy_each_prompt_is_trained_once(
    working_folder: Path, model_folder: Path, monkeypatch, policy: dict[str, Any]
):
    watched = Watched(monkeypatch, kill_at=3)
    killed_and_resumed(resolved(model_folder, **{**AHEAD, **policy}), working_folder / "run", watched)
    assert sorted(watched.batches) == [0, 1, 2, 3, 4, 5]
    trained = Counter(r.prompt.uid for batch in watched.batches.values() for r in batch.rollouts)
    assert set(trained.values()) == {2}
    assert len(trained) == 12
    assert "page: " in run.report(working_folder / "run")


def test_a_dropped_prompt_stays_dropped(working_folder: Path, model_folder: Path, monkeypatch):
    """Trained or reported, each once, before the kill or after it."""
    watched, out = Watched(monkeypatch, kill_at=3), working_folder / "run"
    settings = resolved(model_folder, **{**AHEAD, "schedule__max_lag": 1, "schedule__stragglers": "drop"})
    killed_and_resumed(settings, out, watched)
    trained = {r.prompt.uid for batch in watched.batches.values() for r in batch.rollouts}
    dropped = {event["prompt"] for event in read_trace(out / "trace.jsonl") if event.kind == "dropped"}
    assert len(trained | dropped) == 12
    lags = [lag for step in kept_steps(read_trace(out / "trace.jsonl")) for lag in step.taken["lags"]]
    assert max(lags) == 1


# ---- what may change, and what may not


@pytest.mark.parametrize(
    "changed",
    [
        {"schedule__order": "started"},
        {"schedule__run_ahead": 0},
        {"generate__lanes": 2},
        {"schedule__max_lag": 1, "schedule__stragglers": "interrupt"},
        {"schedule__iteration_tokens": 3},
        {"generate__max_new_tokens": 6},
    ],
    ids=str,
)
def test_a_run_may_go_on_under_another_policy(working_folder: Path, model_folder: Path, monkeypatch, changed):
    watched, out = Watched(monkeypatch, kill_at=3), working_folder / "run"
    killed(resolved(model_folder, **AHEAD), out, watched)
    run.train(resolved(model_folder, **{**AHEAD, **changed}), out, resume=True)
    assert set(watched.trained().values()) == {1}
    assert len(watched.trained()) == 24


def test_the_bound_of_another_schedule_holds_for_what_starts_under_it(
    working_folder: Path, model_folder: Path, monkeypatch
):
    """Three batches are under way when the run is killed; resumed as a synchronous one, it ends them, and starts no
    other before. A second resume under that schedule knows still which ones those are.
    """
    Watched(monkeypatch, kill_at=3)
    out = working_folder / "run"
    settings = {**AHEAD, "data__size": 24, "checkpoint__every": 1}
    with pytest.raises(Killed):
        run.train(resolved(model_folder, **settings), out)
    next_order = newest_checkpoint(out / CHECKPOINTS).progress["next_order"]
    synchronous = resolved(model_folder, **{**settings, "schedule__run_ahead": 0})
    monkeypatch.undo()
    monkeypatch.chdir(working_folder)
    Watched(monkeypatch, kill_at=4)
    with pytest.raises(Killed):
        run.train(synchronous, out, resume=True)
    assert newest_checkpoint(out / CHECKPOINTS).progress["version"] == 4
    run.train(synchronous, out, resume=True)
    events = read_trace(out / "trace.jsonl")
    steps = kept_steps(events)
    assert [step.trained["version"] for step in steps] == list(range(1, 13))
    assert max(lag for step in steps[3:5] for lag in step.taken["lags"]) > 0
    for step in steps:
        assert {lag for lag in step.taken["lags"] if min(step.taken["groups"]) >= next_order} <= {0}
    assert max(Counter(group for step in steps for group in step.taken["groups"]).values()) == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schedule__redundant": 1}, r"schedule.redundant is 1, and was 0 .* resume with --schedule.redundant 0"),
        ({"schedule__batch_size": 8}, r"schedule.batch_size is 8, and was 4"),
    ],
)
def test_what_groups_and_batches_are_made_of_stays(working_folder: Path, model_folder: Path, changed, said):
    out = working_folder / "run"
    run.train(resolved(model_folder, run__steps=2), out)
    with pytest.raises(UserError, match=said):
        run.train(resolved(model_folder, **changed), out, resume=True)


def test_a_checkpoint_of_an_older_headway_is_said_to_be_one(working_folder: Path, model_folder: Path):
    out = working_folder / "run"
    run.train(resolved(model_folder, run__steps=2), out)
    path = newest_checkpoint(out / CHECKPOINTS).folder / "progress.json"
    progress = json.loads(path.read_text())
    new = ("rollouts_started", "next_order", "active", "ready", "schedule", "bound_from")
    path.write_text(json.dumps({name: value for name, value in progress.items() if name not in new}))
    (path.parent / "rollouts.jsonl").unlink()
    with pytest.raises(UserError, match=r"version-00000002 was written by an older Headway") as caught:
        run.train(resolved(model_folder), out, resume=True)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_with_damaged_rollouts_is_said_and_the_one_before_goes_on(
    working_folder: Path, model_folder: Path, monkeypatch
):
    watched, out = Watched(monkeypatch, kill_at=5), working_folder / "run"
    settings = resolved(model_folder, **AHEAD)
    with pytest.raises(Killed):
        run.train(settings, out)
    newest = newest_checkpoint(out / CHECKPOINTS).folder
    assert newest.name == "version-00000004"
    (newest / "rollouts.jsonl").write_text('{"group":9}\n')
    with pytest.raises(UserError, match=rf"{newest} can't be read .*remove that folder to resume from the one before"):
        run.train(settings, out, resume=True)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    watched.batches = {version: batch for version, batch in watched.batches.items() if version < 2}
    run.train(settings, out, resume=True)
    assert set(watched.trained().values()) == {1}
    assert len(watched.trained()) == 24


# ---- kill -9

NUM_KILLS = 20
FLAGS = {
    "data.source": "addition",
    "data.size": 60,
    "data.epochs": 1,
    "run.steps": 999,
    "run.threads": 1,
    "model.device": "cpu",
    "score.scorer": "grader:digits",
    "generate.max_new_tokens": 40,
    "generate.lanes": 8,
    "train.learning_rate": 1e-3,
    "schedule.batch_size": 4,
    "schedule.group_size": 2,
    "schedule.run_ahead": 2,
    "report.rollouts_per_step": 1,
}
"""60 prompts, 2 in a batch: 30 steps, with 16 answers at most in flight or waiting for the trainer."""


@pytest.fixture(scope="module")
def forks() -> Any:
    """Processes that have imported what a run needs; to import it afresh for each would take most of the time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headway.in_process", __name__])
    first = context.Process(target=os.getpid)
    first.start()
    first.join()  # the imports are over
    return context


def command_line(folder: Path, arguments: Sequence[str], file_bytes: int = resource.RLIM_INFINITY) -> None:
    """`headway` with these arguments in a process of its own, which works in `folder` and says all it says in its log.

    file_bytes: no file may grow beyond it.
    """
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with (folder / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
    sys.argv = ["headway", *arguments]
    cli.main()


@dataclass
class Deaths:
    """How often a run was killed, how often while it trained, and then: what becomes of the tokens that no train step
    had taken.

    finished, partial: of rollouts in its checkpoint, which are not sampled again; repeated: of those that have finished
    since it was written, which are.
    """

    num: int = 0
    in_training: int = 0
    finished: int = 0
    partial: int = 0
    repeated: int = 0

    def note(self, folder: Path, *, in_training: bool) -> None:
        self.num += 1
        self.in_training += in_training
        if not (in_training and has_checkpoint(folder)):
            return
        events = read_trace(folder / "trace.jsonl")
        begun = max(number for number, event in enumerate(events) if event.kind in ("saved", "run"))
        self.repeated += sum(event["tokens"] for event in events[begun:] if event.kind == "generated")
        for row in newest_checkpoint(folder / CHECKPOINTS).rows or ():
            if ended(row):
                self.finished += len(row["tokens"])
            else:
                self.partial += len(row["tokens"])


def has_checkpoint(folder: Path) -> bool:
    return any((folder / CHECKPOINTS).glob("version-*/progress.json"))


@dataclass
class Life:
    """A run that is started, killed at a moment that `chance` picks, and started again, until its data end.

    num_kills: after so many deaths, of all lives that are counted together, it is left alone.
    """

    folder: Path
    first: list[str]
    forks: Any
    chance: random.Random
    num_kills: int = NUM_KILLS

    def until_the_end(self, deaths: Deaths) -> None:
        while True:
            command, num_starts = self._command(), self._num_starts()
            if self._ended(command, to_be_killed=deaths.num < self.num_kills):
                return
            deaths.note(self.folder, in_training=self._num_starts() > num_starts)

    def _ended(self, command: list[str], *, to_be_killed: bool) -> bool:
        """One start of it, which is left alone when there have been kills enough."""
        process = self.forks.Process(target=command_line, args=(self.folder.parent, command))
        process.start()
        if to_be_killed:
            self._wait_for_the_moment(process)
            process.kill()
        process.join(120)
        if process.exitcode == -signal.SIGKILL:
            return False
        assert process.exitcode == 0, (self.folder.parent / "log").read_text()
        return True

    def _wait_for_the_moment(self, process: Any) -> None:
        """One in five while the run is loaded, the others up to 0.6 s after it began, a good dozen steps."""
        if self.chance.random() < 0.2:
            process.join(self.chance.uniform(0.0, 2.0))
            return
        num_starts = self._num_starts()
        while process.exitcode is None and self._num_starts() <= num_starts:
            time.sleep(0.005)
        process.join(self.chance.uniform(0.0, 0.6))

    def _num_starts(self) -> int:
        trace = self.folder / "trace.jsonl"
        return trace.read_text().count('{"kind":"run"') if trace.exists() else 0

    def _command(self) -> list[str]:
        if has_checkpoint(self.folder):
            return ["train", "--resume", str(self.folder)]
        if self.folder.exists():  # killed before there was anything to keep
            shutil.rmtree(self.folder)
        return self.first


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments_loses_no_prompt_and_trains_none_twice(
    working_folder: Path, model_folder: Path, forks
):
    """Over a drained epoch: the prompts of the kept steps are those of an uninterrupted run, each of them once."""
    (working_folder / "recipe.toml").touch()
    deaths, chance, number = Deaths(), random.Random(4), 0
    while deaths.num < NUM_KILLS:
        folder = working_folder / f"run-{number}"
        own = {**FLAGS, "model.path": model_folder, "run.out": folder, "checkpoint.every": 1 + number % 2}
        first = ["train", "recipe.toml", *(f"--{name}={value}" for name, value in own.items())]
        Life(folder, first, forks, chance).until_the_end(deaths)
        assert_drained(folder)
        number += 1
    print(f"{number} runs; {deaths}")
    assert deaths.in_training > NUM_KILLS / 2
    assert deaths.finished > 0
    assert deaths.partial > 0


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments_ends_in_the_same_weights_with_bitwise_parity(
    working_folder: Path, model_folder: Path, forks
):
    """Synchronous, on two threads, with evaluations beside training, two optimizer steps and several micro-batches."""
    (working_folder / "recipe.toml").touch()
    own = {
        **FLAGS,
        "model.path": model_folder,
        "model.parity": "bitwise",
        "run.threads": 2,
        "schedule.run_ahead": 0,
        "schedule.batch_size": 8,
        "data.size": 100,
        "train.optimizer_steps": 2,
        "train.learning_rate_schedule": "cosine",
        "run.steps": 25,
        "evaluate.size": 5,
        "evaluate.every": 3,
        "prepare.micro_batch_tokens": 60,
        "checkpoint.every": 2,
    }
    deaths, chance, ends = Deaths(), random.Random(5), set()
    for number in range(99):
        num_kills = NUM_KILLS if number else 0
        if number and deaths.num == NUM_KILLS:
            break
        folder = working_folder / f"run-{number}"
        first = ["train", "recipe.toml", *(f"--{name}={value}" for name, value in {**own, "run.out": folder}.items())]
        Life(folder, first, forks, chance, num_kills).until_the_end(deaths)
        state = torch.load(newest_checkpoint(folder / CHECKPOINTS).folder / "trainer.pt", weights_only=True)
        ends.add(fingerprint(state["weights"]))
        assert all(row["unequal_tokens"] == 0 for row in trained_rows(folder))
    print(f"{number} runs; {deaths}")
    assert deaths.in_training > NUM_KILLS / 2
    assert len(ends) == 1


def trained_rows(folder: Path) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in every if "loss" in row]


def assert_drained(folder: Path) -> None:
    events = read_trace(folder / "trace.jsonl")
    uid_of = prompts_by_group(events)
    steps = kept_steps(events)
    trained = Counter(uid_of[group] for step in steps for group in step.taken["groups"])
    assert len(trained) == 60
    assert set(trained.values()) == {1}
    assert {len(step.taken["rollouts"]) for step in steps} == {4}
    assert [step.trained["version"] for step in steps] == list(range(1, 31))
    assert "page: " in run.report(folder)


@pytest.mark.slow
def test_a_disk_that_is_full_while_a_checkpoint_is_written_is_one_line_and_the_older_ones_stay(
    working_folder: Path, model_folder: Path, forks
):
    """No file may grow beyond 64 KiB when it is resumed; a trainer's state is larger."""
    folder = working_folder / "run"
    run.train(resolved(model_folder, run__steps=2), folder)
    command = ["train", "--resume", str(folder), "--run.steps=4"]
    process = forks.Process(target=command_line, args=(working_folder, command, 1 << 16))
    process.start()
    process.join(60)
    said = (working_folder / "log").read_text()
    assert process.exitcode == 2, said
    (line,) = [line for line in said.splitlines() if line.startswith("headway: ")]
    assert re.search(r"trainer\.pt can't be used: .*is the disk full\?.*; what was written before stays$", line)
    assert "Traceback" not in said
    assert newest_checkpoint(folder / CHECKPOINTS).progress["version"] == 2
    run.train(resolved(model_folder, run__steps=4), folder, resume=True)
    assert newest_checkpoint(folder / CHECKPOINTS).progress["version"] == 4
    assert sorted(path.name for path in (folder / CHECKPOINTS).iterdir()) == ["version-00000002", "version-00000004"]
