"""The examples in the documentation of the objectives run."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("module", ["advantages", "weights", "surrogates", "kl", "reduce", "named", "diagnostics"])
def test_examples_run(module):
    result = doctest.testmod(import_module(f"headway.objectives.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
