"""What a trainer keeps of a forward pass for its backward pass, by token.

Counted operation by operation: a product keeps its input, a norm its input and what it makes of it, attention keeps
queries, keys, values, its output and one number a head, and the gated block its three inner vectors. Attention never
keeps its scores. `expected` is what the layers of transformers keep as they are written (tests/plan counts it with
autograd); `floor` is what fused operations would have to.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.plan.shapes import Feedforward, LatentAttention, Layer, ModelShape


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that one token of a micro-batch takes, at least and as expected."""

    floor: float
    expected: float

    def __add__(self, other: TokenBytes) -> TokenBytes:
        return TokenBytes(self.floor + other.floor, self.expected + other.expected)

    def __mul__(self, factor: float) -> TokenBytes:
        return TokenBytes(self.floor * factor, self.expected * factor)


def backward_of_layer(layer: Layer, hidden: int, bytes_per_number: float) -> TokenBytes:
    """Gradients that live at once while one layer's backward pass runs: of its inner vectors and of hidden states."""
    inner, wide = _inner_numbers(layer, hidden)
    return TokenBytes(hidden * bytes_per_number, (3 * inner + 4 * hidden + wide) * bytes_per_number)


def of_layer(layer: Layer, hidden: int, bytes_per_number: float) -> TokenBytes:
    """One layer, nothing of it computed again."""
    # A norm computes in float32: it keeps its input so, and what it made in the dtype of the products, twice.
    norm_expected = layer.norms * hidden * (4 + 2 * bytes_per_number)
    norm_floor = layer.norms * hidden * 2 * bytes_per_number
    attention = _attention_numbers(layer) * bytes_per_number + 4 * layer.attention.heads
    inner, wide = _inner_numbers(layer, hidden)
    return TokenBytes(
        floor=norm_floor + attention + 3 * inner * bytes_per_number + wide * bytes_per_number,
        expected=norm_expected + attention + 4 * inner * bytes_per_number + wide * bytes_per_number,
    )


def _attention_numbers(layer: Layer) -> float:
    """Queries, keys, values and output."""
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        latents = 3 * ((attention.query_rank or 0) + attention.kv_rank)  # before, within and behind their norms
        return latents + 2 * attention.heads * (attention.nope + attention.rope + attention.value)
    return 2 * (attention.heads + attention.kv_heads) * attention.head_size


def _inner_numbers(layer: Layer, hidden: int) -> tuple[float, float]:
    """-> inner units that one token passes, and copies of its hidden state that routing makes."""
    block = layer.feedforward
    if isinstance(block, Feedforward):
        return block.inner, 0.0
    shared = block.shared.inner if block.shared else 0
    return block.top_k * block.each.inner + shared, 2 * block.top_k * hidden + block.num


def of_model(shape: ModelShape, bytes_per_number: float, *, checkpointing: bool) -> TokenBytes:
    """All layers, and the gradients of the one at work. checkpointing: each layer keeps its input alone and is computed
    again, one at a time.
    """
    by_kind = [(of_layer(layer, shape.hidden, bytes_per_number), count) for layer, count in shape.kinds]
    backward = max(
        (backward_of_layer(layer, shape.hidden, bytes_per_number) for layer, _ in shape.kinds),
        key=lambda per_layer: per_layer.expected,
    )
    if not checkpointing:
        return sum((per_layer * count for per_layer, count in by_kind), backward)
    inputs = shape.num_layers * shape.hidden * bytes_per_number
    largest = max((per_layer for per_layer, _ in by_kind), key=lambda per_layer: per_layer.expected)
    return TokenBytes(inputs, inputs) + largest + backward


LOGIT_CHUNK = 8_000_000
"""Logits that have to exist at one time where they are computed in chunks (32 MB of float32)."""

KEPT_LOGITS = 64_000_000
"""Logits of a micro-batch that Headway keeps whole, since there is room for so many (256 MB); of more it computes
chunks, which take less (`models.distribution`).
"""

LOGIT_COPIES = 3
"""Of float32 logits: themselves, their probabilities, and their gradients."""


def logits_bytes(num_tokens: float, vocab: int, *, chunked: bool) -> TokenBytes:
    """Of a micro-batch, in float32: the logits at least, and as expected probabilities and gradients beside them.

    chunked: as Headway computes them, where more tokens never take less here than fewer.
    """
    numbers = num_tokens * vocab
    least, most = (min(numbers, LOGIT_CHUNK), min(numbers, KEPT_LOGITS)) if chunked else (numbers, numbers)
    return TokenBytes(4 * least, 4 * LOGIT_COPIES * most)
