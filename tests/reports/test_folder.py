"""A run's folder is chosen before anything is loaded, and what is wrong with it is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.config import Run
from headway.reports.folder import RunFolder, choose_folder
from headway.types import UserError


def refusal(out: Path) -> str:
    with pytest.raises(UserError) as caught:
        choose_folder(Run(out=str(out)))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").touch()
    assert refusal(tmp_path).startswith(f"{tmp_path} already holds a run")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    assert refusal(tmp_path / "taken" / "run").startswith(f"{tmp_path / 'taken'} is no folder")


def test_a_place_that_cant_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert refusal(tmp_path / "a" / "b").startswith(f"{tmp_path} can't be written to")


def test_a_name_and_a_moment_make_a_new_folder() -> None:
    assert choose_folder(Run(name="mine")).name.startswith("mine-")


def test_every_file_is_closed_even_when_one_cant_be_written_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    close_rollouts = folder.rollouts.close

    def full() -> None:
        close_rollouts()
        raise OSError(28, "No space left on device")

    folder.rollouts.close = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space left"):
        folder.close()
    assert folder.evaluations._file.closed
