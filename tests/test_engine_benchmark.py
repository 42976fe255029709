"""What `benchmarks/engine.py` says of arguments, how it counts, and that it measures."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks" / "engine.py"


@pytest.fixture
def beside(monkeypatch):
    """Imports a module that stands beside the program, as the program itself does."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    return importlib.import_module


def run(*words):
    return subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parity", "close,exact"], "there is no grade 'exact'; it may be close or bitwise"),
        (["--sizes", "1,none"], "'none' is no whole number above 0"),
        (["--device", "tpu"], "--device 'tpu' is not supported; it may be cpu or cuda"),
        (["--vllm-python", "nowhere/python"], "there is no python at nowhere/python"),
        (["--out", "nowhere.md"], "nowhere.md has no part between the lines <!-- engine.py: begin -->"),
    ],
)
def test_a_wrong_argument_is_told_in_one_line_before_anything_is_measured(words, said):
    done = run(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_limit_counts_the_rows_of_an_engine_that_refills_its_lanes_at_once(beside):
    case = beside("engine_job").Case("lognormal", 2, [[5], [6, 7], [8]], lengths=[1, 3, 2])
    # Tokens by step: a b | c b | c b; c's prompt is prefilled while b decodes.
    assert beside("engine_limits").step_shapes(case) == {(0, 2): 1, (1, 2): 1, (2, 2): 1}


def test_products_on_the_same_rows_are_one_product(beside):
    limits = beside("engine_limits")
    torch = importlib.import_module("torch")
    names = ("a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.gate_proj", "b.up_proj", "b.down_proj", "c.down_proj")
    groups = limits._as_one([(name, torch.nn.Linear(1, 1)) for name in names])
    assert [len(group) for group in groups] == [3, 1, 2, 1, 1]


@pytest.mark.slow
def test_everyone_who_is_installed_is_measured(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- engine.py: begin -->\n<!-- engine.py: end -->\nafter\n")
    sizes = ["--sizes", "1,3", "--new-tokens", "3", "--rollouts", "5", "--in-flight", "2", "--mean", "2", "--cap", "4"]
    model = ["--model", str(ROOT / "recipes" / "quickstart" / "base"), "--prompt-tokens", "4"]
    done = run(*model, *sizes, "--threads", "1", "--repeats", "1", "--out", str(page))
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    speeds = {row[0].removeprefix("| "): row[1:] for row in rows if row[0] in ("| 1", "| 3", "| lognormal")}
    assert len(speeds) == 3
    for headway, bitwise, static, continuous, vllm, *limits in speeds.values():
        assert vllm == "not installed"
        measured = [headway, bitwise, static, continuous, *limits]
        assert all(float(speed.removesuffix(" |").replace(",", "")) > 0 for speed in measured)
