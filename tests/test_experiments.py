"""The experiments' arms are runs that Headway accepts, and their pages can be written. Running them is for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from experiments import adapters, collapse, objectives, staleness
from experiments.page import Section, curves, over_time, small_multiples, smoothed, write
from experiments.side_by_side import PROCESS, RECIPE, Arm, Outcome, recipe_without, run_all
from experiments.wrong_engine import round_to, with_fault
from headway import config, run
from headway.objectives.named import PRESETS
from headway.types import UserError
from tests.tiny import make_policy, own_logprobs

RUNS = [
    *((objectives.arm(name), objectives.SHARED, RECIPE) for name in PRESETS),
    *((arm, staleness.SHARED, RECIPE) for arm in staleness.arms()),
    *((arm, collapse.SHARED, RECIPE) for arm in collapse.arms()),
    *((arm, adapters.SHARED, adapters.RECIPE) for arm in adapters.ARMS),
]


@pytest.mark.parametrize(("arm", "shared", "recipe"), RUNS, ids=lambda value: getattr(value, "name", ""))
def test_every_arm_is_a_run_that_is_accepted(tmp_path: Path, arm: Arm, shared: Sequence[str], recipe: Path):
    bare = recipe if recipe == adapters.RECIPE else recipe_without("objective", recipe, tmp_path)
    resolved = config.resolve(bare, [*shared, *arm.words])
    assert run.chosen_objective(resolved.config).unsound == (arm.name.startswith("grpo-unsound"))


def test_arms_have_names_of_their_own():
    for arms in (staleness.arms(), collapse.arms(), adapters.ARMS, map(objectives.arm, PRESETS)):
        names = [arm.name for arm in arms]
        assert len(set(names)) == len(names)


def test_an_engine_of_few_bits_is_off_by_as_much():
    assert round_to(torch.tensor([1.0, 1.3, -5.2]), bits=3).tolist() == [1.0, 1.25, -5.0]
    assert round_to(torch.tensor([1.3]), bits=24).item() == torch.tensor(1.3).item()
    policy = make_policy()
    exact = own_logprobs(policy, [1, 2], [3, 4])
    with_fault(policy, "bits=2")
    assert (own_logprobs(policy, [1, 2], [3, 4]) - exact).abs().max() > 1e-3


def test_a_soft_cap_bounds_the_engines_logits():
    capped = with_fault(make_policy(), "softcap=0.5")
    hidden_ND = 100 * torch.randn(4, 32)
    assert capped.head.logits(hidden_ND).abs().max() <= 0.5
    with pytest.raises(UserError, match="unknown fault 'slow'; it may be exact, bits=2 or softcap=6"):
        with_fault(make_policy(), "slow")


def outcomes() -> list[Outcome]:
    rows = [{"version": step, "at_s": 60.0 * step, "reward_mean": step / 10} for step in range(1, 6)]
    return [Outcome(Arm("first <b>"), rows, {"greedy": [{"accuracy": 0.5}]}), Outcome(Arm("failed"), [], {}, "why")]


def test_a_page_is_written_and_nothing_in_it_is_markup(tmp_path: Path):
    shown = outcomes()
    figures = [curves(shown, "reward_mean", "reward", smooth=2), over_time(shown, "reward_mean", "reward")]
    sections = [Section("<i>", "a & b", figure) for figure in (*figures, small_multiples(shown, "reward_mean"))]
    write(tmp_path / "page.html", "<title>", "lead", [*sections, Section("table", "", table=[["a"], ["<script>"]])])
    page = (tmp_path / "page.html").read_text()
    assert "&lt;script&gt;" in page
    assert "<td><script>" not in page
    assert "<h1>&lt;title&gt;</h1>" in page


def test_columns_and_means():
    first, failed = outcomes()
    assert first.column("reward_mean")[0] == [1, 2, 3, 4, 5]
    assert first.last("reward_mean", 2) == pytest.approx(0.45)
    assert first.greedy == 0.5
    assert failed.last("reward_mean") is None
    assert failed.greedy is None
    assert smoothed([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]


@pytest.mark.slow
def test_runs_are_kept_and_failures_have_their_reason(tmp_path: Path):
    """In processes of their own: one that evaluates nothing and ends at once, and one that is refused."""
    words = ("--run.steps", "1", "--evaluate.size", "0", "--evaluate.every", "0")
    arms = [Arm("good", words), Arm("bad", ("--objective.name", "nothing"))]
    good, bad = run_all(arms, RECIPE, tmp_path)
    assert good.failure == ""
    assert good.last("reward_mean") is not None
    assert good.figures["peak_memory_bytes"] > 1e7
    assert "unknown objective 'nothing'" in bad.failure
    (tmp_path / "good" / PROCESS).write_text(json.dumps({"peak_memory_bytes": 1}))
    assert run_all(arms[:1], RECIPE, tmp_path)[0].figures["peak_memory_bytes"] == 1  # not run again
