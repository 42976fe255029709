"""Ways to run a job on its GPUs: how they are shared, what that takes of memory, and how long each part takes."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from headway.plan.memory import ENGINE_LINES, OPTIMIZER_LINES, colocated, disaggregated, lanes_that_fit
from headway.plan.placement import place
from headway.plan.proposal import Curves, Layout, Request, Times
from headway.plan.roofline import (
    NOMINAL,
    Decode,
    Efficiency,
    cache_tokens,
    decode,
    prefill_s,
    train_flops,
    train_s,
    transfer_s,
)

MOST_SPLITS = 63
"""That are looked at: every one of up to 64 GPUs."""

CURVE_POINTS = 60

HOST_LINK = 25e9
"""Bytes a second between a GPU and its host, one way: PCIe 4 x16 in use."""

LAUNCH_S = 1e-3
"""Of a transfer of weights, beside its bytes."""


def layouts(request: Request) -> list[Layout]:
    """Colocated, and every split of the GPUs into whole engines and whole trainers; of each every size of engine.

    A colocated engine that sleeps loses the cache of what is in flight, so it is for schedules that have nothing in
    flight while they train.
    """
    num, hardware = request.hardware.num, request.hardware
    found = []
    for sleep in dict.fromkeys((request.sleep, "none")):
        for job in request.jobs(num, num):
            placed = place([job], lambda each, sleep=sleep: colocated(each, sleep), hardware)
            found.append(Layout("colocated", num, num, placed, sleep))
    for training in _splits(request):
        generating = num - training
        for job in request.jobs(generating, training):
            if generating % job.generation.tensor:
                continue  # GPUs would stay idle that could train
            found.append(Layout("disaggregated", generating, training, place([job], disaggregated, hardware)))
    return found


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
    return Times(
        decode_step_s=step_s,
        context=context,
        arithmetic_bound=beyond_memory_s > 0,
        crossover=step.crossover(read),
        rollout_s=answers.mean * step_s + lanes * one_prefill_s,
        decode_tokens_per_s=generation.lanes / step_s,
        prefill_tokens_per_s=replicas * answers.prompt / one_prefill_s,
        train_s=_train_s(request, layout),
        sync_s=_sync_s(request, layout),
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


def _train_s(request: Request, layout: Layout) -> float:
    """Of a batch; the prompt of a group is computed once, and a data rank has whole sequences."""
    answers, job = request.answers, layout.placed.job
    num_tokens = request.batch * answers.mean + answers.prompt * request.batch / request.group
    some = answers.lengths[:: max(1, len(answers.lengths) // 200)]
    attention = fmean(request.shape.causal_attention_flops(answers.prompt + length) for length in some)
    flops = job.scale * train_flops(request.shape, num_tokens, request.batch * attention, request.passes)
    sharding = job.training.sharding
    busy = min(sharding.data, request.batch) * sharding.tensor * sharding.pipeline
    return train_s(flops, request.hardware.gpu, busy, request.efficiency) + _offload_s(layout)


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


def _sync_s(request: Request, layout: Layout) -> float:
    """Every engine gets all weights, over the links of its own GPUs: those within a machine, else the network's."""
    hardware = request.hardware
    within = hardware.num <= hardware.per_machine
    bandwidth = (hardware.gpu.link if within else hardware.gpu.network) * request.efficiency.link
    links = min(layout.training, layout.placed.job.generation.tensor)
    return LAUNCH_S + transfer_s(sync_bytes(request), bandwidth, links=links)
