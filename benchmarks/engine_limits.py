"""What no engine can be faster than, measured for `benchmarks/engine.py`.

The settings `linear` and `onednn`: the time of the model's matrix products alone, for as many rows per step as an
engine has that refills its lanes at once, and with products of the same rows as one (queries, keys and values; gate and
up).
`bandwidth`: on a GPU, the time in which weights and cached keys and values are read once per step.

Axes: R rows, K inputs, O outputs, V vocabulary.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engine_job import Case, Job, Results
from transformers import AutoConfig, AutoModelForCausalLM

TIMINGS = 3
PREFILL_ROWS = 512
"""Rows of one prefill pass: enough for a product to be as fast as it gets."""

AS_ONE = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate and up", "up_proj": "gate and up"}

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Layout = Callable[[torch.Tensor], torch.Tensor]
PRODUCTS: dict[str, tuple[Layout, Product]] = {
    "linear": (lambda weight_OK: weight_OK, torch.nn.functional.linear),
    "onednn": (
        lambda weight_OK: torch.ops.mkldnn._reorder_linear_weight(weight_OK),
        lambda x_RK, weight_OK: torch.ops.mkldnn._linear_pointwise(x_RK, weight_OK, None, "none", [], ""),
    ),
}
"""How weights are laid out beforehand, and the product with them."""


def step_shapes(case: Case) -> Counter[tuple[int, int]]:
    """How many steps there are with so many (rows that go through the layers, rows that are sampled from).

    Those that join are sampled from their prefill, which is counted apart.
    """
    waiting, in_flight, shapes = list(reversed(case.lengths)), [], Counter()
    while waiting or in_flight:
        num_decoding = len(in_flight)
        while waiting and len(in_flight) < case.in_flight:
            in_flight.append(waiting.pop())
        shapes[num_decoding, len(in_flight)] += 1
        in_flight = [left - 1 for left in in_flight if left > 1]
    return shapes


class Products:
    """The matrix products of a model, with random weights of its shapes: their time doesn't depend on the values."""

    def __init__(self, model: Any, layout: Layout, product: Product, device: str) -> None:
        self._product, self._device = product, device
        head = model.get_output_embeddings()
        linears = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        inside = [(name, module) for name, module in linears if module is not head]
        self._layers = [
            layout(torch.randn(sum(module.out_features for module in group), group[0].in_features, device=device))
            for group in _as_one(inside)
        ]
        self._head_VK = layout(torch.randn(head.out_features, head.in_features, device=device))
        self.layers_s = functools.cache(functools.partial(self._seconds, self._layers))
        self.head_s = functools.cache(functools.partial(self._seconds, [self._head_VK]))

    def case_s(self, case: Case) -> float:
        passes, rest = divmod(sum(map(len, case.prompts)), PREFILL_ROWS)
        prefill_s = (passes * self.layers_s(PREFILL_ROWS) if passes else 0.0) + self.layers_s(rest)
        steps = step_shapes(case).items()
        return prefill_s + sum(num * (self.layers_s(layers) + self.head_s(head)) for (layers, head), num in steps)

    def _seconds(self, weights: list[torch.Tensor], rows: int) -> float:
        if not rows:
            return 0.0
        inputs = {width: torch.randn(rows, width, device=self._device) for width in {w.shape[1] for w in weights}}

        def run() -> None:
            for weight_OK in weights:
                self._product(inputs[weight_OK.shape[1]], weight_OK)
            _synchronise(self._device)

        return seconds_of(run)


def _as_one(linears: list[tuple[str, torch.nn.Linear]]) -> list[list[torch.nn.Linear]]:
    def key(named: tuple[str, torch.nn.Linear]) -> tuple[str, str]:
        parent, _, own = named[0].rpartition(".")
        return parent, AS_ONE.get(own, own)

    return [[module for _, module in group] for _, group in groupby(linears, key)]


def bandwidth_s(model: Any, case: Case, device: str) -> float:
    """Every step reads all weights, and the keys and values [2, G, D] by layer of all tokens that are in flight."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * width
    weight_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    read_tokens = sum(len(prompt) * length + length * (length - 1) // 2 for prompt, length in case.rollouts)
    return (step_shapes(case).total() * weight_bytes + read_tokens * kv_bytes) / bytes_per_s(device)


@functools.cache
def bytes_per_s(device: str) -> float:
    """How fast the device's memory is read, by a sum over 4 GiB."""
    values = torch.zeros(1 << 30, device=device)

    def run() -> None:
        values.sum()
        _synchronise(device)

    return values.nbytes / seconds_of(run)


def seconds_of(run: Callable[[], None]) -> float:
    run()
    times = []
    for _ in range(TIMINGS):
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return median(times)


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def main() -> None:
    job, results = Job.read(Path(sys.argv[1])), Results(Path(sys.argv[2]))
    torch.set_num_threads(job.threads)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.model), dtype=torch.float32)
    products = Products(model, *PRODUCTS[job.setting], job.device) if job.setting in PRODUCTS else None
    results.add(versions=f"torch {torch.__version__}")
    with torch.no_grad():
        for case in job.cases:
            seconds = products.case_s(case) if products else bandwidth_s(model, case, job.device)
            results.add(case=case.name, seconds=seconds)


if __name__ == "__main__":
    main()
