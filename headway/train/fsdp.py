"""The trainer of one rank among several: FSDP2 divides weights, gradients and optimizer states among them.

All ranks run the same program: each has its share of a batch (`train.ranks`), makes as many passes as every other, and
calls the same methods in the same order. Losses have the denominators of the whole batch, so gradients of the ranks are
added up, never averaged. What a pass does is what the local trainer's does, within a module that FSDP2 watches; with
bfloat16 products whole weights of layers are gathered in bfloat16, everything else is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headway.checkpoint import broken
from headway.config import Train
from headway.models.distribution import Conditions, Shape, token_logprobs
from headway.models.policy import Policy
from headway.models.rows import Rows
from headway.stages import ForwardResult
from headway.train.optimizer import Optimizer
from headway.types import UserError
from headway.work import WorkLog

T = TypeVar("T")

FOLDER = "trainer"
"""Of a checkpoint: shards of weights and optimizer states, which any number of ranks can read."""


class MeshRanks:
    """Implements `headway.train.ranks.Ranks` over a process group."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self.rank, self.num = dist.get_rank(self._group), dist.get_world_size(self._group)

    def gather(self, mine: T) -> list[T]:
        found: list[Any] = [None] * self.num
        dist.all_gather_object(found, mine, group=self._group)
        return found


class FsdpTrainer:
    """Implements `headway.stages.Trainer` on one rank of `mesh`.

    policy: float32 weights, the same on all ranks; each keeps its shards of them, the master copy. settings: the
    optimizer; shape: of every distribution; num_steps: optimizer steps of the learning rate's schedule; checkpointing:
    activations of a layer are computed again in the backward pass; offload: shards and optimizer states wait in the
    host's memory; reference: as for the local trainer, divided too. log: as the local trainer's, of this rank.
    """

    def __init__(
        self,
        policy: Policy,
        settings: Train,
        *,
        shape: Shape,
        num_steps: int,
        mesh: DeviceMesh,
        checkpointing: bool = False,
        offload: bool = False,
        reference: Policy | None = None,
    ) -> None:
        if policy.adapter:
            raise UserError("FSDP2 trains whole models so far: leave adapter.kind out, or train on one rank")
        half = settings.compute_dtype == "bfloat16"
        self._policy = policy
        self._pass = _divided(_Pass(policy, shape), mesh, half=half, checkpointing=checkpointing, offload=offload)
        self._reference_pass = None
        if reference is not None:
            self._reference_pass = _divided(_Pass(reference, shape), mesh, half=half, offload=offload)
        self.log = WorkLog()
        self._optimizer = Optimizer(policy.model.parameters(), settings, num_steps=num_steps)

    @torch.no_grad()
    def forward(self, rows: Rows, *, reference: bool = False) -> ForwardResult:
        with self._work("forward", rows):
            rows = rows.to(self._policy.device)
            logp_N, entropy_N = self._referred(rows) if reference else self._pass(rows)
            return ForwardResult(logp_N.cpu(), entropy_N.cpu())

    def forward_backward(
        self, rows: Rows, loss: Callable[[torch.Tensor], torch.Tensor], *, last: bool = True
    ) -> ForwardResult:
        """Gradients of the ranks are added up in the last pass, once."""
        self._pass.set_requires_gradient_sync(last)
        with self._work("train", rows):
            logp_N, entropy_N = self._pass(rows.to(self._policy.device))
            value = loss(logp_N)
            value.backward()
            return ForwardResult(logp_N.detach().cpu(), entropy_N.detach().cpu(), value.item())

    def _referred(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        if self._reference_pass is not None:
            return self._reference_pass(rows)
        assert self._policy.has_own_reference, "log-probs of a reference are asked for, and there is none"
        with self._policy.as_reference():
            return self._pass(rows)

    def optim_step(self) -> dict[str, Any]:
        """As `LocalTrainer.optim_step`."""
        with self.log.timed("update", 1.0):
            return self._optimizer.step()

    @contextmanager
    def _work(self, kind: str, rows: Rows) -> Iterator[None]:
        with self.log.timed(kind, 1.0, tokens=len(rows.ids_T), pairs=rows.num_pairs):
            yield

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight an engine needs, by name and whole, one at a time; all ranks go through it together."""
        for name, tensor in self._policy.weights().items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def weights(self) -> Mapping[str, torch.Tensor]:
        """All of them at once, a whole copy on every rank."""
        return dict(self.stream())

    def save(self, folder: Path) -> None:
        """Each rank writes its own shards."""
        save(self._state(), checkpoint_id=folder / FOLDER)

    def load(self, folder: Path) -> None:
        """From any number of ranks. Raises UserError where the checkpoint is damaged."""
        state, optimizer = self._state(), self._optimizer
        try:
            load(state, checkpoint_id=folder / FOLDER)  # weights in place
        except CheckpointException as error:  # no Exception of Python's
            raise broken(folder, RuntimeError(str(error))) from None
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            raise broken(folder, error) from None
        set_optimizer_state_dict(self._policy.model, optimizer.adam, state["optimizer"])
        optimizer.steps_taken, optimizer.steps_skipped = state["steps_taken"], state["steps_skipped"]

    def _state(self) -> dict[str, Any]:
        optimizer = self._optimizer
        return {
            "weights": self._policy.weights(),
            "optimizer": get_optimizer_state_dict(self._policy.model, optimizer.adam),
            "steps_taken": optimizer.steps_taken,
            "steps_skipped": optimizer.steps_skipped,
        }


class _Pass(torch.nn.Module):
    """Log-probs and entropies of rows under a policy, as one module: whole weights are there while it runs."""

    def __init__(self, policy: Policy, shape: Shape) -> None:
        super().__init__()
        self.model = policy.model
        self._policy, self._shape = policy, shape

    def forward(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        policy, own = self._policy, self.model.get_output_embeddings()
        hidden_TD = policy.hidden(rows.ids_T, rows.positions_T, policy.packed(rows.segments))
        conditions = Conditions(rows.seen() if self._shape.repetition_penalty != 1.0 else None, rows.kept)
        head = replace(policy.head, weight_VD=own.weight, bias_V=getattr(own, "bias", None))
        return token_logprobs(head, hidden_TD.index_select(0, rows.row_N), rows.target_N, self._shape, conditions)


def _divided(module: _Pass, mesh: DeviceMesh, *, half: bool, checkpointing: bool = False, offload: bool = False) -> Any:
    """Layer by layer, and what is in none of them together."""
    waiting: OffloadPolicy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32)
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in _layers(module.model):
        if checkpointing:
            checkpoint(layer)
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=waiting)
    root: Any = fully_shard(module, mesh=mesh, mp_policy=whole, offload_policy=waiting)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return root


def _layers(model: Any) -> torch.nn.ModuleList:
    """The stack of decoder layers, whatever an architecture calls it."""
    num = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return next(layers for layers in lists if len(layers) == num)
