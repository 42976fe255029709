"""Real and simulated runs are one program: `schedule/` has no branch that knows."""

import ast
from pathlib import Path

import pytest

import headway

SOURCE = Path(headway.__file__).parent
SCHEDULE = sorted((SOURCE / "schedule").glob("*.py"))
NAMES = ["bound", "groups", "ledger", "loop", "pass_rates", "policy", "waiting"]


def imported(path):
    """Every module that a file imports, `from x import y` as x and x.y."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls_of(path, function):
    """The functions of a file in which `function` (dotted) is called."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            calls = [ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)]
            yield from [node.name] * calls.count(function)


@pytest.mark.parametrize("path", SCHEDULE, ids=lambda path: path.name)
def test_the_schedule_does_not_know_what_it_drives(path):
    source = path.read_text(encoding="utf-8").lower()
    assert not [word for word in ("simulat", "virtual", "torch", "numpy", "wall clock") if word in source]
    own = {name for name in imported(path) if name.startswith("headway.")}
    allowed = ("headway.schedule", "headway.stages", "headway.trace", "headway.types", "headway.clock")
    assert all(name.startswith(allowed) for name in own), own


def test_there_is_something_to_look_at():
    assert [path.name for path in SCHEDULE] == ["__init__.py", *(f"{name}.py" for name in NAMES)]


def test_real_and_simulated_runs_call_the_same_loop():
    assert list(calls_of(SOURCE / "program.py", "loop.run")) == ["drive"]
    assert list(calls_of(SOURCE / "run.py", "drive")) == ["_drive_for_real"]
    assert sorted(calls_of(SOURCE / "simulation.py", "drive")) == ["_live", "_on_virtual_time"]


def test_nobody_else_runs_the_loop():
    others = [path for path in SOURCE.rglob("*.py") if "headway.schedule.loop" in set(imported(path))]
    assert others == [SOURCE / "program.py"]


def test_time_is_only_read_from_the_event_loop():
    """A clock of one's own would be blind to virtual time."""
    for path in [*SCHEDULE, SOURCE / "clock.py", SOURCE / "simulate" / "doubles.py"]:
        assert not {"time", "datetime"} & set(imported(path))
