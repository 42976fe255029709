"""What is known of accelerators: `facts/gpus.toml`, in units of bytes, seconds and operations."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from headway.types import UserError, did_you_mean, nearest


@dataclass(frozen=True)
class Gpu:
    """One accelerator. All figures are the vendor's nominal ones.

    memory_bytes; bandwidth: of its memory, bytes/s; bf16_flops and fp8_flops: dense, 1/s; link: one way between GPUs
    of one machine, bytes/s; network: one way to other machines, bytes/s; sustained_flops: what large bf16 products
    were measured to reach. doubt: why a figure is uncertain, or "".
    """

    name: str
    title: str
    memory_bytes: float
    bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    link: float
    link_name: str
    network: float
    sustained_flops: float | None
    source: str
    doubt: str = ""

    def is_device(self, device: str) -> bool:
        """Whether a driver may call it so, as NVIDIA H100 80GB HBM3.

        >>> find_gpu("a100").is_device("NVIDIA A100-SXM4-80GB"), find_gpu("l4").is_device("NVIDIA L40S")
        (True, False)
        >>> find_gpu("a100").is_device("NVIDIA A100-SXM4-40GB"), find_gpu("h100").is_device("NVIDIA H100 PCIe")
        (False, False)
        """
        maker, *rest = self.title.lower().split()
        words = re.split(r"[ -]", device.lower())
        said = [word for word in words if re.fullmatch(r"\d+gb", word)]
        same_size = not said or abs(int(said[0].removesuffix("gb")) * 1e9 / self.memory_bytes - 1) < 0.1
        return (rest[0] if maker == "rtx" else maker) in words and ("pcie" in rest) == ("pcie" in words) and same_size

    @property
    def ridge(self) -> float:
        """FLOP per byte of memory traffic from which on arithmetic is the limit (bf16)."""
        return self.bf16_flops / self.bandwidth


@cache
def gpus() -> Mapping[str, Gpu]:
    """All that are known, by name, in the order of the file."""
    return {name: _gpu(name, row) for name, row in _rows().items()}


def find_gpu(name: str) -> Gpu:
    """By name or another usual one, in any case; raises UserError with the nearest names."""
    asked = name.strip().lower().replace("_", "-").replace(" ", "-")
    names = {alias: known for known, row in _rows().items() for alias in (known, *row.get("aliases", ()))}
    if asked not in names:
        close = list(dict.fromkeys(names[alias] for alias in nearest(asked, names, num=3)))
        raise UserError(f"unknown GPU {name!r}{did_you_mean(*close) or '; known are ' + ', '.join(_rows())}")
    return gpus()[names[asked]]


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("headway.plan").joinpath("facts/gpus.toml").read_text(encoding="utf-8"))


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    return Gpu(
        name=name,
        title=row["title"],
        memory_bytes=row["memory"] * 1e9,
        bandwidth=row["bandwidth"] * 1e12,
        bf16_flops=row["bf16"] * 1e12,
        fp8_flops=row["fp8"] * 1e12 if "fp8" in row else None,
        link=row["link"] / 2 * 1e9,
        link_name=row["link_name"],
        network=row["network"] * 1e9,
        sustained_flops=row["sustained"] * 1e12 if "sustained" in row else None,
        source=row["source"],
        doubt=row.get("doubt", ""),
    )
