"""The commands of `docs/simulator.md` and what they print. `python -m tests.simulator_page` refreshes the page.

A line `    ...` leaves out the rest of an output. RUN stands for the folder of a run.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from headway import config, simulation
from headway.cli import app

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "simulator.md"
CUT = "    ..."


@dataclass(frozen=True)
class Shown:
    """A command of the page and the lines below it; begins, ends: of those lines, on the page."""

    command: str
    lines: list[str]
    begins: int
    ends: int

    @property
    def has_output(self) -> bool:
        return bool(self.lines)

    @property
    def is_long(self) -> bool:
        return "recipes/simulated" in self.command or "--engine" in self.command

    def of(self, output: str) -> list[str]:
        """As much of an output as the page shows."""
        lines = [f"    {line}".rstrip() for line in output.rstrip("\n").split("\n")]
        return [*lines[: len(self.lines) - 1], CUT] if self.lines and self.lines[-1] == CUT else lines


def shown(text: str) -> list[Shown]:
    lines, found = text.split("\n"), []
    for number, line in enumerate(lines):
        if match := re.fullmatch(r"    \$ (headway .*)", line):
            ends = number + 1
            while lines[ends].startswith("    ") and not lines[ends].startswith("    $"):
                ends += 1
            found.append(Shown(match[1], lines[number + 1 : ends], number + 1, ends))
    return found


def workplace(folder: Path) -> Path:
    """A folder in which the commands can be run: with the recipes, and a run to replay."""
    (folder / "recipes").symlink_to(REPOSITORY / "recipes")
    recorded = folder / "RUN"
    recorded.mkdir()
    resolved = config.resolve(None, ["--lanes=4", "--batch-size=4", "--steps=6", "--train-time=0.5", "--run-ahead=1"])
    (recorded / "config.toml").write_text(resolved.to_toml())
    events = simulation.simulate(resolved.config)
    (recorded / "trace.jsonl").write_text("".join(event.to_json() + "\n" for event in events))
    return folder


def printed(command: str) -> str:
    """What a command of the page prints, run in the current folder."""
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def refreshed(text: str) -> str:
    lines = text.split("\n")
    for command in reversed(shown(text)):
        if command.has_output:
            print(command.command, file=sys.stderr)
            lines[command.begins : command.ends] = command.of(printed(command.command))
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(workplace(Path(folder)))
        PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
