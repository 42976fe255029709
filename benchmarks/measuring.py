"""What the benchmarks share: a process for each measurement, its memory, and tables between a page's marks.

Of the standard library alone, since the python of a peer's environment reads it too. Memory is read as Linux shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Parser(argparse.ArgumentParser):
    """One whose complaint is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class Memory:
    """Resident memory of this process beyond what it holds when this is made, which is after its imports."""

    def __init__(self) -> None:
        self._settled_mib = _resident_mib("VmRSS")

    @staticmethod
    def forget_peak() -> None:
        """What was held before this moment is no peak."""
        CLEAR.write_text("5")

    def peak_mib(self) -> float:
        return _resident_mib("VmHWM") - self._settled_mib


def _resident_mib(field: str) -> float:
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None, f"{STATUS} shows no {field}"
    return int(found[1]) / 1024


def in_a_process(command: Sequence[str | Path], order: dict[str, Any], threads: int) -> dict[str, Any]:
    """Give `order` as JSON to a fresh process -> what its last line says, as JSON.

    Raises SystemExit with one line for a process that fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, env=environment)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        sys.exit(f"{Path(sys.argv[0]).name}: a measurement failed ({Path(command[1]).name}): {said}")
    return json.loads(done.stdout.splitlines()[-1])


def peer_python(parser: Parser, path: Path | None, package: str) -> Path | None:
    """The python of an environment that has `package`; None where there is none. A wrong path is an error."""
    if path is None:
        return None
    if not os.access(path, os.X_OK) or path.is_dir():
        parser.error(f"there is no python at {path}; give the python of an environment that has {package}")
    found = subprocess.run(
        [path, "-c", f"import importlib.util as u; print(u.find_spec('{package}') is not None)"],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        parser.error(f"{path} is no python; give the python of an environment that has {package}")
    return path if found.stdout.strip() == "True" else None


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median, and the least and the largest where there are several."""
    shown = f"{median(values):,.{digits}f}"
    return f"{shown} ({min(values):,.{digits}f}-{max(values):,.{digits}f})" if len(values) > 1 else shown


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown; the first column is words, the others are figures."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def check_marks(parser: Parser, page: Path | None, name: str) -> None:
    """Before hours of measuring: whether `page` can take the tables."""
    if page is None:
        return
    begin, end = _marks(name)
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if not 0 <= text.find(begin) < text.find(end):
        parser.error(f"{page} has no part between the lines {begin} and {end}; give it these two lines")


def write_marked(page: Path, name: str, text: str) -> None:
    """Put `text` between the marks `name` of a page; the rest of it stays."""
    begin, end = _marks(name)
    before, rest = page.read_text(encoding="utf-8").split(begin, 1)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
