"""Attention blocks of Llama-like layers in fewer operations than `transformers` takes, with the same results.

Between two tokens of a rollout there is little to compute, and every operation has its price. So the queries, keys and
values of a row come out of one product where weights stay for a while (`pack`), and are rotated together. A block is
exchanged only after it was seen to give what the model's own gives; others stay as they are.

Axes: T rows, E hidden size, H query heads, G key-value heads, X = H + 2 G, D head size.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from headway.models import attention
from headway.models.products import Packed, ProductLinear
from headway.types import UserError

PROBE = "headway probe"
"""The attention implementation by which a block is tried."""


class LlamaLike:
    """Mixed into the class of a model's attention block, whose weights, names and the rest are as they were."""

    joined: Packed | None = None
    its_options: dict[str, Any]
    """What the block's own forward tells the attention function, such as a sliding window."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        plan = options.get("attention_plan")
        if plan is None or position_embeddings is None or position_embeddings[0].shape[-1] != self.head_dim:
            own = super().forward
            return own(hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **options)
        query_HTD, key_GTD, value_GTD = (
            of.transpose(0, 1)[None] for of in _projected(self, hidden_states[0], position_embeddings)
        )
        output, _ = attention.attend(
            self, query_HTD, key_GTD, value_GTD, None, self.scaling, attention_plan=plan, **self.its_options
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None


def _projected(
    block: Any, hidden_TE: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> queries [T, H, D], keys [T, G, D] and values [T, G, D] of a block, queries and keys rotated."""
    cos_1TD, sin_1TD = position_embeddings
    cos_T1D, sin_T1D = cos_1TD[0, :, None], _signed(sin_1TD)[0, :, None]
    normed = hasattr(block, "q_norm")
    together = block.joined.product(hidden_TE) if block.joined is not None else None
    if together is None:
        query, key, value = (
            layer(hidden_TE).view(len(hidden_TE), -1, block.head_dim)
            for layer in (block.q_proj, block.k_proj, block.v_proj)
        )
    else:
        heads = [layer.out_features // block.head_dim for layer in (block.q_proj, block.k_proj, block.v_proj)]
        together_TXD = together.view(len(hidden_TE), -1, block.head_dim)
        if not normed:
            value = together_TXD[:, -heads[2] :]
            both = _rotated(together_TXD[:, : -heads[2]], cos_T1D, sin_T1D)
            return both[:, : heads[0]], both[:, heads[0] :], value
        query, key, value = together_TXD.split(heads, 1)
    if normed:  # of rows that lie one after another, as they do where each has its product
        query, key = block.q_norm(query.contiguous()), block.k_norm(key.contiguous())
    return _rotated(query, cos_T1D, sin_T1D), _rotated(key, cos_T1D, sin_T1D), value


def _rotated(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(signed_sin))


_LAST = threading.local()


def _signed(sin: torch.Tensor) -> torch.Tensor:
    """The sine with the sign that it has in a rotation, [-sin, sin]; all layers of a pass ask for the same."""
    if getattr(_LAST, "sin", None) is not sin:
        first, second = sin.chunk(2, -1)
        _LAST.sin, _LAST.signed = sin, torch.cat((-first, second), -1)
    return _LAST.signed


def install(model: torch.nn.Module) -> None:
    """Exchange the attention blocks of a loaded model for those of this module, in place, where they give the same."""
    for module in model.modules():
        if _is_alike(module):
            _exchange(module)


def pack(model: torch.nn.Module) -> None:
    """Lay out the weights of linear layers for many products (`Packed`), which copies them; again after every change."""
    for module in model.modules():
        if isinstance(module, ProductLinear):
            module.packed = Packed([module.weight], [module.bias])
    for module in model.modules():
        if isinstance(module, LlamaLike):
            layers = _projections(module)
            if all(isinstance(layer, ProductLinear) for layer in layers):
                module.joined = Packed([layer.weight for layer in layers], [layer.bias for layer in layers])
                for layer in layers:
                    layer.packed = None


def unpack(model: torch.nn.Module) -> None:
    """Give up what `pack` has made."""
    for module in model.modules():
        if isinstance(module, ProductLinear):
            module.packed = None
        elif isinstance(module, LlamaLike):
            module.joined = None


def _projections(block: Any) -> list[Any]:
    return [block.q_proj, block.k_proj, block.v_proj]


def _is_alike(module: Any) -> bool:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return (
        all(type(getattr(module, name, None)) is ProductLinear for name in names)
        and all(hasattr(module, name) for name in ("head_dim", "scaling", "layer_idx", "config"))
        and hasattr(module, "q_norm") == hasattr(module, "k_norm")
    )


class _Mixing:
    """A plan of attention of which nothing can be seen but what it is given: queries, keys and values, mixed."""

    num_rows = longest = 6

    def attend(
        self, layer: int, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        repeats = len(query_HTD) // len(key_GTD)
        key_HTD, value_HTD = (x.repeat_interleave(repeats, 0) for x in (key_GTD, value_GTD))
        return (scale * query_HTD * key_HTD + value_HTD).transpose(0, 1)


def _note(module: torch.nn.Module, *tensors: Any, scaling: float, attention_plan: Any, **options: Any) -> Any:
    attention_plan.options = options
    return attention.attend(module, *tensors, scaling, attention_plan=attention_plan, **options)


AttentionInterface.register(PROBE, _note)


@torch.no_grad()
def _exchange(block: Any) -> None:
    """Unless the block's own forward gives something else, or is called otherwise."""
    kind, plan = type(block), _Mixing()
    weight = block.q_proj.weight
    rows_TE = torch.linspace(-1, 1, plan.num_rows * weight.shape[1], dtype=weight.dtype, device=weight.device).sin()
    angles_1TD = torch.linspace(0, 3, plan.num_rows * block.head_dim // 2, dtype=weight.dtype, device=weight.device)
    angles_1TD = angles_1TD.view(1, plan.num_rows, -1).repeat(1, 1, 2)
    given = {"position_embeddings": (angles_1TD.cos(), angles_1TD.sin()), "attention_mask": None}
    hidden_1TE = rows_TE.view(1, plan.num_rows, -1)
    implementation = block.config._attn_implementation
    block.config._attn_implementation = PROBE
    try:
        own, _ = block(hidden_1TE, **given, attention_plan=plan)
        block.its_options = plan.options
        block.__class__ = _exchanged(kind)
        ours, _ = block(hidden_1TE, **given, attention_plan=plan)
        same = torch.allclose(ours.float(), own.float(), rtol=1e-4, atol=1e-5 * float(own.abs().max()))
    except (TypeError, AttributeError, ValueError, RuntimeError, UserError):
        same = False
    finally:
        block.config._attn_implementation = implementation
    if not same:
        block.__class__ = kind


@functools.cache
def _exchanged(kind: type) -> type:
    return type(kind.__name__, (LlamaLike, kind), {})
