"""What a killed run is resumed from, written as one thing: the state of trainer and critic, the ledger's progress, and
the rollouts that no train step had taken yet.

A checkpoint is a folder that appears by one rename when it is whole; a kill while it is written leaves only a folder
with another name, which the next write removes. The newest whole one counts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.types import Prompt, Rollout, Score, UserError

_NAME = re.compile(r"version-(\d{8})")
_PROGRESS = "progress.json"
_ROLLOUTS = "rollouts.jsonl"
_PER_TOKEN = ("tokens", "logprobs", "versions", "mask")
_SCORE = ("reward", "outcome", "detail", "misplaced")
_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class KeptRollout:
    """A rollout that no train step has taken yet: finished, or as far as it had come.

    group: whose it is; version: of its ticket; score: None while it has none.
    """

    group: int
    version: int
    rollout: Rollout
    score: Score | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its folder, the ledger's progress in it, and the rollouts as they are written there."""

    folder: Path
    progress: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]] | None = None

    def rollouts(self, prompt_at: Callable[[int], tuple[Prompt, int]]) -> list[KeptRollout]:
        """The rollouts, with their prompts. prompt_at: the prompt that a group answers, and its epoch.

        Raises UserError where one of them is damaged.
        """
        if self.rows is None:
            raise broken(self.folder, ValueError(f"it has no {_ROLLOUTS}"))
        try:
            return [_kept(row, *prompt_at(row["group"])) for row in self.rows]
        except (KeyError, TypeError, ValueError) as error:
            raise broken(self.folder, ValueError(f"{_ROLLOUTS}: {type(error).__name__} {error}")) from None


def write_checkpoint(
    root: Path,
    progress: Mapping[str, Any],
    rollouts: Sequence[KeptRollout],
    save_learners: Callable[[Path], object],
    *,
    keep: int,
) -> Path:
    """Write a checkpoint named after progress["version"], then remove all but the `keep` newest.

    rollouts: written without their prompts, which the groups name. save_learners is called with the folder it may write
    into. If it fails (a full disk, say), nothing older is lost.
    """
    unfinished = root / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_learners(unfinished)
    with (unfinished / _ROLLOUTS).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(_row(rollout), separators=(",", ":")) + "\n" for rollout in rollouts)
    (unfinished / _PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
    for path in (unfinished, *unfinished.rglob("*")):
        _flush_to_disk(path)
    folder = root / f"version-{progress['version']:08d}"
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)
    _flush_to_disk(root)
    for old in _folders(root)[:-keep]:
        shutil.rmtree(old)
    return folder


def newest_checkpoint(root: Path) -> Checkpoint:
    """The newest whole checkpoint under `root`. Raises UserError when there is none."""
    folders = _folders(root)
    if not folders:
        raise UserError(f"there is no checkpoint in {root}: start the run afresh, with --checkpoint.every set")
    folder = folders[-1]
    try:
        return Checkpoint(folder, json.loads((folder / _PROGRESS).read_text(encoding="utf-8")), _rows(folder))
    except ValueError as error:
        raise broken(folder, error) from None


def _rows(folder: Path) -> list[dict[str, Any]] | None:
    path = folder / _ROLLOUTS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else None


def _row(kept: KeptRollout) -> dict[str, Any]:
    """A line of the file. Floats are written so that they are read as they were."""
    rollout = kept.rollout
    return {
        "group": kept.group,
        "member": rollout.member,
        "version": kept.version,
        "finish": rollout.finish,
        "text": rollout.text,
        **{name: getattr(rollout, name) for name in _PER_TOKEN},
        **({"kept": [ids and list(ids) for ids in rollout.kept]} if rollout.kept is not None else {}),
        **(asdict(kept.score) if kept.score else {}),
    }


def _kept(row: Mapping[str, Any], prompt: Prompt, epoch: int) -> KeptRollout:
    per_token = {name: tuple(row[name]) for name in _PER_TOKEN}
    if "kept" in row:
        per_token["kept"] = tuple(ids and array("i", ids) for ids in row["kept"])
    if len({len(values) for values in per_token.values()}) > 1:
        raise ValueError("its tokens and what belongs to them differ in number")
    return KeptRollout(
        group=row["group"],
        version=row["version"],
        rollout=Rollout(
            prompt=prompt, epoch=epoch, member=row["member"], finish=row["finish"], text=row["text"], **per_token
        ),
        score=Score(**{name: row[name] for name in _SCORE}) if "outcome" in row else None,
    )


def broken(folder: Path, error: Exception) -> UserError:
    """A checkpoint that some other program or a failing disk has damaged."""
    said = str(error).strip().split("\n")[0][:80]
    return UserError(f"{folder} can't be read ({said}); remove that folder to resume from the one before")


def _folders(root: Path) -> list[Path]:
    return sorted(
        path for path in root.glob("version-*") if _NAME.fullmatch(path.name) and (path / _PROGRESS).is_file()
    )


def _flush_to_disk(path: Path) -> None:
    """Without this a crash of the machine may keep a rename and lose what was renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
