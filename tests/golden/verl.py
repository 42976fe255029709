"""What verl gives on small inputs, as `benchmarks/against_verl.py` wrote it down.

Axes: R rollouts of a batch; N its tokens, masked ones among them; M the trained ones of N.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RECORDED = Path(__file__).with_name("verl.json")
OUTPUTS = ("rewards", "advantages", "returns", "value", "loss", "gradient", "weights", "mask")

Case = dict[str, Any]
Outputs = dict[str, Tensor]
"""Name of an output, `metrics/` before those of metrics -> float64, flat."""


@dataclass(frozen=True)
class Batch:
    """The inputs of a case, without padding."""

    width: int
    fields: dict[str, list]

    @property
    def mask_N(self) -> Tensor:
        return self.flat("mask").bool()

    @property
    def rollout_N(self) -> Tensor:
        lengths_R = torch.tensor([len(row) for row in self.fields["mask"]])
        return torch.repeat_interleave(torch.arange(len(lengths_R)), lengths_R)

    @property
    def rollout_M(self) -> Tensor:
        return self.rollout_N[self.mask_N]

    @property
    def group_R(self) -> Tensor:
        return torch.tensor(self.fields["group"])

    def flat(self, field: str) -> Tensor:
        """A field per token; one per rollout is given to each of its tokens."""
        rows = self.fields[field]
        return flattened(rows) if isinstance(rows[0], list) else flattened(rows)[self.rollout_N]

    def trained(self, field: str) -> Tensor:
        return self.flat(field)[self.mask_N]

    def spread(self, value_M: Tensor) -> Tensor:
        """[M] -> [N], 0 where masked."""
        value_N = value_M.new_zeros(len(self.mask_N))
        value_N[self.mask_N] = value_M
        return value_N


def flattened(value: Any) -> Tensor:
    if isinstance(value, list) and isinstance(value[0], list):
        value = list(chain.from_iterable(value))
    return torch.tensor(value, dtype=torch.float64)


@cache
def recording() -> dict[str, Any]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def cases() -> list[Case]:
    return recording()["cases"]


@cache
def batch_of(name: str) -> Batch:
    fields = dict(recording()["inputs"][name])
    return Batch(fields.pop("width"), fields)


def recorded(case: Case) -> Outputs:
    """verl's outputs. What advantages it leaves on masked tokens says nothing, and is 0 here."""
    outputs = {name: flattened(case[name]) for name in OUTPUTS if name in case}
    metrics = {f"metrics/{name}": flattened(value) for name, value in case.get("metrics", {}).items()}
    if "metrics/pg_clipfrac" in metrics:
        metrics["metrics/clipped"] = metrics["metrics/pg_clipfrac"] + metrics.get("metrics/pg_clipfrac_lower", 0.0)
    for name in ("advantages", "returns", "value"):
        if name in outputs and outputs[name].dim() and "inputs" in case:
            outputs[name] = torch.where(batch_of(case["inputs"]).mask_N, outputs[name], 0.0)
    return outputs | metrics
