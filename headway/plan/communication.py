"""What a train step sends between GPUs, and how long new weights take by each way that they can go.

Bytes are those that each GPU sends: a ring over n of them gathers or reduces x bytes in x (n - 1) / n.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.plan.gpus import Gpu
from headway.plan.shapes import ModelShape
from headway.plan.states import Precision, Sharding

HOST_LINK = 25e9
"""Bytes a second between a GPU and its host, one way: PCIe 4 x16 in use."""

DISK = 2e9
"""Bytes a second of a solid-state disk, each for writing and for reading."""

LAUNCH_S = 1e-3
"""Of a transfer of weights, beside its bytes."""


@dataclass(frozen=True)
class Links:
    """Bytes a second that a GPU sends: to those that share a layer with it, and to its other ranks.

    within: a machine's own links; between: those among data ranks, the network where they are on several machines.
    """

    within: float
    between: float


def links(gpu: Gpu, share: float, *, num_gpus: int, tensor: int, per_machine: int) -> Links:
    """share: of the nominal figures that is reached; tensor: GPUs that share a layer."""
    within = gpu.link if tensor <= per_machine else gpu.network
    between = gpu.link if num_gpus <= per_machine else gpu.network
    return Links(within * share, between * share)


def zero_bytes(
    num_params: float, trained: float, precision: Precision, sharding: Sharding, num_micro_batches: float
) -> float:
    """Of an optimizer step of one model. num_params: on a GPU before ZeRO divides them, `trained` of them with
    gradients; 0 for a model that only scores.

    ZeRO 3 gathers the weights for the forward and again for the backward pass of every micro-batch, and reduces its
    gradients; ZeRO 2, which keeps no others' gradients, reduces them as often; below, once a step. New weights are
    gathered once where they are not divided.
    """
    weights, gradients = precision.weights * num_params, precision.gradients * trained
    share = 1 - 1 / sharding.data
    if sharding.zero == 3:
        return share * num_micro_batches * ((2 if trained else 1) * weights + gradients)
    reductions = num_micro_batches if sharding.zero == 2 else 1
    return share * (reductions * gradients + precision.weights * trained)


def tensor_bytes(
    shape: ModelShape, num_tokens: float, sharding: Sharding, *, num_passes: float, bytes_per_number: float
) -> float:
    """Of so many tokens of a data rank: in each pass, forward or backward, two products of each layer are added up over
    the GPUs that share it. Adding up is reducing and gathering.
    """
    each = 2 * (1 - 1 / sharding.tensor) * bytes_per_number * shape.hidden * num_tokens
    return num_passes * 2 * shape.num_layers / sharding.pipeline * each


@dataclass(frozen=True)
class Route:
    """A way for new weights from the trainer to an engine, in seconds."""

    name: str
    seconds: float
    why: str


def routes(num_bytes: float, gpu: Gpu, share: float, *, num_links: int, one_machine: bool, alone: bool) -> list[Route]:
    """The fastest comes first. alone: one GPU, on which they are copied."""
    if alone:
        return [_route("copy", num_bytes, gpu.bandwidth / 2, "read and written on the GPU itself")]
    found = [
        _route("network", num_bytes, num_links * gpu.network * share, f"of {num_links} GPU{'s' * (num_links > 1)}")
    ]
    if one_machine:
        words = f"{gpu.link_name} of {num_links} GPU{'s' * (num_links > 1)}"
        found.append(_route("links", num_bytes, num_links * gpu.link * share, words))
        found.append(_route("shared memory", num_bytes, HOST_LINK / 2, "down to the host and up again, 25 GB/s each"))
    found.append(_route("disk", num_bytes, DISK / 2, "that both reach: written and read, 2 GB/s each"))
    return sorted(found, key=lambda way: way.seconds)


def _route(name: str, num_bytes: float, bandwidth: float, why: str) -> Route:
    return Route(name, LAUNCH_S + num_bytes / bandwidth, why)
