"""Programs of several ranks, each a process of its own on gloo: what each of them does beside a local trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.config import Train
from headway.models.distribution import Shape
from headway.objectives.named import objective
from headway.train.fsdp import FsdpTrainer, MeshRanks
from headway.train.local import LocalTrainer
from headway.train.ranks import share
from headway.train.step import train_step
from tests.batches import many_groups, prepared
from tests.tiny import make_policy

GRPO = objective("grpo", kl_coefficient=0, corrections=["tis"], reduction="token_mean")
WITH_KL = objective("grpo", kl_coefficient=0.1, reduction="token_mean")

Program = Callable[[DeviceMesh, Path, dict[str, Any]], dict[str, Any]]


def on_ranks(program: Program, num: int, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """What the program gives on each of `num` ranks."""
    mp.spawn(_rank, (num, program, folder, options), nprocs=num)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(num)]


def _rank(rank: int, num: int, program: Program, folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    meeting = folder / f"meeting-of-{num}-{program.__name__}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num)
    try:
        found = program(init_device_mesh("cpu", (num,)), folder, options)
        torch.save(found, folder / f"rank-{rank}.pt")
    finally:
        dist.destroy_process_group()


def both(mesh: DeviceMesh, options: dict[str, Any]) -> tuple[LocalTrainer, FsdpTrainer]:
    """A local trainer and a divided one, of the same policy with the same settings."""
    torch.manual_seed(0)
    policy = make_policy(options.get("architecture", "llama"))
    settings = Train(learning_rate=1e-3, compute_dtype=options.get("compute_dtype", "float32"))
    reference = copy.deepcopy(policy) if options.get("reference") else None
    shape = Shape(0.7)
    divided = FsdpTrainer(
        copy.deepcopy(policy),
        settings,
        shape=shape,
        num_steps=12,
        mesh=mesh,
        checkpointing=options.get("checkpointing", False),
        offload=options.get("offload", False),
        reference=copy.deepcopy(reference),
    )
    return LocalTrainer(policy, settings, shape=shape, num_steps=12, reference=reference), divided


def ten_steps(mesh: DeviceMesh, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Ten train steps of both -> metrics of each step, and how far apart gradients' norms and weights are."""
    local, divided = both(mesh, options)
    ranks, by = MeshRanks(mesh), WITH_KL if options.get("reference") else GRPO
    metrics = []
    for step in range(10):
        batch = prepared(by, many_groups(seed=step), budget=options.get("micro_batch_tokens", 20), trainer=local)
        alone = train_step(local, None, by, batch)
        together = train_step(divided, None, by, share(batch, ranks.rank, ranks.num), ranks=ranks)
        metrics.append((alone.metrics, together.metrics))
        assert [len(each) for each in together.log_ratios] == [len(each) for each in alone.log_ratios]
    whole = divided.weights()
    # A key's bias changes no attention: its gradient is rounding alone, of which Adam makes steps of full size.
    counted = {name: tensor for name, tensor in local.weights().items() if not name.endswith("c_attn.bias")}
    apart = max((whole[name] - tensor).abs().max().item() for name, tensor in counted.items())
    return {"metrics": metrics, "apart": apart, "names": list(whole) == list(local.weights())}


def saved(mesh: DeviceMesh, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Three steps, saved; two more, and the weights that come of them."""
    _, divided = both(mesh, options)
    ranks = MeshRanks(mesh)
    for step in range(3):
        _step(divided, ranks, step)
    divided.save(folder / "checkpoint")
    return {"after": _after(divided, ranks)}


def resumed(mesh: DeviceMesh, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """From what `saved` left, the same two steps."""
    _, divided = both(mesh, options)
    divided.load(folder / "checkpoint")
    return {"after": _after(divided, MeshRanks(mesh))}


def _after(trainer: FsdpTrainer, ranks: MeshRanks) -> dict[str, Any]:
    rates = [_step(trainer, ranks, step)["learning_rate"] for step in (3, 4)]
    return {"weights": trainer.weights(), "rates": rates}


def _step(trainer: FsdpTrainer, ranks: MeshRanks, seed: int) -> dict[str, Any]:
    batch = prepared(GRPO, many_groups(seed=seed), budget=20)
    return train_step(trainer, None, GRPO, share(batch, ranks.rank, ranks.num), ranks=ranks).metrics


def communicated(mesh: DeviceMesh, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """How often gradients are reduced in an optimizer step of several passes."""
    _, divided = both(mesh, options)
    ranks = MeshRanks(mesh)
    batch = share(prepared(GRPO, many_groups(), budget=20), ranks.rank, ranks.num)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train_step(divided, None, GRPO, batch, ranks=ranks)
    counts = {event.key: event.count for event in profile.key_averages()}
    reduced = sum(count for name, count in counts.items() if "reduce_scatter" in name and name.startswith("c10d"))
    return {"passes": len(batch.micro_batches), "reduced": reduced, "layers": 2}
