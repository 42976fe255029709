"""What a killed run is resumed from: the state of trainer and critic, and the ledger's progress, written as one thing.

A checkpoint is a folder that appears by one rename when it is whole; a kill while it is written leaves only a folder
with another name, which the next write removes. The newest whole one counts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.types import UserError

_NAME = re.compile(r"version-(\d{8})")
_PROGRESS = "progress.json"
_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its folder, and the ledger's progress in it."""

    folder: Path
    progress: Mapping[str, Any]


def write_checkpoint(
    root: Path, progress: Mapping[str, Any], save_learners: Callable[[Path], object], *, keep: int
) -> Path:
    """Write a checkpoint named after progress["version"], then remove all but the `keep` newest.

    save_learners is called with the folder it may write into. If it fails (a full disk, say), nothing older is lost.
    """
    unfinished = root / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_learners(unfinished)
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
        return Checkpoint(folder, json.loads((folder / _PROGRESS).read_text(encoding="utf-8")))
    except ValueError as error:
        raise broken(folder, error) from None


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
