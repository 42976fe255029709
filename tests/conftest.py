"""Fixtures of every folder: tiny policies, a tiny model folder, a folder to start runs in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway import cli
from headway.models.policy import Policy
from tests import runs, tiny

torch.set_num_threads(1)  # tiny products only lose by sharing them out


@pytest.fixture
def policy() -> Policy:
    """A random Llama with two query heads to each key head. Each test has its own, and may change it."""
    return tiny.make_policy("llama")


@pytest.fixture
def qwen3() -> Policy:
    return tiny.make_policy("qwen3")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder, not to be changed: a random Llama with tied embeddings, a tokenizer of characters."""
    return tiny.write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a grader in it."""
    (tmp_path / "grader.py").write_text(runs.GRADER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def headway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """The command, in a folder of its own -> exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["headway", *words])
        status: object = 0
        try:
            cli.main()
        except SystemExit as ending:
            status = ending.code
        said = capsys.readouterr()
        return status or 0, said.out, said.err

    return call
