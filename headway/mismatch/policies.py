"""The trainer's policy with one thing done otherwise: in bf16, with a rounded head, with quantised weights.

Axes: O outputs and I inputs of a linear layer; N rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch

from headway.models.distribution import Head
from headway.models.parity import TILES
from headway.models.policy import Policy, in_dtype, with_parity
from headway.types import UserError

INTEGER_LEVELS = {"int8": 127, "int4": 7}
FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def with_fixed_order(policy: Policy) -> Policy:
    """The policy as under parity bitwise, untried: whether its bits are its own is what the probe sees.

    With the largest tile, which does wherever a smaller one does.
    """
    return replace(policy, parity="bitwise", head=replace(policy.head, row_tile=TILES[-1]))


def own_copy(policy: Policy) -> Policy:
    """In storage of its own, as an engine's."""
    return copy.deepcopy(policy)


def in_bfloat16(policy: Policy) -> Policy:
    """A copy with its weights, hidden states, keys and values in bf16; its head's product is in float32."""
    return in_dtype(with_parity(own_copy(policy), "close"), torch.bfloat16)


@dataclass(frozen=True)
class Bfloat16Head(Head):
    """A head as most engines have it: bf16 states times bf16 weights, summed in float32, and the logits in bf16."""

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden_ND.bfloat16()).bfloat16().float()


def with_bfloat16_head(policy: Policy) -> Policy:
    """The same model, with a head whose weights and logits are rounded to bf16."""
    head = policy.head
    bias_V = None if head.bias_V is None else head.bias_V.bfloat16().to(head.bias_V.dtype)
    weight_VD = head.weight_VD.detach().bfloat16().to(head.weight_VD.dtype)
    return replace(policy, head=Bfloat16Head(weight_VD, bias_V, head.scale, head.softcap, head.row_tile))


@torch.no_grad()
def quantised(policy: Policy, kind: str) -> Policy:
    """A copy whose linear layers, but not embedding and head, have the values that quantised weights have.

    An adapter's own layers stay as they are. Raises UserError for a model whose layers are not plain ones.
    """
    name = type(policy.model).__name__
    policy = own_copy(policy)
    if any(parameter.ndim > 2 for parameter in policy.model.parameters()):
        raise UserError(f"{name} keeps experts in one tensor, which are not quantised here")
    layers = [module for module in policy.model.base_model.modules() if isinstance(module, torch.nn.Linear)]
    if policy.adapter is not None:
        layers = [layer for layer in layers if not layer.weight.requires_grad]
    if not layers:
        raise UserError(f"{name} has no plain linear layers")
    for layer in layers:
        layer.weight.copy_(fake_quantised(layer.weight, kind))
    return policy


def fake_quantised(weight_OI: torch.Tensor, kind: str) -> torch.Tensor:
    """The nearest values that a number format with one scale per output has; the largest of a row stays as it is.

    int8: 255 values, int4: 15 (both symmetric), fp8: e4m3.

    >>> fake_quantised(torch.tensor([[0.0, 0.9, 7.0]]), "int4")
    tensor([[0., 1., 7.]])
    """
    largest_O1 = weight_OI.abs().amax(1, keepdim=True).clamp_min(torch.finfo(weight_OI.dtype).tiny)
    if kind == "fp8":
        scale_O1 = largest_O1 / FP8_LARGEST
        return (weight_OI / scale_O1).to(torch.float8_e4m3fn).to(weight_OI.dtype) * scale_O1
    scale_O1 = largest_O1 / INTEGER_LEVELS[kind]
    return (weight_OI / scale_O1).round() * scale_O1
