"""A trainer's or a critic's state as one file of a checkpoint."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint import broken


def write_state(state: dict[str, Any], path: Path) -> None:
    """Raises OSError where the file can't be written whole."""
    try:
        torch.save(state, path)
    except RuntimeError as error:  # how torch says that a file can't be written
        raise OSError(errno.EIO, f"could not be written whole, is the disk full? ({error})", str(path)) from None


def read_state(path: Path, device: torch.device) -> dict[str, Any]:
    """Raises UserError for a damaged file; its folder is the checkpoint."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise broken(path.parent, error) from None
