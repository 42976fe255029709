"""Objectives as data: presets, overrides, refusals, and that reading them needs no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from headway.objectives.named import PRESETS, objective


def test_grpo():
    grpo = objective("grpo")
    assert (grpo.advantage, grpo.weight, grpo.weight_cap) == ("group_mean_std", "truncated", 2.0)
    assert (grpo.surrogate, grpo.clip_low, grpo.clip_high, grpo.dual_clip) == ("clipped", 0.2, 0.2, None)
    assert grpo.reduction == "rollout_mean_token_mean"


def test_dr_grpo():
    dr_grpo = objective("dr_grpo", length=64)
    assert (dr_grpo.advantage, dr_grpo.reduction, dr_grpo.length) == ("group_mean", "constant", 64)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_names_its_sources_and_what_it_records(name):
    preset = objective(name)
    assert preset.name == name
    assert all("20" in source for source in preset.sources)
    assert "behaviour_logprobs" in preset.recorded
    assert "behaviour_logprobs" not in objective(name, weight="none").recorded


def test_overrides_replace_and_none_keeps():
    changed = objective("grpo", weight_cap=5.0, reduction="token_mean", clip_high=None)
    assert (changed.weight_cap, changed.reduction, changed.clip_high) == (5.0, "token_mean", 0.2)
    assert objective("grpo").weight_cap == 2.0


def test_a_description_is_frozen_and_compares_by_value():
    assert objective("grpo", weight_cap=2.0) == objective("grpo")
    with pytest.raises(FrozenInstanceError):
        objective("grpo").weight_cap = 3.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gpro", {}, "unknown objective 'gpro'; the nearest valid name is grpo"),
        ("drgrpo", {}, "the nearest valid name is dr_grpo"),
        ("grpo", {"reduction": "token-mean"}, "unknown reduction 'token-mean'; the nearest valid name is token_mean"),
        ("grpo", {"reduction": "seq_mean_token_mean"}, "nearest valid name is rollout_mean_token_mean"),
        ("grpo", {"advantage": "group_mean_sd"}, "nearest valid name is group_mean_std"),
        ("grpo", {"weight": "truncate"}, "nearest valid name is truncated"),
        ("grpo", {"surrogate": "clip"}, "nearest valid name is clipped"),
        ("grpo", {"weightcap": 2.0}, "nearest valid name is weight_cap"),
        ("grpo", {"name": "mine"}, "unknown setting of an objective 'name'"),
        ("grpo", {"weight_cap": 0.0}, "weight_cap 0.0 must be above 0"),
        ("grpo", {"weight_cap": float("nan")}, "weight_cap nan"),
        ("grpo", {"clip_low": 1.5}, "clip_low 1.5 must be above 0 and at most 1"),
        ("grpo", {"clip_high": -0.1}, "clip_high"),
        ("grpo", {"dual_clip": 1.0}, "dual_clip 1.0 must be above 1"),
        ("dr_grpo", {"length": 0}, "length 0"),
    ],
)
def test_what_is_not_valid_is_refused_with_the_nearest_choice(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        objective(name, **overrides)


def test_reading_the_names_imports_no_torch():
    program = "import sys, headway.objectives.named; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
