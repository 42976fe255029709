"""A training run whose engine is not the trainer: `python -m experiments.wrong_engine FAULT RECIPE [OPTIONS]`.

FAULT is one of

- `exact`: no fault;
- `bits=2`: every linear layer of the engine's copy of the model gives outputs of 2 significant bits (8 is bfloat16's, 4
  that of an 8-bit float, e4m3). It is what cheaper kernels do, on purpose and in a known amount;
- `softcap=6`: the engine caps its logits smoothly at 6, `6 tanh(logit / 6)`, and the trainer does not: a logit
  transform of the architecture that is applied on one side only. The engine then keeps sampling tokens that the trainer
  has given up.

The engine records the log-probs that it really samples from; the trainer, the weights and the sync are as ever.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headway import config as settings
from headway import run
from headway.models.policy import Policy
from headway.types import UserError


def round_to(value: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest numbers with `bits` significant bits.

    >>> round_to(torch.tensor([1.0, 1.3, -5.2]), bits=3)
    tensor([ 1.0000,  1.2500, -5.0000])
    """
    mantissa, exponent = torch.frexp(value)
    scale = 2.0**bits
    return torch.ldexp((mantissa * scale).round() / scale, exponent)


def with_fault(policy: Policy, fault: str) -> Policy:
    """The policy as a faulty engine computes it. Raises UserError for an unknown fault."""
    kind, _, value = fault.partition("=")
    match kind:
        case "exact":
            return policy
        case "bits":
            for module in policy.model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_hook(_Rounding(int(value)))
            return policy
        case "softcap":
            return replace(policy, head=replace(policy.head, softcap=float(value)))
    raise UserError(f"unknown fault {fault!r}; it may be exact, bits=2 or softcap=6")


class _Rounding:
    """A forward hook."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def __call__(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return round_to(output, self._bits)


def main() -> None:
    fault, recipe, *overrides = sys.argv[1:]
    resolved = settings.resolve(Path(recipe), overrides)
    folder = Path(resolved.config.run.out or "runs/wrong-engine")

    def change(parts: Any) -> Any:
        return replace(parts, engine_policy=with_fault(parts.engine_policy, fault))

    run.train(resolved, folder, change=change)
    print(run.report(folder))


if __name__ == "__main__":
    main()
