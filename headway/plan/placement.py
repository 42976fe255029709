"""Which GPUs do what: engines of a size that fits, and the two ways of sharing GPUs between generation and training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headway.plan.gpus import Gpu
from headway.plan.memory import Generation, Job, Pool
from headway.plan.shapes import ModelShape
from headway.plan.states import Sharding
from headway.types import UserError


@dataclass(frozen=True)
class Hardware:
    """GPUs of one kind. per_machine: that have the fast links; usable: share of the nominal memory."""

    gpu: Gpu
    num: int
    per_machine: int = 8
    usable: float = 0.9

    @property
    def budget(self) -> float:
        """Bytes of each GPU that may be planned with."""
        return self.usable * self.gpu.memory_bytes


MOST_TENSOR = 8
"""GPUs of an engine that the planner tries by itself: those of one machine, with its fast links."""


def fits(pools: Sequence[Pool], hardware: Hardware) -> bool:
    return all(pool.peak.expected <= hardware.budget for pool in pools)


@dataclass(frozen=True)
class Placed:
    """A job on its GPUs: what each of them holds, and whether that is within the budget."""

    job: Job
    pools: tuple[Pool, ...]
    fits: bool

    @property
    def fullest(self) -> float:
        """Bytes expected on the fullest GPU of all."""
        return max(pool.peak.expected for pool in self.pools)


def generations(
    shape: ModelShape, num_gpus: int, lanes: int, *, weight_bytes: float = 2.0, tensor: int | None = None
) -> list[Generation]:
    """Ways to make engines of so many GPUs, the smallest engines first. GPUs that make no whole engine, and those of
    engines that would have no rollout, stay idle.

    tensor: GPUs of an engine, if they are given. Raises UserError where they can't divide the model or the GPUs.
    """
    if tensor is not None:
        check_division(shape, num_gpus, tensor=tensor, what="generate")
        sizes = [tensor]
    else:
        most = min(num_gpus, MOST_TENSOR)
        sizes = [2**power for power in range(4) if 2**power <= most and _divides(shape, 2**power)]
    return [Generation(min(lanes, num_gpus // size), size, lanes, weight_bytes) for size in sizes]


def place(jobs: Iterable[Job], pools_of: Callable[[Job], Sequence[Pool]], hardware: Hardware) -> Placed:
    """The first job that fits, in the order given; of none, the one that comes nearest.

    So whatever fits still does on more GPUs.
    """
    placed = []
    for job in jobs:
        pools = tuple(pools_of(job))
        placed.append(Placed(job, pools, fits(pools, hardware)))
        if placed[-1].fits:
            return placed[-1]
    return min(placed, key=lambda one: one.fullest)


def _divides(shape: ModelShape, tensor: int) -> bool:
    return all(layer.attention.heads % tensor == 0 for layer, _ in shape.kinds)


def check_division(
    shape: ModelShape, num_gpus: int, *, tensor: int = 1, pipeline: int = 1, expert: int = 1, what: str
) -> None:
    """Raises UserError where a number of GPUs or a model can't be divided so."""
    for name, ways in (("tensor", tensor), ("pipeline", pipeline), ("expert", expert)):
        if ways < 1:
            raise UserError(f"{name} parallelism of {ways}: give at least 1")
    if expert > 1 and not shape.is_mixture:
        raise UserError(f"expert parallelism of {expert}: {shape.name} has no experts; leave it out")
    if num_gpus % (tensor * pipeline):
        near = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
        raise UserError(
            f"{num_gpus} GPUs that {what} are not divided by tensor {tensor} x pipeline {pipeline}; "
            f"{num_gpus} is divided by {', '.join(map(str, near))}"
        )
    heads = shape.layers[0].attention.heads
    if not _divides(shape, tensor):
        raise UserError(f"{shape.name} has {heads} heads, which tensor parallelism of {tensor} does not divide")
    if pipeline > shape.num_layers:
        raise UserError(f"{shape.name} has {shape.num_layers} layers, too few for a pipeline of {pipeline}")
    if (num_gpus // (tensor * pipeline)) % expert:
        raise UserError(
            f"{num_gpus // (tensor * pipeline)} data ranks are not divided by expert parallelism of {expert}"
        )


def sharding(
    shape: ModelShape, num_gpus: int, *, tensor: int = 1, pipeline: int = 1, expert: int = 1, zero: int = 3
) -> Sharding:
    """Of a trainer on so many GPUs. Raises UserError where they can't be divided so."""
    check_division(shape, num_gpus, tensor=tensor, pipeline=pipeline, expert=expert, what="train")
    if zero not in range(4):
        raise UserError(f"ZeRO level {zero} does not exist; give 0, 1, 2 or 3")
    return Sharding(num_gpus, tensor, pipeline, expert, zero)
