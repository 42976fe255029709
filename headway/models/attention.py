"""The one attention function, registered with the attention interface of `transformers`.

A forward pass is over a flat list of rows (tokens) without padding. Which rows see which is said by a plan that
travels beside the input ids: `PackedAttention` for whole segments (training), `paged.CachedPass` for rows whose
earlier keys and values are in an engine's cache.

What a row attends to has two parts: a shared prefix (the prompt of its group) and what is its own. A plan may keep a
*fixed order*: each part is summed in blocks of `BLOCK` keys from its beginning, block after block, prefix and own
apart, and the two are added at last. The order follows from the rollout alone, so a row's bits do not depend on what
it is computed with.

Axes: T rows of the forward, S segments of a block, Q and K padded query and key rows of a segment, H query heads,
G key-value heads, R = H / G, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers.modeling_utils import AttentionInterface

from headway.types import UserError

NAME = "headway"
"""The attention implementation's name in `transformers`."""

BLOCK = 32
"""Keys that are summed at a time where the order is fixed, and the tokens of a block of an engine's cache."""

QUERY_ROWS = 4
"""Rows of a product with keys at least: products of one to three rows take other paths, and have other bits."""

SCORES = 1 << 24
"""Attention scores that exist at one time where the order is fixed (64 MiB in float32)."""


class AttentionPlan(Protocol):
    """Says which rows see which, and keeps keys and values where that is its business.

    num_rows: of the pass, without rows that only fill it up; longest: tokens of the longest sequence.
    """

    num_rows: int
    longest: int

    def attend(
        self, layer: int, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """-> output [T, H, D] of `num_rows` rows."""
        ...


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    attention_plan: AttentionPlan,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`transformers` calls this in every layer, with [1, heads, T, D] tensors; dropout is never applied."""
    _refuse_unknown(module, attention_plan, options)
    layer = module.layer_idx
    assert isinstance(layer, int)
    num_rows, num_given = attention_plan.num_rows, query.shape[2]
    assert num_rows <= num_given, f"the plan covers {num_rows} rows and the forward has {num_given}"
    rows = slice(0, num_rows)
    output_THD = attention_plan.attend(layer, query[0, :, rows], key[0, :, rows], value[0, :, rows], scaling)
    if num_rows < num_given:
        output_THD = F.pad(output_THD, (0, 0, 0, 0, 0, num_given - num_rows))
    return output_THD[None], None


def _refuse_unknown(module: torch.nn.Module, plan: AttentionPlan, options: dict[str, Any]) -> None:
    """What would change the result and is not implemented is refused by name, never ignored."""
    window = options.get("sliding_window")
    if window is not None and plan.longest > window:
        raise UserError(
            f"{type(module).__name__} attends within a sliding window of {window} tokens and a sequence here has "
            f"{plan.longest}: choose a model without sliding windows, or shorter sequences"
        )
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise UserError(f"{type(module).__name__} uses {name} in its attention, which Headway does not implement")


AttentionInterface.register(NAME, attend)


@dataclass(frozen=True)
class Segment:
    """Consecutive rows [start, start + length) that see themselves causally, after all of a shared prefix's rows."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True)
class Padded:
    """Segments of like length, padded to one shape. Padding looks at row 0 and nobody looks at padding.

    query_rows_SQ: rows of the pass; visible_SQK: of the K keys the first `num_prefix_keys` are the prefix's, the others
    a segment's own, of which its first row sees at most `first_own + 1`. Where the order is fixed, both parts are
    multiples of `BLOCK`.
    """

    query_rows_SQ: torch.Tensor
    visible_SQK: torch.Tensor
    num_prefix_keys: int
    first_own: int
    fixed_order: bool

    def attend(
        self, query_HTD: torch.Tensor, key_SGKD: torch.Tensor, value_SGKD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """-> [S * Q, H, D]. The R query heads of a key head are stacked along Q, so keys are never repeated."""
        num_heads, _, size = query_HTD.shape
        num_key_heads = key_SGKD.shape[1]
        S, Q = self.query_rows_SQ.shape
        query_GRTD = query_HTD.view(num_key_heads, num_heads // num_key_heads, -1, size)
        query_SGRQD = taken(query_GRTD, 2, self.query_rows_SQ).permute(2, 0, 1, 3, 4)
        kernel = _FixedOrder.apply if self.fixed_order else _in_any_order
        output_SGRQD = kernel(query_SGRQD, key_SGKD, value_SGKD, self, scale)
        return output_SGRQD.permute(0, 3, 1, 2, 4).reshape(S * Q, num_heads, -1)

    def keys_seen(self, num_queries: int) -> int:
        """By the first so many rows of every segment."""
        own = -(-(self.first_own + num_queries) // BLOCK) * BLOCK
        return min(self.num_prefix_keys + own, self.visible_SQK.shape[2])


def taken(values: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """`values` at `places` along `dim`, which becomes the dimensions of `places`; faster than indexing.

    On a CPU the gradients of a place that is taken several times are summed in one order, with any number of threads.
    """
    return values.index_select(dim, places.reshape(-1)).unflatten(dim, places.shape)


def _in_any_order(
    query_SGRQD: torch.Tensor, key_SGKD: torch.Tensor, value_SGKD: torch.Tensor, padded: Padded, scale: float
) -> torch.Tensor:
    S, G, R, Q, D = query_SGRQD.shape
    visible = padded.visible_SQK[:, None].repeat(1, 1, R, 1)
    query = query_SGRQD.reshape(S, G, R * Q, D)
    output = F.scaled_dot_product_attention(query, key_SGKD, value_SGKD, attn_mask=visible, scale=scale)
    return output.view(S, G, R, Q, -1)


class _FixedOrder(torch.autograd.Function):
    """Only what comes out has its order fixed; gradients are those of `_in_any_order`."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padded: Padded, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.padded, ctx.scale = padded, scale
        S, G, R, Q, _ = query.shape
        tile = SCORES // (S * G * R * key.shape[2]) // QUERY_ROWS * QUERY_ROWS
        tile = max(QUERY_ROWS, min(tile, 128))
        parts = [_tile(query, key, value, padded, scale, range(q, min(q + tile, Q))) for q in range(0, Q, tile)]
        return torch.cat(parts, dim=3)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            query, key, value = inputs
            output = _in_any_order(query, key, value, ctx.padded, ctx.scale)
        return (*torch.autograd.grad(output, inputs, grads[0]), None, None)


def _tile(
    query_SGRQD: torch.Tensor,
    key_SGKD: torch.Tensor,
    value_SGKD: torch.Tensor,
    padded: Padded,
    scale: float,
    queries: range,
) -> torch.Tensor:
    """Some queries of each segment, with the keys that they may see: all their scores never exist at once."""
    S, G, R, _, D = query_SGRQD.shape
    num_keys = padded.keys_seen(queries.stop)
    query = query_SGRQD[:, :, :, queries.start : queries.stop].reshape(S, G, R * len(queries), D) * scale
    scores = torch.matmul(query, key_SGKD[:, :, :num_keys].transpose(2, 3)).view(S, G, R, len(queries), num_keys)
    scores.masked_fill_(~padded.visible_SQK[:, None, None, queries.start : queries.stop, :num_keys], -torch.inf)
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_().view(S, G, R * len(queries), num_keys)
    parts = [
        _sum_of_blocks(weights, value_SGKD, range(first, last, BLOCK))
        for first, last in ((0, padded.num_prefix_keys), (padded.num_prefix_keys, num_keys))
        if first < last
    ]
    numerator, denominator = parts[0] if len(parts) == 1 else (a + b for a, b in zip(*parts, strict=True))
    return (numerator / denominator).view(S, G, R, len(queries), -1)


def _sum_of_blocks(
    weights_SGQK: torch.Tensor, value_SGKD: torch.Tensor, blocks: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted values [S, G, Q, D] and weights [S, G, Q, 1], block after block."""
    numerator = denominator = None
    for first in blocks:
        weight = weights_SGQK[..., first : first + BLOCK].contiguous()
        value = torch.matmul(weight, value_SGKD[:, :, first : first + BLOCK])
        total = weight.sum(-1, keepdim=True)
        numerator = value if numerator is None else numerator.add_(value)
        denominator = total if denominator is None else denominator.add_(total)
    assert numerator is not None
    assert denominator is not None
    return numerator, denominator


def size_class(length: int) -> int:
    """Lengths of one class are padded to one: short ones to less than twice, others by less than `BLOCK`."""
    return length.bit_length() if length < BLOCK else BLOCK + -(-length // BLOCK)


class PackedAttention:
    """Segments of one flat forward pass; together they cover its rows exactly once, in any order."""

    def __init__(self, segments: Sequence[Segment], device: torch.device, *, fixed_order: bool = False) -> None:
        by_shape: defaultdict[tuple[int, int], list[Segment]] = defaultdict(list)
        for segment in segments:
            by_shape[size_class(segment.length), size_class(segment.prefix_length)].append(segment)
        blocks = [_block(alike, device, fixed_order) for alike in by_shape.values()]
        self._blocks = blocks
        starts = [[segment.start for segment in alike] for alike in by_shape.values()]
        lengths = [[segment.length for segment in alike] for alike in by_shape.values()]
        self._order_T = row_order(starts, lengths, [padded for padded, _ in blocks]).to(device)
        self.num_rows = len(self._order_T)
        self.longest = max(segment.prefix_length + segment.length for segment in segments)

    def attend(
        self, layer: int, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        outputs = []
        for padded, key_rows_SK in self._blocks:
            key, value = (taken(x, 1, key_rows_SK).transpose(0, 1) for x in (key_GTD, value_GTD))
            outputs.append(padded.attend(query_HTD, key, value, scale))
        return taken(torch.cat(outputs), 0, self._order_T)


def _block(segments: Sequence[Segment], device: torch.device, fixed_order: bool) -> tuple[Padded, torch.Tensor]:
    """-> the segments padded to one shape, and the rows of their keys [S, K]."""
    start_S, length_S, prefix_start_S, prefix_S = (
        torch.tensor([getattr(segment, name) for segment in segments])
        for name in ("start", "length", "prefix_start", "prefix_length")
    )
    padded = pad(start_S, length_S, torch.zeros_like(start_S), prefix_S, device, fixed_order=fixed_order)
    own_K = torch.arange(padded.visible_SQK.shape[2]) - padded.num_prefix_keys
    prefix_K = torch.arange(len(own_K))
    own_rows_SK = torch.where(own_K < length_S[:, None], start_S[:, None] + own_K, 0)
    prefix_rows_SK = torch.where(prefix_K < prefix_S[:, None], prefix_start_S[:, None] + prefix_K, 0)
    return padded, torch.where(own_K >= 0, own_rows_SK, prefix_rows_SK).to(device)


def pad(
    start_S: torch.Tensor,
    length_S: torch.Tensor,
    first_own_S: torch.Tensor,
    prefix_S: torch.Tensor,
    device: torch.device,
    *,
    fixed_order: bool,
    whole_blocks: bool = False,
) -> Padded:
    """Segments of `length_S` rows from row `start_S` of the pass on, whose first is number `first_own_S` of their own.

    They see `prefix_S` tokens of a prefix. whole_blocks: keys come in blocks of `BLOCK`, though the order is free.
    """
    blocks = BLOCK if fixed_order or whole_blocks else 1
    num_queries = -(-int(length_S.max()) // QUERY_ROWS) * QUERY_ROWS if fixed_order else int(length_S.max())
    num_prefix_keys = -(-int(prefix_S.max()) // blocks) * blocks
    num_own_keys = -(-int((first_own_S + length_S).max()) // blocks) * blocks
    query_Q = torch.arange(num_queries)
    own_K = torch.arange(num_prefix_keys + num_own_keys) - num_prefix_keys
    # A padded query sees what a real one in its place would: never nothing, since a softmax over nothing is NaN.
    sees_own_SQK = (own_K >= 0) & (own_K <= (first_own_S[:, None] + query_Q)[:, :, None])
    sees_prefix_S1K = (own_K + num_prefix_keys < prefix_S[:, None])[:, None] & (own_K < 0)
    return Padded(
        query_rows_SQ=torch.where(query_Q < length_S[:, None], start_S[:, None] + query_Q, 0).to(device),
        visible_SQK=(sees_own_SQK | sees_prefix_S1K).to(device),
        num_prefix_keys=num_prefix_keys,
        first_own=int(first_own_S.max()),
        fixed_order=fixed_order,
    )


def row_order(
    starts: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]], blocks: Sequence[Padded], first: int = 0
) -> torch.Tensor:
    """Row `first + t` of the pass -> its place in the concatenated outputs of the blocks.

    starts, lengths: of the segments of each block; they cover all rows from `first` on once.
    """
    first_places: list[int] = []
    offset = 0
    for block in blocks:
        num_segments, width = block.query_rows_SQ.shape
        first_places += range(offset, offset + num_segments * width, width)
        offset += num_segments * width
    length_S = torch.tensor([length for of_block in lengths for length in of_block])
    start_S = torch.tensor([start - first for of_block in starts for start in of_block])
    within_T = torch.arange(int(length_S.sum())) - (length_S.cumsum(0) - length_S).repeat_interleave(length_S)
    rows_T = start_S.repeat_interleave(length_S) + within_T
    places_T = torch.tensor(first_places).repeat_interleave(length_S) + within_T
    assert int(rows_T.max()) < len(rows_T), "the segments leave rows of the forward uncovered"
    order_T = torch.full_like(rows_T, -1)
    order_T[rows_T] = places_T
    assert (order_T >= 0).all(), "the segments leave rows of the forward uncovered"
    return order_T
