"""What a train step sends between GPUs, and how long new weights take by each way that they can go.

Bytes are those that each GPU sends: a ring over n of them gathers or reduces x bytes in x (n - 1) / n.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.plan.gpus import Gpu
from headway.plan.shapes import ModelShape
from headway.plan.states import PerGpu, Precision, Sharding

HOST_LINK = 25e9
"""Bytes a second between a GPU and its host, one way: PCIe 4 x16 in use."""

DISK = 2e9
"""Bytes a second of a local solid-state disk, each for writing and for reading."""

LAUNCH_S = 1e-3
"""Of a transfer of weights, beside its bytes."""


@dataclass(frozen=True)
class Links:
    """Bytes a second that a GPU sends: to those that share a layer with it, and to its other ranks.

    within: a machine's own links; between: those among data ranks, the network where they are on several machines.
    """

    within: float
    between: float


def links(gpu: Gpu, share: float, *, num_gpus: int, per_machine: int) -> Links:
    """share: of the nominal figures that is reached."""
    one_machine = num_gpus <= per_machine
    return Links(gpu.link * share, (gpu.link if one_machine else gpu.network) * share)


def zero_bytes(
    per_gpu: PerGpu, trained: float, precision: Precision, sharding: Sharding, num_micro_batches: float
) -> float:
    """Of an optimizer step. per_gpu: parameters before ZeRO divides them, `trained` of them with gradients.

    ZeRO 3 gathers the weights for the forward and again for the backward pass of every micro-batch, and reduces its
    gradients; below, gradients are reduced once a step and new weights gathered once.
    """
    weights, gradients = precision.weights * per_gpu.all, precision.gradients * trained
    share = 1 - 1 / sharding.data
    if sharding.zero == 3:
        return share * num_micro_batches * (2 * weights + gradients)
    return share * (gradients + precision.weights * trained)


def tensor_bytes(shape: ModelShape, num_tokens: float, sharding: Sharding, *, checkpointing: bool) -> float:
    """Of so many tokens of a data rank, in bf16: each layer's two products are added up over the GPUs that share it,
    forward, backward, and forward once more where activations are computed again. Adding up is reducing and gathering.
    """
    ways = sharding.tensor
    per_pass = 2 * shape.num_layers / sharding.pipeline * 2 * (1 - 1 / ways) * 2 * shape.hidden * num_tokens
    return (3 if checkpointing else 2) * per_pass


@dataclass(frozen=True)
class Route:
    """A way for new weights from the trainer to an engine, in seconds."""

    name: str
    seconds: float
    why: str


def routes(num_bytes: float, gpu: Gpu, share: float, *, num_links: int, one_machine: bool) -> list[Route]:
    """The fastest that is there comes first: links within a machine, the network, the host's memory, a disk."""
    found = []
    if one_machine:
        found.append(_route("links", num_bytes, num_links * gpu.link * share, f"{gpu.link_name} of {num_links} GPUs"))
    found.append(_route("network", num_bytes, num_links * gpu.network * share, f"of {num_links} GPUs"))
    if one_machine:
        found.append(_route("shared memory", num_bytes, HOST_LINK / 2, "down to the host and up again, 25 GB/s each"))
    found.append(_route("disk", num_bytes, DISK / 2, "written and read, 2 GB/s each"))
    return found


def _route(name: str, num_bytes: float, bandwidth: float, why: str) -> Route:
    return Route(name, LAUNCH_S + num_bytes / bandwidth, why)
