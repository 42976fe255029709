"""Bytes of what is kept for every parameter, and how they are divided among GPUs.

A trained parameter has weights, gradient, a float32 master copy and Adam's two moments: 16 bytes in mixed precision
(ZeRO, arXiv 1910.02054). A frozen one has its weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from headway.plan.shapes import ModelShape

Algorithm = Literal["grpo", "ppo"]


@dataclass(frozen=True)
class Precision:
    """Bytes of each thing that is kept of a trained parameter; master 0: the weights themselves are float32."""

    weights: float
    gradients: float
    master: float
    adam: float

    @property
    def trained(self) -> float:
        """Bytes of a trained parameter.

        >>> PRECISIONS["mixed"].trained
        16
        """
        return self.weights + self.gradients + self.master + self.adam


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "mixed": Precision(weights=2, gradients=2, master=4, adam=8),
        "mixed-fp32-gradients": Precision(weights=2, gradients=4, master=4, adam=8),
        "mixed-adam8bit": Precision(weights=2, gradients=2, master=4, adam=2),
        "float32": Precision(weights=4, gradients=4, master=0, adam=8),
    }
)
"""By name: bf16 with a float32 master copy; that with gradients added up in float32; that with Adam's moments in 8 bits
each; and float32 alone, as Headway trains in one process."""


@dataclass(frozen=True)
class Sharding:
    """How the trainer's states lie on its GPUs.

    gpus: of the trainer; tensor, pipeline: how many share a layer, and a stack of layers; expert: among how many data
    ranks the experts of a mixture are divided; zero: 0 none, 1 optimizer states, 2 gradients too, 3 weights too (as
    FSDP does). The rest of the GPUs is data-parallel.
    """

    gpus: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    zero: int = 3

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.pipeline)


@dataclass(frozen=True)
class PerGpu:
    """Parameters on one GPU: those that all tokens use, and of routed experts."""

    fixed: float
    routed: float

    @property
    def all(self) -> float:
        return self.fixed + self.routed


def held(shape: ModelShape, sharding: Sharding) -> PerGpu:
    """Parameters of the fullest GPU before ZeRO divides them: of its share of layers, and of the embeddings if it has
    the first or the last of them. What is no matrix is on every one of the GPUs that share a layer.
    """
    stages = sharding.pipeline
    per_stage = -(-shape.num_layers // stages)
    groups = [shape.layers[first : first + per_stage] for first in range(0, shape.num_layers, per_stage)]
    embeddings = [0] * len(groups)
    embeddings[0] += shape.embedding_params
    if not shape.tied or len(groups) > 1:  # a tied head at the other end of a pipeline is a second copy
        embeddings[-1] += shape.embedding_params
    found = []
    for layers, outside in zip(groups, embeddings, strict=True):
        small = sum(layer.num_small_params(shape.hidden) for layer in layers) + shape.hidden
        large = sum(layer.num_fixed_params(shape.hidden) for layer in layers) + shape.hidden - small + outside
        routed = sum(layer.num_routed_params(shape.hidden) for layer in layers)
        found.append(PerGpu(large / sharding.tensor + small, routed / (sharding.tensor * sharding.expert)))
    return max(found, key=lambda per_gpu: per_gpu.all)


def divided(per_gpu: PerGpu, sharding: Sharding, level: int) -> float:
    """Parameters on a GPU of what ZeRO divides from this level on. Experts are divided among the data ranks that hold
    the same ones.
    """
    if sharding.zero < level:
        return per_gpu.all
    return per_gpu.fixed / sharding.data + per_gpu.routed / max(1, sharding.data // sharding.expert)


@dataclass(frozen=True)
class StateBytes:
    """On one GPU, of one model; nought where it has none."""

    weights: float
    gradients: float = 0.0
    master: float = 0.0
    adam: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.adam

    @property
    def optimizer(self) -> float:
        """What can wait elsewhere while nothing is trained: master copy and moments."""
        return self.master + self.adam


def trained_states(per_gpu: PerGpu, precision: Precision, sharding: Sharding) -> StateBytes:
    """Of a model all of whose parameters are trained."""
    return StateBytes(
        weights=precision.weights * divided(per_gpu, sharding, 3),
        gradients=precision.gradients * divided(per_gpu, sharding, 2),
        master=precision.master * divided(per_gpu, sharding, 1),
        adam=precision.adam * divided(per_gpu, sharding, 1),
    )


def frozen_states(per_gpu: PerGpu, bytes_per_weight: float, sharding: Sharding) -> StateBytes:
    return StateBytes(weights=bytes_per_weight * divided(per_gpu, sharding, 3))


def adapter_states(num_params: float, precision: Precision, sharding: Sharding) -> StateBytes:
    """Of a trained adapter; its matrices lie beside those that they add to, so they are divided alike."""
    on_gpu = PerGpu(num_params / (sharding.tensor * sharding.pipeline), 0.0)
    return trained_states(on_gpu, precision, sharding)


# ---- the textbook's totals: states alone, undivided


@dataclass(frozen=True)
class Models:
    """Which models a job holds beside the policy, and what of the policy is trained.

    critic and reward_model: of the policy's size; adapter_params: trained beside a frozen base, None: all is trained.
    A frozen reference costs nothing beside an adapter: it is the base with the adapter off.
    """

    critic: bool = False
    reference: bool = False
    reward_model: bool = False
    adapter_params: int | None = None

    @property
    def holds_reference(self) -> bool:
        return self.reference and self.adapter_params is None


def models_of(algorithm: Algorithm, *, kl: bool = False, adapter_params: int | None = None) -> Models:
    """PPO as in RLHF has critic, reference and reward model; GRPO with a verifier has none of them, and a reference
    with a KL term.
    """
    if algorithm == "ppo":
        return Models(critic=True, reference=True, reward_model=True, adapter_params=adapter_params)
    return Models(reference=kl, adapter_params=adapter_params)


def state_bytes(num_params: float, models: Models, precision: Precision) -> dict[str, float]:
    """Of a job on one GPU: model -> bytes, for every model of `num_params`.

    >>> sum(state_bytes(7.0e9, models_of("ppo"), PRECISIONS["mixed"]).values()) / 1e9
    252.0
    """
    trained, frozen = precision.trained * num_params, precision.weights * num_params
    if models.adapter_params is None:
        found = {"policy": trained}
    else:
        found = {"policy": frozen + precision.trained * models.adapter_params}
    if models.critic:
        found["critic"] = trained
    if models.holds_reference:
        found["reference"] = frozen
    if models.reward_model:
        found["reward model"] = frozen
    return found
