"""The one attention function, registered with the attention interface of `transformers`.

A forward pass is over a flat list of rows (tokens) without padding. Which rows see which is said by a plan that
travels beside the input ids: `PackedAttention` for whole segments (training, prefill), `CachedAttention` for one new
token per lane (decode).

Axes: T rows of the forward, S segments of a block, Q and K padded query and key rows of a segment, H query heads,
G key-value heads, R = H / G, D head size, N lanes, L cached positions.
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


class AttentionPlan(Protocol):
    """Says which rows see which, and keeps keys and values where that is its business."""

    longest: int

    def attend(
        self, layer: int, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """-> output [T, H, D]."""
        ...


def _attention(
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
    output_THD = attention_plan.attend(layer, query[0], key[0], value[0], scaling)
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


AttentionInterface.register(NAME, _attention)


@dataclass(frozen=True)
class Segment:
    """Consecutive rows [start, start + length) that see themselves causally, after all of a shared prefix's rows."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True)
class _Block:
    """Segments of like length, padded to one shape. Padding looks at row 0 and nobody looks at padding."""

    query_rows_SQ: torch.Tensor
    key_rows_SK: torch.Tensor
    visible_SQK: torch.Tensor

    def to(self, device: torch.device) -> _Block:
        return _Block(self.query_rows_SQ.to(device), self.key_rows_SK.to(device), self.visible_SQK.to(device))


class PackedAttention:
    """Segments of one flat forward pass; together they cover its rows exactly once, in any order.

    keep: remember keys and values by layer in `kept` (prefill copies them into a cache).
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device, *, keep: bool = False) -> None:
        by_shape: defaultdict[tuple[int, int], list[Segment]] = defaultdict(list)
        for segment in segments:
            by_shape[segment.length.bit_length(), segment.prefix_length.bit_length()].append(segment)
        blocks = [_block(alike) for alike in by_shape.values()]
        self._order_T = _row_order(list(by_shape.values()), blocks).to(device)
        self._blocks = [block.to(device) for block in blocks]
        self.longest = max(segment.prefix_length + segment.length for segment in segments)
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if keep else None

    def attend(
        self, layer: int, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        num_rows, num_covered = query_HTD.shape[1], len(self._order_T)
        assert num_rows == num_covered, f"the segments cover {num_covered} of the forward's {num_rows} rows"
        if self.kept is not None:
            assert layer == len(self.kept), "layers run in order"
            self.kept.append((key_GTD, value_GTD))
        outputs = [_attend_block(block, query_HTD, key_GTD, value_GTD, scale) for block in self._blocks]
        return torch.cat(outputs)[self._order_T]


def _block(segments: Sequence[Segment]) -> _Block:
    num_queries = max(segment.length for segment in segments)
    num_keys = max(segment.prefix_length + segment.length for segment in segments)
    query_Q, key_K = torch.arange(num_queries), torch.arange(num_keys)
    start_S, length_S, prefix_start_S, prefix_S = (
        torch.tensor([getattr(segment, name) for segment in segments])[:, None]
        for name in ("start", "length", "prefix_start", "prefix_length")
    )
    query_rows_SQ = torch.where(query_Q < length_S, start_S + query_Q, 0)
    own_rows_SK = start_S + key_K - prefix_S
    key_rows_SK = torch.where(key_K < prefix_S, prefix_start_S + key_K, own_rows_SK)
    key_rows_SK = torch.where(key_K < prefix_S + length_S, key_rows_SK, 0)
    # A padded query sees what a real one in its place would: never nothing, since a softmax over nothing is NaN.
    visible_SQK = key_K <= (prefix_S + query_Q)[:, :, None]
    return _Block(query_rows_SQ, key_rows_SK, visible_SQK)


def _row_order(grouped: Sequence[Sequence[Segment]], blocks: Sequence[_Block]) -> torch.Tensor:
    """Row t of the forward -> its place in the concatenated outputs of the blocks."""
    rows, places, offset = [], [], 0
    for segments, block in zip(grouped, blocks, strict=True):
        width = block.query_rows_SQ.shape[1]
        for number, segment in enumerate(segments):
            rows.append(torch.arange(segment.start, segment.start + segment.length))
            places.append(torch.arange(segment.length) + offset + number * width)
        offset += block.query_rows_SQ.numel()
    rows_T, places_T = torch.cat(rows), torch.cat(places)
    assert int(rows_T.max()) < len(rows_T), "the segments leave rows of the forward uncovered"
    order_T = torch.full_like(rows_T, -1)
    order_T[rows_T] = places_T
    assert (order_T >= 0).all(), "the segments leave rows of the forward uncovered"
    return order_T


def _attend_block(
    block: _Block, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTD: torch.Tensor, scale: float
) -> torch.Tensor:
    """-> [S * Q, H, D]. The R query heads of a key head are stacked along Q, so keys are never repeated."""
    num_heads, _, size = query_HTD.shape
    num_key_heads = key_GTD.shape[0]
    ratio = num_heads // num_key_heads
    S, Q = block.query_rows_SQ.shape
    query = query_HTD.view(num_key_heads, ratio, -1, size)[:, :, block.query_rows_SQ]
    query = query.permute(2, 0, 1, 3, 4).reshape(S, num_key_heads, ratio * Q, size)
    key, value = (x[:, block.key_rows_SK].transpose(0, 1) for x in (key_GTD, value_GTD))
    visible = block.visible_SQK[:, None].repeat(1, 1, ratio, 1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)
    return output.view(S, num_heads, Q, -1).transpose(1, 2).reshape(S * Q, num_heads, -1)


class KeyValueCache:
    """Keys and values of every lane, by layer: [lanes, G, capacity, D]. Lanes in use are the first ones, always."""

    def __init__(self, num_lanes: int) -> None:
        self._num_lanes = num_lanes
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.capacity = 0

    def reserve(self, num_tokens: int, like: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Room for sequences of `num_tokens`; what is cached stays. `like`: keys and values [G, T, D] by layer."""
        if num_tokens <= self.capacity:
            return
        capacity = -(-num_tokens // 64) * 64
        grown = [(self._empty(key, capacity), self._empty(value, capacity)) for key, value in like]
        for old, new in zip(self.layers, grown, strict=False):
            for old_tensor, new_tensor in zip(old, new, strict=True):
                new_tensor[:, :, : self.capacity] = old_tensor
        self.layers, self.capacity = grown, capacity

    def _empty(self, like_GTD: torch.Tensor, capacity: int) -> torch.Tensor:
        return like_GTD.new_zeros(self._num_lanes, like_GTD.shape[0], capacity, like_GTD.shape[2])

    def write(self, lane: int, kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """A prompt's keys and values [G, P, D] by layer become the beginning of a lane."""
        for (keys, values), (key, value) in zip(self.layers, kept, strict=True):
            keys[lane, :, : key.shape[1]] = key
            values[lane, :, : value.shape[1]] = value

    def move(self, source: int, target: int, num_tokens: int) -> None:
        for tensors in self.layers:
            for tensor in tensors:
                tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]


class CachedAttention:
    """One new token in each of the first N lanes: row n is at position `positions_N[n]` of lane n."""

    def __init__(self, cache: KeyValueCache, positions_N: torch.Tensor) -> None:
        self._cache = cache
        self.longest = int(positions_N.max()) + 1
        self._positions_N = positions_N
        self._lanes_N = torch.arange(len(positions_N), device=positions_N.device)
        visible_NL = torch.arange(self.longest, device=positions_N.device) <= positions_N[:, None]
        self._visible_N11L = visible_NL[:, None, None]

    def attend(
        self, layer: int, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys, values = self._cache.layers[layer]
        keys[self._lanes_N, :, self._positions_N] = key_GTD.transpose(0, 1)
        values[self._lanes_N, :, self._positions_N] = value_GTD.transpose(0, 1)
        num_lanes, num_key_heads = len(self._lanes_N), key_GTD.shape[0]
        num_heads, _, size = query_HTD.shape
        query = query_HTD.transpose(0, 1).reshape(num_lanes, num_key_heads, num_heads // num_key_heads, size)
        live = (slice(0, num_lanes), slice(None), slice(0, self.longest))
        output = F.scaled_dot_product_attention(
            query, keys[live], values[live], attn_mask=self._visible_N11L, scale=scale
        )
        return output.reshape(num_lanes, num_heads, -1)
