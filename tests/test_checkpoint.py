"""Checkpoints: whole or not there."""

from __future__ import annotations

import json
import math
import os
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from headway import checkpoint
from headway.checkpoint import KeptRollout, newest_checkpoint, write_checkpoint
from headway.types import Prompt, Score, UserError
from tests import tiny


def save_trainer(folder: Path) -> None:
    (folder / "trainer.pt").write_bytes(b"weights")


def write(root: Path, version: int, *, rollouts: Sequence[KeptRollout] = (), keep: int = 2, save=save_trainer) -> Path:
    return write_checkpoint(root, {"version": version, "watermark": 3 * version}, rollouts, save, keep=keep)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_was_written_is_found(tmp_path):
    folder = write(tmp_path / "checkpoints", 7)
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found.folder == folder
    assert found.progress == {"version": 7, "watermark": 21}
    assert (found.folder / "trainer.pt").read_bytes() == b"weights"
    assert names(tmp_path / "checkpoints") == ["version-00000007"]


def test_it_appears_whole_and_at_once(tmp_path):
    """While the trainer writes, nothing has the name of a checkpoint, and the account of the run is not there yet."""

    def look(folder: Path) -> None:
        assert folder.parent == tmp_path
        assert names(tmp_path) == [".unfinished", "version-00000001"]
        assert names(folder) == []
        save_trainer(folder)

    write(tmp_path, 1)
    folder = write(tmp_path, 2, save=look)
    assert names(folder) == ["progress.json", "rollouts.jsonl", "trainer.pt"]


def test_everything_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    flushed: list[str] = []

    def note(path: Path) -> None:
        flushed.append(path.name)
        if path.name in (".unfinished", "trainer.pt", "progress.json", "rollouts.jsonl"):
            assert not (tmp_path / "version-00000001").exists()

    monkeypatch.setattr(checkpoint, "_flush_to_disk", note)
    write(tmp_path, 1)
    assert sorted(flushed[:-1]) == [".unfinished", "progress.json", "rollouts.jsonl", "trainer.pt"]
    assert flushed[-1] == tmp_path.name


def test_all_but_the_newest_are_removed(tmp_path):
    for version in (1, 2, 9, 10, 11):
        write(tmp_path, version, keep=3)
    assert names(tmp_path) == ["version-00000009", "version-00000010", "version-00000011"]
    write(tmp_path, 12, keep=1)
    assert names(tmp_path) == ["version-00000012"]


def test_the_newest_is_the_one_with_the_highest_version(tmp_path):
    for version in (100_000, 99_999, 2):
        write(tmp_path, version, keep=9)
    assert newest_checkpoint(tmp_path).progress["version"] == 100_000


@pytest.mark.parametrize("keep", [1, 2])
def test_a_failure_while_writing_leaves_the_older_ones(tmp_path, keep):
    def fail(folder: Path) -> None:
        save_trainer(folder)
        raise OSError(28, "No space left on device")

    write(tmp_path, 1, keep=keep)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2, keep=keep, save=fail)
    assert newest_checkpoint(tmp_path).progress["version"] == 1
    write(tmp_path, 3, keep=keep)
    assert newest_checkpoint(tmp_path).progress["version"] == 3
    assert ".unfinished" not in names(tmp_path)


def test_a_kill_at_the_last_moment_leaves_the_older_ones(tmp_path, monkeypatch):
    write(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda source, target: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, 2)
    assert newest_checkpoint(tmp_path).progress["version"] == 1


def test_what_a_kill_left_is_not_taken_over(tmp_path):
    (tmp_path / ".unfinished").mkdir()
    (tmp_path / ".unfinished" / "old.pt").touch()
    assert names(write(tmp_path, 1)) == ["progress.json", "rollouts.jsonl", "trainer.pt"]


@pytest.mark.parametrize(
    "name", ["version-00000009", "version-9", "version-00000009.bak", ".unfinished", "version-0000000x"]
)
def test_folders_that_are_no_whole_checkpoint_are_passed_over(tmp_path, name):
    """Even one with the name of a checkpoint: without an account it is not whole."""
    write(tmp_path, 1)
    shutil.copytree(tmp_path / "version-00000001", tmp_path / name)
    if name == "version-00000009":
        (tmp_path / name / "progress.json").unlink()
    assert newest_checkpoint(tmp_path).progress["version"] == 1


def test_a_version_may_be_written_again(tmp_path):
    write(tmp_path, 1)
    write_checkpoint(tmp_path, {"version": 1, "watermark": 99}, [], save_trainer, keep=1)
    assert newest_checkpoint(tmp_path).progress["watermark"] == 99
    assert names(tmp_path) == ["version-00000001"]


@pytest.mark.parametrize("exists", [True, False])
def test_no_checkpoint_is_said_with_a_mend(tmp_path, exists):
    root = tmp_path / "checkpoints"
    if exists:
        root.mkdir()
    with pytest.raises(UserError, match=f"there is no checkpoint in {root}: .*--checkpoint.every"):
        newest_checkpoint(root)


def test_progress_is_plain_json(tmp_path):
    folder = write(tmp_path, 3)
    assert json.loads((folder / "progress.json").read_text()) == {"version": 3, "watermark": 9}


# ---- rollouts

PROMPTS = [tiny.prompt(text) for text in ("1+1=", "2+2=", "3+3=")]


def prompt_at(group: int) -> tuple[Prompt, int]:
    return PROMPTS[group % 3], group // 3


def kept(group: int, member: int, num_tokens: int, **more) -> KeptRollout:
    """A rollout with log-probs that a decimal of few digits would not hold, under two versions."""
    prompt, epoch = prompt_at(group)
    rollout = tiny.rollout(
        prompt,
        range(num_tokens),
        member=member,
        epoch=epoch,
        logprobs=[-math.pi / (n + 1) for n in range(num_tokens)],
        versions=[2 + (n > 1) for n in range(num_tokens)],
        mask=[n != 1 for n in range(num_tokens)],
        finish=more.pop("finish", "stop"),
    )
    return KeptRollout(group, version=2, rollout=replace(rollout, text='a "word" \u2028\n é'), **more)


ROLLOUTS = [
    kept(1, 0, 4, score=Score(1 / 3, misplaced=True)),
    kept(1, 1, 2, score=Score(None, "grader_error", "no such\nthing")),
    kept(1, 2, 3, finish="length"),
    kept(5, 0, 3, finish="interrupted"),
    kept(5, 1, 3, finish="interrupted", score=Score(0.0, misplaced=False)),
]


def test_rollouts_are_read_as_they_were_written(tmp_path):
    """Bit for bit, with prompts and epochs that their groups name."""
    write(tmp_path, 1, rollouts=ROLLOUTS)
    assert newest_checkpoint(tmp_path).rollouts(prompt_at) == ROLLOUTS


def test_kept_sets_are_read_as_they_were_written(tmp_path):
    """Ids in four bytes each, as the engine records them; None for what was put in or could have been any."""
    sets = (array("i", [3, 7, 149_999]), None, array("i", [0]), None)
    truncated = [replace(one, rollout=replace(one.rollout, kept=sets[: len(one.rollout.tokens)])) for one in ROLLOUTS]
    write(tmp_path, 1, rollouts=[*truncated, ROLLOUTS[0]])
    restored = newest_checkpoint(tmp_path).rollouts(prompt_at)
    assert restored == [*truncated, ROLLOUTS[0]]
    assert [ids is None or ids.typecode for ids in restored[0].rollout.kept] == ["i", True, "i", True]


def test_a_rollout_is_a_line_without_its_prompt(tmp_path):
    folder = write(tmp_path, 1, rollouts=ROLLOUTS)
    lines = (folder / "rollouts.jsonl").read_text().split("\n")
    assert len(lines) == 6
    row = json.loads(lines[0])
    assert row == {
        "group": 1,
        "member": 0,
        "version": 2,
        "finish": "stop",
        "text": 'a "word" \u2028\n é',
        "tokens": [0, 1, 2, 3],
        "logprobs": [-math.pi, -math.pi / 2, -math.pi / 3, -math.pi / 4],
        "versions": [2, 2, 3, 3],
        "mask": [True, False, True, True],
        "reward": 1 / 3,
        "outcome": "scored",
        "detail": "",
        "misplaced": True,
    }
    assert "outcome" not in json.loads(lines[2])


def test_a_checkpoint_may_hold_no_rollout(tmp_path):
    write(tmp_path, 1)
    assert newest_checkpoint(tmp_path).rollouts(prompt_at) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-30],
        lambda text: text.replace('"group":5', '"grupp":5'),
        lambda text: text.replace('"group":5', '"group":"five"'),
        lambda text: text.replace('"logprobs":[', '"logprobs":[-1.0,', 1),
        lambda text: text.replace('"reward":0.0,', ""),
        lambda text: text.replace("[2,2,3]", "3"),
        lambda text: "[]\n" + text,
        lambda text: "\x00" * len(text),
    ],
    ids=["cut", "a key", "a type", "one too many", "half a score", "no list", "no object", "zeros"],
)
def test_damaged_rollouts_are_said_in_a_line_with_a_mend(tmp_path, damage):
    folder = write(tmp_path, 1, rollouts=ROLLOUTS)
    path = folder / "rollouts.jsonl"
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError, match=rf"{folder} can't be read \(.*remove that folder to resume from") as caught:
        newest_checkpoint(tmp_path).rollouts(prompt_at)
    assert "\n" not in str(caught.value)


def test_rollouts_that_are_gone_are_missed(tmp_path):
    folder = write(tmp_path, 1, rollouts=ROLLOUTS)
    (folder / "rollouts.jsonl").unlink()
    with pytest.raises(UserError, match=r"can't be read \(it has no rollouts\.jsonl\)"):
        newest_checkpoint(tmp_path).rollouts(prompt_at)


def test_a_disk_that_is_full_of_rollouts_leaves_the_older_ones(tmp_path, monkeypatch):
    write(tmp_path, 1, rollouts=ROLLOUTS)
    write(tmp_path, 2, rollouts=ROLLOUTS)

    def fail(kept: KeptRollout) -> dict:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_row", fail)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, 3, rollouts=ROLLOUTS)
    assert newest_checkpoint(tmp_path).progress["version"] == 2
    assert names(tmp_path) == [".unfinished", "version-00000001", "version-00000002"]
    write(tmp_path, 3, rollouts=ROLLOUTS)
    assert names(tmp_path) == ["version-00000002", "version-00000003"]
