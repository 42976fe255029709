"""Ways to run a job on its GPUs: how they are shared, what that takes of memory, and how long each part takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from headway.plan.communication import HOST_LINK, Route, links, routes, tensor_bytes, zero_bytes
from headway.plan.memory import (
    ENGINE_LINES,
    OPTIMIZER_LINES,
    Job,
    Pool,
    Sleep,
    colocated,
    disaggregated,
    held_on_gpu,
    lanes_that_fit,
)
from headway.plan.placement import Hardware, Placed, place
from headway.plan.proposal import NEAR, Curves, Layout, Request, Times
from headway.plan.roofline import (
    NOMINAL,
    Decode,
    Efficiency,
    cache_tokens,
    decode,
    prefill_s,
    train_flops,
    train_s,
)

MOST_SPLITS = 63
"""That are looked at: every one of up to 64 GPUs."""

CURVE_POINTS = 60


def layouts(request: Request) -> list[Layout]:
    """Colocated, and every split of the GPUs into whole engines and whole trainers; of each every size of engine, with
    the micro-batch that suits it.

    A colocated engine that sleeps loses the cache of what is in flight, so it is for schedules that have nothing in
    flight while they train.
    """
    found = []
    for sleep in dict.fromkeys((request.sleep, "none")):
        found += colocated_layouts(request, sleep)
    for training in _splits(request):
        found += split_layouts(request, training)
    return found


def colocated_layouts(request: Request, sleep: Sleep) -> list[Layout]:
    num, hardware = request.hardware.num, request.hardware
    return [
        Layout("colocated", num, num, _placed(request, job, lambda each: colocated(each, sleep), hardware), sleep)
        for job in request.jobs(num, num)
    ]


def split_layouts(request: Request, training: int) -> list[Layout]:
    """None of engines that would leave GPUs idle that could train."""
    generating = request.hardware.num - training
    return [
        Layout("disaggregated", generating, training, _placed(request, job, disaggregated, request.hardware))
        for job in request.jobs(generating, training)
        if generating % job.generation.tensor == 0
    ]


def _placed(request: Request, job: Job, pools_of: Callable[[Job], Sequence[Pool]], hardware: Hardware) -> Placed:
    return place(_micro_batched(request, job), pools_of, hardware)


MICRO_BATCHES = (2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
"""Tokens of a micro-batch that are tried where nobody says how many."""


def _micro_batched(request: Request, job: Job) -> list[Job]:
    """The job with each micro-batch that may be chosen, the best first: the smallest with which a train step is as fast
    as with any, for ZeRO 3 sends all weights for each of them.
    """
    if request.micro_batch_tokens is not None:
        return [job]
    jobs = [replace(job, training=replace(job.training, micro_batch_tokens=float(num))) for num in MICRO_BATCHES]
    arithmetic_s = _arithmetic_s(request, job)
    took = [TrainTimes(arithmetic_s, *_sent_s(request, one)).seconds for one in jobs]
    as_fast = [one for one, seconds in zip(jobs, took, strict=True) if seconds <= (1 + NEAR) * min(took)]
    slower = [one for one, _ in sorted(zip(jobs, took, strict=True), key=lambda pair: pair[1]) if one not in as_fast]
    return as_fast + slower


def _splits(request: Request) -> list[int]:
    """Numbers of training GPUs; of very many GPUs some, evenly."""
    num = request.hardware.num
    unit, trainer = request.engine_tensor or 1, request.tensor * request.pipeline * request.expert
    possible = [training for training in range(trainer, num, trainer) if (num - training) % unit == 0]
    stride = -(-len(possible) // MOST_SPLITS) or 1
    return possible[stride - 1 :: stride]


def times(request: Request, layout: Layout) -> Times:
    generation, answers = layout.placed.job.generation, request.answers
    lanes, replicas = generation.lanes_each, generation.replicas
    context = answers.prompt + answers.steady[0]
    step = _decode(request, layout, request.efficiency, lanes)
    read = cache_tokens(request.shape, context)
    step_s = step.step_s(lanes, read)
    beyond_memory_s = max(0.0, step.arithmetic_s(lanes, read) - step.memory_s(lanes, read))
    one_prefill_s = layout.placed.job.scale * prefill_s(
        request.shape, answers.prompt, request.hardware.gpu, request.efficiency, tensor=generation.tensor
    )
    training, ways = train_times(request, layout.placed.job), _ways(request, layout)
    return Times(
        decode_step_s=step_s,
        context=context,
        arithmetic_bound=beyond_memory_s > 0,
        crossover=step.crossover(read),
        answer_s=answers.mean * step_s + lanes * one_prefill_s,
        decode_tokens_per_s=generation.lanes / step_s,
        prefill_tokens_per_s=replicas * answers.prompt / one_prefill_s,
        train_s=training.seconds + _offload_s(layout),
        train_arithmetic_s=training.arithmetic_s,
        train_hidden_s=training.hidden_s,
        train_shown_s=training.shown_s,
        sync_s=ways[0].seconds,
        sync_ways=tuple(ways),
        room=_room(request, layout),
        weight_bytes=replicas * step.weight_bytes,
        kv_bytes=step.kv_bytes * read / context,
        bandwidth=replicas * step.bandwidth,
        overhead_s=step.overhead_s + beyond_memory_s,
    )


def _decode(request: Request, layout: Layout, efficiency: Efficiency, batch: float) -> Decode:
    generation, scale = layout.placed.job.generation, layout.placed.job.scale
    step = decode(
        request.shape,
        request.hardware.gpu,
        efficiency,
        batch=batch,
        tensor=generation.tensor,
        weight_bytes=generation.weight_bytes,
        kv_bytes=generation.weight_bytes,
    )
    return replace(step, weight_bytes=step.weight_bytes * scale, flops=step.flops * scale)


def batch_tokens(request: Request) -> float:
    """The prompt of a group is computed once."""
    return request.batch * request.answers.mean + request.answers.prompt * request.batch / request.group


@dataclass(frozen=True)
class TrainTimes:
    """Of training a batch: arithmetic; what ZeRO sends, which hides behind it; what tensor parallelism sends, which
    doesn't.
    """

    arithmetic_s: float
    hidden_s: float
    shown_s: float

    @property
    def seconds(self) -> float:
        return max(self.arithmetic_s, self.hidden_s) + self.shown_s


def train_times(request: Request, job: Job) -> TrainTimes:
    return TrainTimes(_arithmetic_s(request, job), *_sent_s(request, job))


def _arithmetic_s(request: Request, job: Job) -> float:
    """A data rank has whole sequences."""
    answers, sharding = request.answers, job.training.sharding
    some = answers.lengths[:: max(1, len(answers.lengths) // 200)]
    attention = fmean(request.shape.causal_attention_flops(answers.prompt + length) for length in some)
    flops = train_flops(request.shape, batch_tokens(request), request.batch * attention, request.passes)
    busy = min(sharding.data, request.batch) * sharding.tensor * sharding.pipeline
    return train_s(job.scale * flops, request.hardware.gpu, busy, request.efficiency)


def _sent_s(request: Request, job: Job) -> tuple[float, float]:
    """-> of ZeRO, of tensor parallelism; of all models that are trained or score."""
    hardware, training, models = request.hardware, job.training, request.models
    sharding, precision = training.sharding, training.precision
    speed = links(
        hardware.gpu,
        request.efficiency.link,
        num_gpus=sharding.gpus,
        tensor=sharding.tensor,
        per_machine=hardware.per_machine,
    )
    each = batch_tokens(request) / sharding.data
    num_micro_batches = math.ceil(each / job.micro_batch_tokens)
    policy = held_on_gpu(job, request.shape).all
    adapter = models.adapter_params
    trained = policy if adapter is None else adapter / (sharding.tensor * sharding.pipeline)
    learners = [(policy, trained)]
    if models.critic:
        critic = held_on_gpu(job, request.shape.as_critic()).all
        learners.append((critic, critic))
    scorers = [(policy, 0.0)] * (models.holds_reference + models.reward_model)
    zero = sum(
        zero_bytes(params, with_gradients, precision, sharding, num_micro_batches)
        for params, with_gradients in (*learners, *scorers)
    )
    passes = len(learners) * (2 + training.checkpointing) + models.reference + models.reward_model
    tensor = tensor_bytes(request.shape, each, sharding, num_passes=passes, bytes_per_number=precision.weights)
    return zero / speed.between, tensor / speed.within


def _offload_s(layout: Layout) -> float:
    """Optimizer states from the host and back, once a step."""
    job = layout.placed.job
    if not job.training.offload:
        return 0.0
    (train,) = [phase for pool in layout.placed.pools for phase in pool.phases if phase.name == "train"]
    moved = sum(line.expected for line in train.lines if line.name in OPTIMIZER_LINES)
    return 2 * moved / HOST_LINK


def _room(request: Request, layout: Layout) -> int:
    """Beside whatever else lies on a generating GPU."""
    job = layout.placed.job
    (generate,) = [phase for phase in layout.placed.pools[0].phases if phase.name == "generate"]
    others = sum(line.expected for line in generate.lines if line.name not in ENGINE_LINES)
    return job.generation.replicas * lanes_that_fit(job, request.hardware.budget, others=others)


def curves(request: Request, layout: Layout) -> Curves:
    """Of one engine, from one rollout to ten times as many as the workload has."""
    context = request.answers.prompt + request.answers.steady[0]
    read = cache_tokens(request.shape, context)

    def at(efficiency: Efficiency, batch: float) -> Decode:
        return _decode(request, layout, efficiency, batch)

    batch = layout.placed.job.generation.lanes_each
    batches = tuple((10 * max(batch, 10)) ** (point / (CURVE_POINTS - 1)) for point in range(CURVE_POINTS))
    limits = [at(NOMINAL, each) for each in batches]
    return Curves(
        batches=batches,
        memory=tuple(each / limit.memory_s(each, read) for each, limit in zip(batches, limits, strict=True)),
        arithmetic=tuple(each / limit.arithmetic_s(each, read) for each, limit in zip(batches, limits, strict=True)),
        expected=tuple(at(request.efficiency, each).tokens_per_s(each, read) for each in batches),
        batch=batch,
        tokens_per_s=at(request.efficiency, batch).tokens_per_s(batch, read),
    )


def sync_bytes(request: Request) -> float:
    adapter = request.models.adapter_params
    weights = request.nominal or request.shape.num_params
    return request.engine_bytes * (weights if adapter is None else adapter)


def _ways(request: Request, layout: Layout) -> list[Route]:
    """Every engine gets all weights, over the links of its own GPUs; the fastest way is taken."""
    hardware = request.hardware
    return routes(
        sync_bytes(request),
        hardware.gpu,
        request.efficiency.link,
        num_links=min(layout.training, layout.placed.job.generation.tensor),
        one_machine=hardware.num <= hardware.per_machine,
        alone=hardware.num == 1,
    )
