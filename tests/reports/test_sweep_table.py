"""The table of a sweep: for people where it fits, else for programs."""

from __future__ import annotations

import io
import re

import pytest

from headway import sweep
from headway.reports import sweep_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def runs():
    words = ("--lanes", "2", "--batch-size", "2", "--steps", "2", "--lengths", "1,3,1")
    return sweep.simulate(sweep.jobs(None, words, sweep.parse(["run_ahead=0,1"])))


def shown(runs, stream) -> list[str]:
    sweep_table.show(runs, stream)
    return stream.getvalue().splitlines()


def test_people_get_percentages_and_what_the_columns_mean(runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in shown(runs, Terminal())]
    assert " ".join(lines[3].split()) == "1 1 1.50x 100.0 % 50.0 % 0.5 0.667 1 0.0 % 1.125 none"
    assert "token lag: mean lag over the trained tokens" in " ".join(" ".join(lines).split())


def test_a_narrow_terminal_gets_what_a_file_gets(runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert shown(runs, Terminal()) == shown(runs, io.StringIO()) == sweep_table.plain(runs).splitlines()


def test_without_a_terminal_nothing_is_said_of_the_progress(capsys):
    with sweep_table.progress(3) as done:
        done()
    assert capsys.readouterr() == ("", "")
