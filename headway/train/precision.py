"""The dtype of matrix products, the same for trainer, reference and critic."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def products_in(compute_dtype: str, device: torch.device) -> AbstractContextManager[Any]:
    """Within the block matrix products are in `compute_dtype` (float32 or bfloat16); weights stay as they are."""
    if compute_dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
