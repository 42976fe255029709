"""A training run whose engine computes in low precision: `python -m experiments.low_precision BITS RECIPE [OPTIONS]`.

Every linear layer of the engine's copy of the model gives its outputs with BITS significant bits (8 is bfloat16's, 4 is
that of an 8-bit float, e4m3). Weights, LM head and the trainer stay in float32. It is what an engine with cheaper
kernels does, on purpose and in a known amount.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from headway import config as settings
from headway import run
from headway.models.policy import Policy


def round_to(value: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest numbers with `bits` significant bits.

    >>> round_to(torch.tensor([1.0, 1.3, -5.2]), bits=3)
    tensor([ 1.0000,  1.2500, -5.0000])
    """
    mantissa, exponent = torch.frexp(value)
    scale = 2.0**bits
    return torch.ldexp((mantissa * scale).round() / scale, exponent)


def lower(policy: Policy, bits: int) -> None:
    """Round the outputs of every linear layer of a policy from now on."""
    for module in policy.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(_Rounding(bits))


class _Rounding:
    """A forward hook."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def __call__(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return round_to(output, self._bits)


def main() -> None:
    bits, recipe, *overrides = sys.argv[1:]
    resolved = settings.resolve(Path(recipe), overrides)
    folder = Path(resolved.config.run.out or "runs/low-precision")

    def change(parts: Any) -> Any:
        if int(bits) < 24:  # float32 has 24
            lower(parts.engine_policy, int(bits))
        return parts

    run.train(resolved, folder, change=change)
    print(run.report(folder))


if __name__ == "__main__":
    main()
