"""The benchmarks of training: what they count, that they train the same, and what they say to bad arguments."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

from benchmarks import measuring

MEASURED = "benchmarks/training.py"


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, script, *words], capture_output=True, text=True)


@pytest.mark.slow
def test_every_row_of_forward_and_backward_trains_the_same_tokens():
    """Two groups, each of answers of 2, 3 and 4 tokens to a prompt of 5: 5 + 1 + 2 + 3 rows, or 3 * 5 + 6."""
    sizes = ("--groups", "2", "--group-size", "3", "--prompt", "5", "--shortest", "2", "--longest", "4")
    done = run(MEASURED, "--model", "recipes/quickstart/base", "--repeats", "1", "--threads", "1", *sizes)
    assert done.returncode == 0, done.stderr
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:]] for line in _rows(done.stdout)}
    assert cells["Headway, packed groups"][1:3] == ["1", "22"]
    assert cells["Headway, prompt repeated"][2] == "42"
    assert cells["the products alone, oneDNN"][2] == "22"
    assert cells["TRL"][0] == "not installed"
    assert "the same in all of them" in done.stdout


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(
    ("script", "words", "complaint"),
    [
        (MEASURED, "--longest 3", "--longest 3 is less than --shortest 64"),
        (MEASURED, "--group-size 1", "--group-size is 1; it must be 2 or more"),
        (MEASURED, "--trl-python no/python", "there is no python at no/python"),
        (MEASURED, "--out README.md", "README.md has no part between the lines"),
        ("benchmarks/against_trl.py", "--steps 2", "--steps is 2; it must be 5 or more"),
        ("benchmarks/against_trl.py", "--recipe no.toml", "there is no recipe no.toml"),
    ],
)
def test_a_bad_argument_is_a_line(script, words, complaint):
    done = run(script, *words.split())
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_tables_replace_what_stood_between_their_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter <!-- b: begin --><!-- b: end -->\n")
    for _ in range(2):
        measuring.write_marked(page, "a", "| new |")
    assert page.read_text() == (
        "before\n<!-- a: begin -->\n\n| new |\n\n<!-- a: end -->\nafter <!-- b: begin --><!-- b: end -->\n"
    )


def test_a_peak_is_what_came_after_it_was_forgotten():
    memory = measuring.Memory()
    hold_for_a_moment(64)
    memory.forget_peak()
    before_mib = memory.peak_mib()
    assert before_mib < 32
    hold_for_a_moment(96)
    assert memory.peak_mib() - before_mib == pytest.approx(96, abs=4)


def hold_for_a_moment(mib: int) -> None:
    """Memory of its own mapping: what a heap gives back it may keep, and then nothing falls."""
    with mmap.mmap(-1, mib << 20) as held:
        for _ in range(mib):
            held.write(bytes(1 << 20))


def test_a_spread_is_the_median_and_the_ends():
    assert measuring.spread([3000.0, 1.0, 20.0]) == "20 (1-3,000)"
    assert measuring.spread([0.125], 2) == "0.12"
    assert measuring.table(["a", "b"], [["c", "1"]]) == "| a | b |\n| --- | --: |\n| c | 1 |"
