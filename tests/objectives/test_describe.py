"""What `headway objectives` prints is read off the descriptions."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headway.objectives import describe, overrides
from headway.objectives.corrections import CORRECTIONS
from headway.objectives.named import PRESETS, objective
from headway.objectives.parts import ReductionName


def test_the_overview_has_a_line_for_each():
    named = [line.split()[0] for line in describe.overview().splitlines() if line.startswith("  ")]
    assert named == [*PRESETS, *CORRECTIONS]


@pytest.mark.parametrize("name", PRESETS)
def test_a_description_has_source_formula_parts_values_and_needs(name):
    text = describe.description(objective(name))
    preset = PRESETS[name]
    assert text.startswith(f"{name}\n    {preset.source}")
    for term in preset.terms:
        assert term.loss.formula in text
        assert all(weight.formula in text for weight in term.weights)
    assert preset.advantage.formula in text
    assert all(note in text for note in preset.notes)
    assert ("a frozen reference" in text) == preset.needs_reference
    assert ("a critic with" in text) == preset.needs_critic


@pytest.mark.parametrize("name", PRESETS)
def test_the_settings_shown_give_the_same_objective(name):
    values = overrides.values(PRESETS[name])
    assert objective(name, corrections=values.pop("corrections"), **values) == PRESETS[name]


def test_a_change_shows_in_formula_settings_and_refusals():
    text = describe.description(objective("grpo", corrections=["tis:5"], clip_high=0.28, kl_coefficient=0))
    assert "min(pi_prox/mu, 5) x min(rho A, clip(rho, 0.8, 1.28) A)" in text
    assert 'corrections = ["tis:5"]' in text
    assert "clip_high = 0.28" in text
    assert "k3" not in text
    assert "refused" not in text
    assert "no weight against the policy that sampled" in describe.description(objective("grpo"))


def test_every_reduction_says_what_masked_tokens_do():
    assert set(describe.REDUCTIONS) == set(ReductionName.__args__)
    assert all(masked for _, masked in describe.REDUCTIONS.values())


def test_describing_needs_no_torch():
    program = (
        "import sys; from headway.objectives import describe; describe.overview(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
