"""Ways to run a job on its GPUs: how they are shared, what that takes of memory, and how long each part takes."""

from __future__ import annotations

from headway.plan.memory import colocated, disaggregated
from headway.plan.placement import place
from headway.plan.proposal import Curves, Layout, Request, Times
from headway.plan.roofline import (
    NOMINAL,
    Decode,
    Efficiency,
    cache_tokens,
    decode,
    prefill_flops,
    train_flops,
    train_s,
    transfer_s,
)

MOST_SPLITS = 63
"""That are looked at: every one of up to 64 GPUs."""

CURVE_POINTS = 60

LAUNCH_S = 1e-3
"""Of a transfer of weights, beside its bytes."""


def layouts(request: Request) -> list[Layout]:
    """Colocated, and every split of the GPUs into whole engines and whole trainers."""
    num = request.hardware.num
    both = place(request.jobs(num, num), lambda job: colocated(job, request.sleep), request.hardware)
    found = [Layout("colocated", num, num, both)]
    for training in _splits(request):
        generating = num - training
        placed = place(request.jobs(generating, training), disaggregated, request.hardware)
        found.append(Layout("disaggregated", generating, training, placed))
    return found


def _splits(request: Request) -> list[int]:
    """Numbers of training GPUs; of very many GPUs some, evenly."""
    num = request.hardware.num
    unit, trainer = request.engine_tensor or 1, request.tensor * request.pipeline * request.expert
    possible = [training for training in range(trainer, num, trainer) if (num - training) % unit == 0]
    stride = -(-len(possible) // MOST_SPLITS) or 1
    return possible[stride - 1 :: stride]


def times(request: Request, layout: Layout) -> Times:
    shape, gpu, efficiency = request.shape, request.hardware.gpu, request.efficiency
    generation = layout.placed.job.generation
    answers = request.answers
    lanes, replicas = generation.lanes / generation.replicas, generation.replicas
    context = answers.prompt + answers.steady[0]
    step = decode(shape, gpu, efficiency, batch=lanes, tensor=generation.tensor, weight_bytes=generation.weight_bytes)
    read = cache_tokens(shape, context)
    step_s = step.step_s(lanes, read)
    beyond_memory_s = max(0.0, step.arithmetic_s(lanes, read) - step.memory_s(lanes, read))
    prefill_rate = generation.tensor * gpu.bf16_flops * efficiency.prefill
    prefill_s = prefill_flops(shape, answers.prompt) / prefill_rate
    return Times(
        decode_step_s=step_s,
        context=context,
        arithmetic_bound=beyond_memory_s > 0,
        crossover=step.crossover(read),
        rollout_s=answers.mean * step_s + prefill_s,
        decode_tokens_per_s=generation.lanes / step_s,
        prefill_tokens_per_s=replicas * answers.prompt / prefill_s if prefill_s else 0.0,
        train_s=_train_s(request, layout),
        sync_s=_sync_s(request, layout),
        weight_bytes=replicas * step.weight_bytes,
        kv_bytes=step.kv_bytes * read / context,
        bandwidth=replicas * step.bandwidth,
        overhead_s=step.overhead_s + beyond_memory_s,
    )


def _train_s(request: Request, layout: Layout) -> float:
    """Of a batch; the prompt of a group is computed once."""
    answers = request.answers
    prompts = answers.prompt * request.batch / request.group
    num_tokens = request.batch * answers.mean + prompts
    flops = train_flops(request.shape, num_tokens, answers.prompt + answers.mean, request.passes)
    return train_s(flops, request.hardware.gpu, layout.training, request.efficiency)


def curves(request: Request, layout: Layout) -> Curves:
    """Of one engine, from one rollout to ten times as many as the workload has."""
    generation = layout.placed.job.generation
    context = request.answers.prompt + request.answers.steady[0]
    read = cache_tokens(request.shape, context)

    def at(efficiency: Efficiency, batch: float) -> Decode:
        return decode(
            request.shape,
            request.hardware.gpu,
            efficiency,
            batch=batch,
            tensor=generation.tensor,
            weight_bytes=generation.weight_bytes,
        )

    batch = generation.lanes / generation.replicas
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
    return 2.0 * (weights if adapter is None else adapter)


def _sync_s(request: Request, layout: Layout) -> float:
    """Every engine gets all weights: within a machine over the GPUs' links, else over the network, from as many links
    as there are GPUs that send.
    """
    hardware = request.hardware
    within = hardware.num <= hardware.per_machine
    bandwidth = (hardware.gpu.link if within else hardware.gpu.network) * request.efficiency.link
    links = min(layout.training, layout.placed.job.generation.tensor) if within else layout.training
    return LAUNCH_S + transfer_s(sync_bytes(request), bandwidth, links=max(1, links))
