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
            own: Any = super()
            return own.forward(
                hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **options
            )
        of_rows = _projected(self, hidden_states[0], *position_embeddings)
        query_1HTD, key_1GTD, value_1GTD = (of_heads.transpose(0, 1)[None] for of_heads in of_rows)
        output, _ = attention.attend(
            self, query_1HTD, key_1GTD, value_1GTD, None, self.scaling, attention_plan=plan, **self.its_options
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None

    def __reduce__(self) -> tuple[Any, ...]:
        """Its class is made when a model is loaded, and has no name by which it could be found."""
        return _blank, (type(self).__mro__[2],), self.__dict__


def _projected(
    block: Any, hidden_TE: torch.Tensor, cos_1TD: torch.Tensor, sin_1TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> queries [T, H, D], keys and values [T, G, D] of a block; queries and keys are rotated."""
    cos_T1D, sin_T1D = cos_1TD[0, :, None], _signed(sin_1TD)[0, :, None]
    together = block.joined.product(hidden_TE) if block.joined is not None else None
    if together is None:
        query, key, value = (layer(hidden_TE).unflatten(-1, (-1, block.head_dim)) for layer in _projections(block))
    else:
        heads = [layer.out_features // block.head_dim for layer in _projections(block)]
        together_TXD = together.unflatten(-1, (-1, block.head_dim))
        if not hasattr(block, "q_norm"):
            rotated = _rotated(together_TXD[:, : -heads[2]], cos_T1D, sin_T1D)
            return rotated[:, : heads[0]], rotated[:, heads[0] :], together_TXD[:, -heads[2] :]
        query, key, value = together_TXD.split(heads, 1)
    if hasattr(block, "q_norm"):  # of rows that lie one after another, as they do where each has its own product
        query, key = block.q_norm(query.contiguous()), block.k_norm(key.contiguous())
    return _rotated(query, cos_T1D, sin_T1D), _rotated(key, cos_T1D, sin_T1D), value


def _projections(block: Any) -> list[Any]:
    return [block.q_proj, block.k_proj, block.v_proj]


def _rotated(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(signed_sin))


_LAST = threading.local()


def _signed(sin: torch.Tensor) -> torch.Tensor:
    """The sine with the sign that it has in a rotation, [-sin, sin]; all layers of a pass ask for the same."""
    if getattr(_LAST, "sin", None) is not sin:
        first, second = sin.chunk(2, -1)
        _LAST.sin, _LAST.signed = sin, torch.cat((-first, second), -1)
    return _LAST.signed


# ---- packed weights


def pack(model: torch.nn.Module) -> None:
    """Lay out the weights of linear layers for many products (`Packed`), in a copy; after a change of them, again."""
    together: set[torch.nn.Module] = set()
    for module in model.modules():
        if isinstance(module, LlamaLike) and all(isinstance(layer, ProductLinear) for layer in _projections(module)):
            layers = _projections(module)
            module.joined = Packed([layer.weight for layer in layers], [layer.bias for layer in layers])
            together.update(layers)
    for module in model.modules():
        if isinstance(module, ProductLinear) and module not in together:
            module.packed = Packed([module.weight], [module.bias])


def unpack(model: torch.nn.Module) -> None:
    """Give up what `pack` has made."""
    for module in model.modules():
        if isinstance(module, ProductLinear):
            module.packed = None
        elif isinstance(module, LlamaLike):
            module.joined = None


# ---- which blocks are exchanged


def install(model: torch.nn.Module) -> None:
    """Exchange the attention blocks of a loaded model for those of this module, in place, where they give the same."""
    for module in model.modules():
        if _looks_alike(module):
            _exchange(module)


def _looks_alike(module: Any) -> bool:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return (
        all(type(getattr(module, name, None)) is ProductLinear for name in names)
        and all(hasattr(module, name) for name in ("head_dim", "scaling", "layer_idx", "config"))
        and hasattr(module, "q_norm") == hasattr(module, "k_norm")
        and not isinstance(module, LlamaLike)
        and {name.partition(".")[0] for name, _ in module.named_parameters()} <= {*names, "q_norm", "k_norm"}
        and len({layer.bias is None for layer in _projections(module)}) == 1
    )


class _Mixing:
    """A plan in which a row attends to itself: what comes out shows all that a block hands over.

    options: what else the block told the attention function.
    """

    num_rows = longest = 6

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def attend(
        self, layer: int, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        repeats = len(query_HTD) // len(key_GTD)
        key_HTD, value_HTD = (x.repeat_interleave(repeats, 0) for x in (key_GTD, value_GTD))
        return (scale * query_HTD * key_HTD + value_HTD).transpose(0, 1)


def _noted(*given: Any, attention_plan: _Mixing, scaling: float, **options: Any) -> tuple[torch.Tensor, None]:
    attention_plan.options = options
    return attention.attend(*given, attention_plan=attention_plan, scaling=scaling, **options)


AttentionInterface.register(PROBE, _noted)


@torch.no_grad()
def _exchange(block: Any) -> None:
    """Unless the block's own forward gives something else, or is called otherwise.

    Tried with loud rows too, which a block may clip.
    """
    kind, plan = type(block), _Mixing()
    like, rows = block.q_proj.weight, plan.num_rows
    hidden_1TE = torch.arange(rows * like.shape[1]).sin().view(1, rows, -1).to(like)
    angle_1TD = torch.arange(rows * block.head_dim // 2).cos().view(1, rows, -1).repeat(1, 1, 2).to(like)
    given = {"position_embeddings": (angle_1TD.cos(), angle_1TD.sin()), "attention_mask": None, "attention_plan": plan}
    trials = (hidden_1TE, 1000 * hidden_1TE)
    implementation = block.config._attn_implementation
    block.config._attn_implementation = PROBE
    try:
        own = [block(rows_1TE, **given)[0].float() for rows_1TE in trials]
        block.its_options = plan.options
        block.__class__ = _exchanged(kind)
        ours = [block(rows_1TE, **given)[0].float() for rows_1TE in trials]
        same = all(
            torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
            for one, other in zip(ours, own, strict=True)
        )
    except (TypeError, AttributeError, ValueError, RuntimeError, UserError):
        same = False
    finally:
        block.config._attn_implementation = implementation
    if not same:
        block.__class__ = kind


@functools.cache
def _exchanged(kind: type) -> type:
    return type(kind.__name__, (LlamaLike, kind), {})


def _blank(kind: type) -> Any:
    """An exchanged block of this class, without what is in it."""
    exchanged: Any = _exchanged(kind)
    return exchanged.__new__(exchanged)
