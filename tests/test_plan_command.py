"""`headway plan` as a user runs it: what it prints, writes and refuses, and that it starts without torch."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from headway.cli import app
from headway.config import resolve

QUICK = ["plan", "--model", "qwen2.5-7b", "--gpu", "h100", "--num-gpus", "8", "--quick"]
SMALL = ["--batch-size=32", "--group-size=4", "--lanes=32", "--longest=512"]


def run(*words):
    return CliRunner().invoke(app, list(words))


def numbers(output, name):
    """Of the lines that begin with `name`, the numbers."""
    lines = [line for line in output.splitlines() if line.startswith(name)]
    return [float(word.replace(",", "")) for line in lines for word in line.split() if word[0].isdigit()]


@pytest.mark.parametrize(
    ("words", "total"),
    [
        (["--algorithm", "ppo"], 252.00),
        (["--algorithm", "grpo"], 112.00),
        (["--algorithm", "grpo", "--kl"], 126.00),
        (["--lora-rank", "16"], 14.65),
    ],
)
def test_states_at_a_nominal_size_are_the_textbooks(words, total):
    output = run(*QUICK, "--nominal", "7e9", *words).output
    assert numbers(output, "total")[0] == total
    assert "a nominal 7e+09 parameters each" in output


@pytest.mark.parametrize(
    ("words", "total"),
    [(["--algorithm", "ppo"], 274.16), ([], 121.85), (["--kl"], 137.08), (["--lora-rank", "16"], 15.88)],
)
def test_states_of_the_real_shape(words, total):
    """16 x 7,615,616,512 = 121.85 GB; twice that and two frozen copies; with one; and 15.23 + 0.65."""
    assert numbers(run(*QUICK, *words).output, "total")[0] == total


def test_every_line_of_memory_and_every_time_is_explained():
    output = run(*QUICK).output
    for words in ("engine's weights", "keys and values", "Adam's moments", "ZeRO over", "a decode step", "prefill"):
        assert words in output
    assert "generate.lanes 256 (assumed)" in output
    assert "recommended:" in output


def test_schedules_are_simulated_and_one_is_written(tmp_path):
    written = tmp_path / "chosen.toml"
    result = run(*QUICK[:-1], "--price", "2.5", *SMALL, "--write", str(written))
    assert result.exit_code == 0
    assert "all 8 by turns" in result.output
    assert "price" in result.output
    assert resolve(written).config.schedule.batch_size == 32


def test_json_has_every_figure():
    found = json.loads(run(*QUICK[:-1], *SMALL, "--json").output)
    assert found["model"]["params"] == 7_615_616_512
    assert found["state_bytes"] == {"policy": 16 * 7_615_616_512}
    chosen = found["candidates"][found["chosen"]]
    assert chosen["fits"]
    assert chosen["simulated"]["tokens_per_s"] > 0
    for pool in chosen["memory"].values():
        for phase in pool.values():
            assert sum(line["expected"] for line in phase["lines"]) == pytest.approx(phase["expected_bytes"])


def test_a_doubtful_figure_of_a_card_is_marked():
    assert "from memory" in run("plan", "--model", "qwen2.5-0.5b", "--gpu", "rtx-4090", "--quick").output


def test_nothing_to_write_where_nothing_fits(tmp_path):
    words = ["plan", "--model", "llama-3.1-70b", "--gpu", "l4", "--quick"]
    result = run(*words)
    assert "nothing fits" in result.output
    refused = run(*words, "--write", str(tmp_path / "r.toml"))
    assert "nothing fits, so there is no schedule to write" in str(refused.exception)
    assert not (tmp_path / "r.toml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h10"], "unknown GPU 'h10'; did you mean h100-sxm"),
        (["--modle", "x"], "unknown option --modle; did you mean --model?"),
        (["--write", "/nowhere/r.toml"], "--write /nowhere/r.toml: there is no folder /nowhere"),
        (["missing.toml"], "there is no recipe missing.toml"),
    ],
)
def test_bad_input(words, message):
    assert message in str(run(*QUICK, *words).exception)


def test_it_starts_without_torch():
    code = (
        "import sys\nfrom headway.cli import app\n"
        f"app({QUICK!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'transformers', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
