"""How long a step takes at least, from bytes moved and operations done, and at stated efficiencies.

A decode step reads the weights and every cached token once, and multiplies each rollout's new token with the weights:
it takes the longer of the two, and a fixed overhead. Prefill and training are bound by arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.plan.gpus import Gpu
from headway.plan.shapes import ModelShape


@dataclass(frozen=True)
class Efficiency:
    """Shares of the vendor's figures that are reached, and what comes on top.

    bandwidth: of reading weights and cache; prefill, training: of dense bf16 arithmetic; link: of links between GPUs
    and machines; step_overhead_s: of launching and sampling in each decode step; collective_s: of one all-reduce among
    GPUs that share a layer, beside its bytes. bandwidth 0.8 to 0.9 of nominal is usual, large products reach 0.5 to
    0.87 of it, whole train steps 0.3 to 0.5, and overheads lie between 1 and 15 ms.
    """

    bandwidth: float = 0.8
    prefill: float = 0.5
    training: float = 0.4
    link: float = 0.8
    step_overhead_s: float = 2e-3
    collective_s: float = 10e-6


NOMINAL = Efficiency(bandwidth=1.0, prefill=1.0, training=1.0, link=1.0, step_overhead_s=0.0, collective_s=0.0)
"""The vendor's figures as they are: the roofline itself."""


@dataclass(frozen=True)
class Decode:
    """One engine's decode steps, in bytes, operations and rates of all its GPUs together.

    weight_bytes: read in every step (of a mixture at full coverage); flops: of one token with the weights;
    kv_bytes, attention_flops: for one new token, of each cached one; bandwidth, rate: bytes and operations a second;
    overhead_s: of every step.
    """

    weight_bytes: float
    flops: float
    kv_bytes: float
    attention_flops: float
    bandwidth: float
    rate: float
    overhead_s: float = 0.0

    def memory_s(self, batch: float, context: float) -> float:
        return (self.weight_bytes + batch * self.kv_bytes * context) / self.bandwidth

    def arithmetic_s(self, batch: float, context: float) -> float:
        return batch * (self.flops + self.attention_flops * context) / self.rate

    def step_s(self, batch: float, context: float) -> float:
        """One new token for each of `batch` rollouts that have `context` tokens each."""
        return max(self.memory_s(batch, context), self.arithmetic_s(batch, context)) + self.overhead_s

    def tokens_per_s(self, batch: float, context: float) -> float:
        return batch / self.step_s(batch, context)

    def crossover(self, context: float) -> float:
        """Rollouts from which arithmetic is the bound; infinite where the cache of each takes longer to read than its
        arithmetic takes.
        """
        each = (self.flops + self.attention_flops * context) / self.rate - self.kv_bytes * context / self.bandwidth
        return (self.weight_bytes / self.bandwidth) / each if each > 0 else math.inf

    @property
    def never_from(self) -> float:
        """Context from which on decoding is never bound by arithmetic, however many rollouts there are."""
        per_token = self.kv_bytes / self.bandwidth - self.attention_flops / self.rate
        return self.flops / self.rate / per_token if per_token > 0 else math.inf


def decode(
    shape: ModelShape,
    gpu: Gpu,
    efficiency: Efficiency,
    *,
    batch: float,
    tensor: int = 1,
    weight_bytes: float = 2.0,
    kv_bytes: float = 2.0,
) -> Decode:
    """Of an engine on `tensor` GPUs with so many rollouts in flight, which say how many experts are read.

    The input embedding is looked up, neither read nor multiplied. weight_bytes, kv_bytes: of one number. Windows are
    taken for not reached: `cache_tokens` tells how many of a rollout's tokens are read.
    """
    collectives = 2 * shape.num_layers if tensor > 1 else 0
    moved = batch * shape.hidden * 2 * 2 * (tensor - 1) / tensor  # an all-reduce of bf16 sends and gathers
    collective_s = collectives * (efficiency.collective_s + moved / (gpu.link * efficiency.link))
    return Decode(
        weight_bytes=weight_bytes * shape.num_touched_params(batch),
        flops=2.0 * shape.num_matrix_params,
        kv_bytes=shape.kv_bytes_per_token(kv_bytes),
        attention_flops=shape.attention_flops(1),
        bandwidth=tensor * gpu.bandwidth * efficiency.bandwidth,
        rate=tensor * gpu.bf16_flops * efficiency.prefill,
        overhead_s=efficiency.step_overhead_s + collective_s,
    )


def cache_tokens(shape: ModelShape, num_tokens: float) -> float:
    """Of a rollout of so many tokens, how many are read in a step: with windows fewer, averaged over layers."""
    return shape.kv_bytes(num_tokens) / shape.kv_bytes_per_token()


def prefill_flops(shape: ModelShape, num_tokens: float) -> float:
    """Of a prompt of so many tokens."""
    return 2.0 * shape.num_matrix_params * num_tokens + shape.causal_attention_flops(num_tokens)


def prefill_s(shape: ModelShape, num_tokens: float, gpu: Gpu, efficiency: Efficiency, *, tensor: int = 1) -> float:
    return prefill_flops(shape, num_tokens) / (tensor * gpu.bf16_flops * efficiency.prefill)


@dataclass(frozen=True)
class TrainPasses:
    """Forward passes' worth of arithmetic of one trained token.

    A backward pass takes two of them, one where weights are frozen; checkpointing computes the forward pass again;
    a critic is trained like the policy; a reference, a reward model and recomputed log-probs take one each.
    """

    frozen_base: bool = False
    checkpointing: bool = True
    critic: bool = False
    scored_by: int = 0
    recomputed: bool = False

    @property
    def number(self) -> float:
        """
        >>> TrainPasses(checkpointing=False).number, TrainPasses(critic=True, scored_by=2).number
        (3, 10)
        """
        policy = 2 + self.checkpointing if self.frozen_base else 3 + self.checkpointing
        critic = 3 + self.checkpointing if self.critic else 0
        return policy + critic + self.scored_by + self.recomputed


def train_flops(shape: ModelShape, num_tokens: float, attention_flops: float, passes: TrainPasses) -> float:
    """Of so many tokens, whose attention takes so many operations in one forward pass."""
    return passes.number * (2.0 * shape.num_matrix_params * num_tokens + attention_flops)


def train_s(flops: float, gpu: Gpu, num_gpus: int, efficiency: Efficiency) -> float:
    return flops / (num_gpus * gpu.bf16_flops * efficiency.training)


def transfer_s(num_bytes: float, bandwidth: float, *, links: int = 1) -> float:
    """Of weights over so many links that each carry `bandwidth` bytes a second.

    >>> transfer_s(14e9, 50e9), transfer_s(2e12, 50e9, links=64)
    (0.28, 0.625)
    """
    return num_bytes / (links * bandwidth)
