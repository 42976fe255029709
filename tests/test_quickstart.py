"""The quickstart learns, whatever the seed. Slow: five whole runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("seed", range(5))
def test_reward_and_greedy_accuracy_rise(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headway", "train", "recipes/quickstart.toml"]
    out = tmp_path / "run"
    subprocess.run([*command, "--seed", str(seed), "--out", str(out)], cwd=ROOT, check=True, timeout=300)
    outcome = json.loads((out / "run.json").read_text())
    assert outcome["reward_first"] <= 0.4
    assert outcome["reward_last"] >= 0.9
    before, after = outcome["greedy"][0], outcome["greedy"][-1]
    assert before["accuracy"] <= 0.4
    assert after["low"] >= 0.9
    assert (out / "index.html").stat().st_size > 1e6
