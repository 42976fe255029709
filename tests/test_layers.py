"""The layout: imports point down, and what should start at once does."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

import headway

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "numpy", "transformers", "ray", "vllm", "sglang", "pandas"}

LIGHT_PACKAGES = ("schedule", "simulate", "reports")
LIGHT = [
    *("headway.cli", "headway.run", "headway.sweep", "headway.simulation", "headway.program"),
    "headway.mismatch.setting",
    *("headway.config", "headway.data", "headway.render", "headway.checkpoint"),
    *("headway.stages", "headway.clock", "headway.trace", "headway.types", "headway.objectives.named"),
    *(
        f"headway.{package}.{module.name}"
        for package in LIGHT_PACKAGES
        for module in pkgutil.iter_modules([f"{headway.__path__[0]}/{package}"])
    ),
]


def heavy_modules_after(program):
    """Which heavy packages are loaded once `program` has run in a process of its own."""
    ending = f"\nimport json, sys\nprint('heavy:', json.dumps(sorted({HEAVY!r} & sys.modules.keys())))"
    done = subprocess.run(
        [sys.executable, "-c", program + ending], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.rpartition("heavy:")[2]))


def test_imports_point_down(capsys):
    status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_the_light_modules_load_nothing_heavy():
    """Each is imported in turn into one process: the first that loads something heavy is named."""
    program = f"""
import importlib, sys
for name in {LIGHT!r}:
    importlib.import_module(name)
    loaded = sorted({HEAVY!r} & sys.modules.keys())
    assert not loaded, f"importing {{name}} loads {{loaded}}"
"""
    assert heavy_modules_after(program) == set()


def test_the_light_modules_are_all_there():
    assert {"headway.schedule.loop", "headway.simulate.doubles", "headway.reports.page"} <= set(LIGHT)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["simulate", "--help"],
        ["train", "--help"],
        ["simulate", "--steps", "3", "--timeline", "--lengths", "1"],
    ],
    ids=" ".join,
)
def test_commands_that_start_at_once(words):
    program = f"""
import sys
from headway.cli import main
sys.argv = ["headway", *{words!r}]
try:
    main()
except SystemExit as ending:
    assert not ending.code, ending.code
"""
    assert heavy_modules_after(program) == set()


def test_this_test_would_see_something_heavy():
    assert "torch" in heavy_modules_after("import headway.objectives.reduce")
