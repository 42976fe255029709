"""Every recipe parses and simulates."""

from pathlib import Path

import pytest

from headway import run, simulation
from headway.config import resolve
from tests.summaries import summary_of

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_simulates(recipe):
    config = resolve(recipe, ["--run.steps", "3", "--evaluate.size", "4"]).config
    events = simulation.simulate(config)
    figures = summary_of(events)
    assert (events[-1].kind, events[-1]["reason"]) == ("ended", "steps done")
    assert len(figures["batches"]) == 3
    assert all(len(batch) == config.schedule.batch_size for batch in figures["batches"])
    assert figures["mean_lag"] <= config.schedule.run_ahead


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_says_what_a_run_needs(recipe):
    resolved = resolve(recipe)
    assert {resolved.origins[key] for key in ("model.path", "data.source")} == {"recipe"}
    assert run.describe(resolved)
