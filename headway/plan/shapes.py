"""The shape of a decoder-only language model: its layers' sizes, and what follows from them by counting.

Parameters, those that one token uses, KV-cache bytes, and operations of a forward pass. Everything is computed from
the sizes alone, so that it can be compared with a published total.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class Attention:
    """One layer's attention with keys and values of its own for every key-value head.

    heads, kv_heads, head_size: H, G, D; window: tokens that a sliding window sees, None: all. qkv_bias, output_bias,
    sinks (one learned logit per head): whether there are any. norm: RMSNorm of queries and keys, none, of each head, or
    of the whole projection.
    """

    heads: int
    kv_heads: int
    head_size: int
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    norm: Literal["none", "head", "whole"] = "none"

    def matrices(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Name of each projection -> inputs, outputs."""
        query, kept = self.heads * self.head_size, self.kv_heads * self.head_size
        return {"q": (hidden, query), "k": (hidden, kept), "v": (hidden, kept), "o": (query, hidden)}

    def num_other_params(self, hidden: int) -> int:
        """Biases, sinks and norms."""
        query, kept = self.heads * self.head_size, self.kv_heads * self.head_size
        norms = {"none": 0, "head": 2 * self.head_size, "whole": query + kept}[self.norm]
        biases = self.qkv_bias * (query + 2 * kept) + self.output_bias * hidden
        return norms + biases + self.sinks * self.heads

    @property
    def cached_numbers(self) -> int:
        """That the cache keeps of one token."""
        return 2 * self.kv_heads * self.head_size

    @property
    def flops_per_cached_token(self) -> int:
        """Of one query row with one key: scores, and the weighted sum of values."""
        return 4 * self.heads * self.head_size


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache keeps one latent vector and one rotary key
    for all heads.

    query_rank: None: queries are projected directly. nope, rope, value: sizes of a head's parts.
    """

    heads: int
    query_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    window: int | None = None

    def matrices(self, hidden: int) -> dict[str, tuple[int, int]]:
        query = self.heads * (self.nope + self.rope)
        rank = self.query_rank
        queries = {"q": (hidden, query)} if rank is None else {"q_a": (hidden, rank), "q_b": (rank, query)}
        return queries | {
            "kv_a": (hidden, self.kv_rank + self.rope),
            "kv_b": (self.kv_rank, self.heads * (self.nope + self.value)),
            "o": (self.heads * self.value, hidden),
        }

    def num_other_params(self, hidden: int) -> int:
        return (self.query_rank or 0) + self.kv_rank

    @property
    def cached_numbers(self) -> int:
        return self.kv_rank + self.rope

    @property
    def flops_per_cached_token(self) -> int:
        """Of one query row, with the up-projections absorbed: scores against latent and rotary key, sum of latents."""
        return 2 * self.heads * (2 * self.kv_rank + self.rope)


@dataclass(frozen=True)
class Feedforward:
    """A dense block: gate and up (up alone where not gated) and down, of `inner` units."""

    inner: int
    gated: bool = True
    bias: bool = False

    def matrices(self, hidden: int) -> dict[str, tuple[int, int]]:
        gate = {"gate": (hidden, self.inner)} if self.gated else {}
        return gate | {"up": (hidden, self.inner), "down": (self.inner, hidden)}

    def num_params(self, hidden: int) -> int:
        biases = self.bias * ((1 + self.gated) * self.inner + hidden)
        return _products(self.matrices(hidden)) + biases


@dataclass(frozen=True)
class Experts:
    """A mixture: every token goes to `top_k` of `num` routed blocks, and through the shared ones.

    router_bias: one number per expert (a bias of the router, or a correction of its scores).
    """

    num: int
    top_k: int
    each: Feedforward
    shared: Feedforward | None = None
    router_bias: bool = False

    def router_params(self, hidden: int) -> int:
        return hidden * self.num + self.router_bias * self.num

    def coverage(self, num_tokens: float) -> float:
        """Expected share of routed experts that so many tokens touch under uniform routing, 1 - (1 - k/E)^b."""
        return 1 - (1 - self.top_k / self.num) ** num_tokens


@dataclass(frozen=True)
class Layer:
    """attention, then a dense block or a mixture; norms: RMSNorms over the hidden size."""

    attention: Attention | LatentAttention
    feedforward: Feedforward | Experts
    norms: int = 2

    def num_params(self, hidden: int) -> int:
        return self.num_fixed_params(hidden) + self.num_routed_params(hidden)

    def num_fixed_params(self, hidden: int) -> int:
        """That every token uses."""
        return (
            _products(self.attention.matrices(hidden))
            + self.attention.num_other_params(hidden)
            + self.norms * hidden
            + self._fixed_feedforward(hidden)
        )

    def num_small_params(self, hidden: int) -> int:
        """Of those, norms, biases and the router, which are not divided among the GPUs that share a layer."""
        block = self.feedforward
        router = block.router_params(hidden) if isinstance(block, Experts) else 0
        return self.attention.num_other_params(hidden) + self.norms * hidden + router

    def _fixed_feedforward(self, hidden: int) -> int:
        block = self.feedforward
        if isinstance(block, Feedforward):
            return block.num_params(hidden)
        return block.router_params(hidden) + (block.shared.num_params(hidden) if block.shared else 0)

    def num_routed_params(self, hidden: int) -> int:
        """Of all routed experts together."""
        block = self.feedforward
        return block.num * block.each.num_params(hidden) if isinstance(block, Experts) else 0

    def num_active_routed_params(self, hidden: int) -> int:
        block = self.feedforward
        return block.top_k * block.each.num_params(hidden) if isinstance(block, Experts) else 0

    def num_touched_params(self, hidden: int, num_tokens: float) -> float:
        """That a pass over so many tokens reads, of a mixture the expected number."""
        block = self.feedforward
        coverage = block.coverage(num_tokens) if isinstance(block, Experts) else 0.0
        return self.num_fixed_params(hidden) + coverage * self.num_routed_params(hidden)


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes.

    tied: the output head is the input embedding. source: where the sizes are from.
    """

    name: str
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[Layer, ...]
    source: str = ""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def num_params(self) -> int:
        """All, a tied head counted once."""
        return self._outside_layers(embeddings=1 if self.tied else 2) + sum(
            count * layer.num_params(self.hidden) for layer, count in self.kinds
        )

    @cached_property
    def num_active_params(self) -> int:
        """That one token uses, both embeddings counted as published figures do."""
        routed = sum(count * layer.num_routed_params(self.hidden) for layer, count in self.kinds)
        active = sum(count * layer.num_active_routed_params(self.hidden) for layer, count in self.kinds)
        return self.num_params - routed + active

    @cached_property
    def num_matrix_params(self) -> int:
        """Active ones that a token is multiplied with: without the input embedding, which is only looked up."""
        return self.num_active_params - (0 if self.tied else self.embedding_params)

    def num_touched_params(self, num_tokens: float) -> float:
        """That one decode step of so many rollouts reads: the head, and of mixtures the experts that are touched."""
        return self._outside_layers(embeddings=1) + sum(
            count * layer.num_touched_params(self.hidden, num_tokens) for layer, count in self.kinds
        )

    @property
    def embedding_params(self) -> int:
        """Of one of the two embeddings."""
        return self.vocab * self.hidden

    def as_critic(self) -> ModelShape:
        """The same with one value for each token instead of logits."""
        return replace(self, name=f"{self.name} as critic", tied=True)

    @property
    def largest_matrix_params(self) -> int:
        """Of one tensor of a layer; a mixture's experts are tensors of their own."""
        blocks = [b for layer, _ in self.kinds for b in (layer.attention, *_blocks(layer))]
        return max(ins * outs for block in blocks for ins, outs in block.matrices(self.hidden).values())

    def largest_layer_params(self, expert: int = 1) -> float:
        """Of one layer with its routed experts divided among so many."""
        return max(
            layer.num_fixed_params(self.hidden) + layer.num_routed_params(self.hidden) / expert
            for layer, _ in self.kinds
        )

    @property
    def is_mixture(self) -> bool:
        return any(isinstance(layer.feedforward, Experts) for layer, _ in self.kinds)

    @property
    def num_linear_layers(self) -> int:
        """Of attention and feed-forward blocks, of a mixture every expert's."""
        return sum(count * _num_linear(layer, self.hidden) for layer, count in self.kinds)

    def _outside_layers(self, embeddings: int) -> int:
        return embeddings * self.embedding_params + self.hidden

    @cached_property
    def kinds(self) -> list[tuple[Layer, int]]:
        """Layers that are alike, and how many: a hundred layers are two or three kinds."""
        kinds: dict[Layer, int] = {}
        for layer in self.layers:
            kinds[layer] = kinds.get(layer, 0) + 1
        return list(kinds.items())

    # ---- what a cached token takes

    def kv_bytes(self, num_tokens: float, bytes_per_number: float = 2) -> float:
        """Of one sequence of so many tokens; layers with a window keep no more than that."""
        return bytes_per_number * sum(
            count * layer.attention.cached_numbers * _seen(layer, num_tokens) for layer, count in self.kinds
        )

    def kv_bytes_per_token(self, bytes_per_number: float = 2) -> float:
        """Of a token that no window has left out."""
        return self.kv_bytes(1, bytes_per_number)

    def marginal_kv_bytes(self, bytes_per_number: float = 2) -> float:
        """Of one more token once every window is full."""
        return bytes_per_number * sum(
            count * layer.attention.cached_numbers for layer, count in self.kinds if layer.attention.window is None
        )

    # ---- operations

    def attention_flops(self, context: float) -> float:
        """Of one new token that attends to `context` tokens, in all layers."""
        return sum(
            count * layer.attention.flops_per_cached_token * _seen(layer, context) for layer, count in self.kinds
        )

    def causal_attention_flops(self, num_tokens: float) -> float:
        """Of a whole sequence, each token seeing itself and those before it, but at most the window."""
        return sum(
            count * layer.attention.flops_per_cached_token * _seen_in_all(layer, num_tokens)
            for layer, count in self.kinds
        )

    # ---- what adapters of rank r add

    def adapter_params(self, rank: int) -> int:
        """LoRA on every linear layer of attention and feed-forward blocks, experts too: r (inputs + outputs) each."""
        return rank * sum(count * _ends(layer, self.hidden) for layer, count in self.kinds)


def _products(matrices: dict[str, tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices.values())


def _blocks(layer: Layer) -> list[Feedforward]:
    """One routed expert stands for all."""
    block = layer.feedforward
    if isinstance(block, Feedforward):
        return [block]
    return [block.each, *([block.shared] if block.shared else [])]


def _num_linear(layer: Layer, hidden: int) -> int:
    block = layer.feedforward
    num = len(layer.attention.matrices(hidden))
    if isinstance(block, Feedforward):
        return num + len(block.matrices(hidden))
    shared = len(block.shared.matrices(hidden)) if block.shared else 0
    return num + block.num * len(block.each.matrices(hidden)) + shared


def _ends(layer: Layer, hidden: int) -> int:
    block = layer.feedforward
    ends = _sums([layer.attention.matrices(hidden)])
    if isinstance(block, Feedforward):
        return ends + _sums([block.matrices(hidden)])
    shared = [block.shared.matrices(hidden)] if block.shared else []
    return ends + block.num * _sums([block.each.matrices(hidden)]) + _sums(shared)


def _sums(groups: Iterable[dict[str, tuple[int, int]]]) -> int:
    return sum(inputs + outputs for matrices in groups for inputs, outputs in matrices.values())


def _seen(layer: Layer, num_tokens: float) -> float:
    window = layer.attention.window
    return num_tokens if window is None else min(num_tokens, window)


def _seen_in_all(layer: Layer, num_tokens: float) -> float:
    """Pairs of query and key of a causal sequence of n tokens: n (n + 1) / 2, in a window w of them fewer."""
    full = num_tokens * (num_tokens + 1) / 2
    window = layer.attention.window
    if window is None or num_tokens <= window:
        return full
    beyond = num_tokens - window
    return full - beyond * (beyond + 1) / 2
