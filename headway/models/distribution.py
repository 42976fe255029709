"""From hidden states to effective log-probs: the only place where the policy's distribution is computed.

Engine, trainer, evaluation and metrics all call this, so temperature, penalty, kept set, head precision and the
architecture's own logit transform can't be applied on one side and forgotten on the other.

A distribution is made in this order: logits of the architecture; the repetition penalty of what the context holds
already; temperature; the kept set (top-k, of what is left top-p, of what is left min-p); and what is kept is
renormalised.

Axes: N rows, D hidden size, V vocabulary, P pieces of the vocabulary, C ids of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from headway.models.products import Packed, filled, product

CHUNK_ELEMENTS = 8_000_000
"""Logits that exist at one time: 32 MB in float32, the most that the C library keeps at hand when it is freed."""

KEPT_ELEMENTS = 64_000_000
"""Probabilities that a forward pass keeps for its backward pass, 256 MB; of more they are computed again, in chunks."""

PIECE = 256
"""Ids whose probabilities are summed at a time, first of all: the order is a row's own, whatever its company."""

LEAST = -1e30
"""A logit whose probability is exactly 0, and which times 0 is still 0."""


@dataclass(frozen=True)
class Head:
    """The LM head with its architecture's logit transform: softcap(scale * (W h + b)).

    `weight_VD` is the model's own parameter, never a copy, so an update in place is seen at once. row_tile: products
    are of a multiple of so many rows. packed: the weights laid out for many products, if they are.
    """

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    row_tile: int = 1
    packed: Packed | None = None

    @staticmethod
    def of(model: Any) -> Head:
        """The head of a Hugging Face causal LM. Transforms are read off its configuration: `logit_scale` (Cohere),
        `logits_scaling` (Granite), `final_logit_softcapping` (Gemma); `policy.load_policy` compares the result with the
        model's own forward."""
        head, config = model.get_output_embeddings(), model.config
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        return Head(head.weight, getattr(head, "bias", None), scale, getattr(config, "final_logit_softcapping", None))

    def packed_up(self) -> Head:
        """The same, with its weights laid out for many products; again after every change of them."""
        return replace(self, packed=Packed([self.weight_VD], [self.bias_V]))

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, V] in float32, whatever the dtype of the hidden states: bf16 logits near 20 are 0.125 apart.

        N is what was given, filled up (`products.filled`).
        """
        if filler := filled(len(hidden_ND), self.row_tile) - len(hidden_ND):
            hidden_ND = F.pad(hidden_ND, (0, 0, 0, filler))
        with torch.autocast(hidden_ND.device.type, enabled=False):
            logits_NV = self._product(hidden_ND.float())
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        return logits_NV

    def _product(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        if self.packed is not None and (logits_NV := self.packed.product(hidden_ND)) is not None:
            return logits_NV
        return product(hidden_ND, self.weight_VD.float(), None if self.bias_V is None else self.bias_V.float())


@dataclass(frozen=True)
class Shape:
    """What makes the distribution of the logits, besides a kept set.

    temperature: 0 is greedy, which only a sampler can be; repetition_penalty: a logit of an id that the context holds
    is divided by it where positive, multiplied where negative (Keskar et al. 2019); 1 is none.
    """

    temperature: float = 1.0
    repetition_penalty: float = 1.0


def logprobs(head: Head, hidden_ND: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs of the whole vocabulary [N, V] at `temperature` > 0."""
    return torch.log_softmax(head.logits(hidden_ND)[: len(hidden_ND)] / temperature, dim=-1)


@dataclass(frozen=True)
class Conditions:
    """What rows N are conditioned on, besides their hidden states; None stands for nothing.

    seen: ids that the context of each row holds, for a repetition penalty. kept: the ids among which each row's token
    was drawn; None for a row that kept all.
    """

    seen: Sequence[torch.Tensor] | None = None
    kept: Sequence[Sequence[int] | None] | None = None

    def of_rows(self, rows: slice) -> Conditions:
        return Conditions(self.seen and self.seen[rows], self.kept and self.kept[rows])

    def dropped_NV(self, num_rows: int, like_NV: torch.Tensor) -> torch.Tensor | None:
        """True for ids that are not kept; None where all are."""
        if self.kept is None or all(ids is None for ids in self.kept):
            return None
        dropped_NV = torch.zeros_like(like_NV, dtype=torch.bool)
        for row, ids in enumerate(self.kept):
            if ids is not None:
                dropped_NV[row] = True
                dropped_NV[row, torch.as_tensor(ids, device=like_NV.device).long()] = False
        return dropped_NV


def _shaped(logits_NV: torch.Tensor, shape: Shape, conditions: Conditions) -> torch.Tensor:
    """Logits of the effective distribution; `LEAST` for what is not kept."""
    if shape.repetition_penalty != 1.0:
        assert conditions.seen is not None, "a repetition penalty needs the ids of each row's context"
        logits_NV = _penalised(logits_NV, conditions.seen, shape.repetition_penalty)
    if shape.temperature != 1.0:  # a tensor, as in `sample`: on a GPU, by a number is times its inverse
        logits_NV = logits_NV / logits_NV.new_tensor(shape.temperature)
    dropped_NV = conditions.dropped_NV(len(logits_NV), logits_NV)
    return logits_NV if dropped_NV is None else logits_NV.masked_fill(dropped_NV, LEAST)


def _penalised(logits_NV: torch.Tensor, seen: Sequence[torch.Tensor], penalty: float) -> torch.Tensor:
    is_seen_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
    for row, ids in enumerate(seen):
        is_seen_NV[row, ids] = True
    penalised_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
    return torch.where(is_seen_NV, penalised_NV, logits_NV)


def token_logprobs(
    head: Head,
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    shape: Shape,
    conditions: Conditions | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each row's target and the entropy of its distribution (without gradient), both [N] in float32.

    Where they are many, rows are taken in chunks, and a chunk's logits are computed again in the backward pass, so the
    logits of all rows never exist at once.
    """
    conditions = conditions or Conditions()
    vocabulary = head.weight_VD.shape[0]
    if not len(targets_N):
        empty_N = hidden_ND.new_zeros(0, dtype=torch.float32)
        return empty_N, empty_N
    if torch.is_grad_enabled() and len(targets_N) * vocabulary <= KEPT_ELEMENTS:
        return _chunk(head, hidden_ND, targets_N, shape, conditions, keep=True)
    rows = max(1, CHUNK_ELEMENTS // vocabulary // head.row_tile) * head.row_tile
    parts = []
    for first in range(0, len(targets_N), rows):
        chunk = slice(first, first + rows)
        parts.append(_chunk(head, hidden_ND[chunk], targets_N[chunk], shape, conditions.of_rows(chunk)))
    logp, entropy = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropy)


def _chunk(
    head: Head,
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    shape: Shape,
    conditions: Conditions,
    *,
    keep: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """keep: what the backward pass needs stays; otherwise it is computed again."""

    def compute(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        now = Head(weight_VD, head.bias_V, head.scale, head.softcap, head.row_tile, head.packed)
        logits_NV = _shaped(now.logits(hidden_ND), shape, conditions)
        filled_N = F.pad(targets_N, (0, len(logits_NV) - len(targets_N)))
        logp_N, entropy_N = _OfTargets.apply(logits_NV, filled_N)
        return logp_N[: len(targets_N)], entropy_N[: len(targets_N)]

    if keep or not torch.is_grad_enabled():
        return compute(hidden_ND, head.weight_VD)
    return checkpoint(compute, hidden_ND, head.weight_VD, use_reentrant=False, preserve_rng_state=False)


class _OfTargets(torch.autograd.Function):
    """Logits [N, V], targets [N] -> their log-probs, and the entropies, which have no gradient.

    d log p(target) / d logits = onehot(target) - p.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        max_N1 = logits_NV.amax(-1, keepdim=True)
        shifted_NV = (logits_NV - max_N1).clamp_min_(LEAST)  # minus infinity times 0 is not a number
        spread = Spread.summed(max_N1, shifted_NV.exp())
        logp_N = spread.logprobs(logits_NV, targets_N)
        ctx.save_for_backward(spread.unnormalised_NV, targets_N, spread.total_N)
        mean_N = torch.bmm(spread.unnormalised_NV[:, None], shifted_NV[:, :, None])[:, 0, 0] / spread.total_N
        entropy_N = spread.total_N.log() - mean_N
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        unnormalised_NV, targets_N, total_N = ctx.saved_tensors
        grad_NV = unnormalised_NV * (-grads[0] / total_N)[:, None]
        grad_NV.scatter_add_(1, targets_N[:, None], grads[0][:, None])
        return grad_NV, None


@dataclass(frozen=True)
class Spread:
    """A softmax before it is normalised: `unnormalised_NV` = exp(logits - max), and its sums by piece and in all.

    piece_NP are double: what is drawn is looked up in them, first the piece, then the id in it.
    """

    max_N1: torch.Tensor
    unnormalised_NV: torch.Tensor
    piece_NP: torch.Tensor
    total_N: torch.Tensor

    @staticmethod
    def of(logits_NV: torch.Tensor) -> Spread:
        max_N1 = logits_NV.amax(-1, keepdim=True)
        return Spread.summed(max_N1, (logits_NV - max_N1).exp_())

    @staticmethod
    def summed(max_N1: torch.Tensor, unnormalised_NV: torch.Tensor) -> Spread:
        piece_NP = _pieces(unnormalised_NV).sum(-1).double()
        return Spread(max_N1, unnormalised_NV, piece_NP, piece_NP.sum(-1).float())

    def logprobs(self, logits_NV: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
        """Of one id per row."""
        chosen_N = logits_NV.gather(-1, tokens_N[:, None])[:, 0]
        return (chosen_N - self.max_N1[:, 0]) - self.total_N.log()

    def draw(self, uniform_N: torch.Tensor) -> torch.Tensor:
        """The id where a uniform number in [0, 1) falls in each row's cumulative distribution; never one of
        probability 0.
        """
        cumulative_NP = self.piece_NP.cumsum(-1)
        threshold_N1 = uniform_N[:, None] * cumulative_NP[:, -1:]
        piece_N1 = _first_above(cumulative_NP, threshold_N1, self.piece_NP)
        before_N1 = (cumulative_NP - self.piece_NP).gather(1, piece_N1)
        ids_NC = _pieces(self.unnormalised_NV)[torch.arange(len(piece_N1), device=piece_N1.device), piece_N1[:, 0]]
        within_NC = ids_NC.double()
        rest_N1 = (threshold_N1 - before_N1).clamp_min(0)  # rounding can bring it below
        place_N1 = _first_above(within_NC.cumsum(-1), rest_N1, within_NC)
        return (piece_N1 * PIECE + place_N1)[:, 0]


def _pieces(values_NV: torch.Tensor) -> torch.Tensor:
    """[N, P, C], filled up with zeros."""
    if filler := -values_NV.shape[1] % PIECE:
        values_NV = F.pad(values_NV, (0, filler))
    return values_NV.view(len(values_NV), -1, PIECE)


def _first_above(cumulative: torch.Tensor, threshold: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The first place whose cumulative weight exceeds the threshold; the last one that has a weight, if none does,
    which rounding can bring about.
    """
    place = torch.searchsorted(cumulative, threshold, right=True)
    places = torch.arange(weight.shape[1], device=weight.device)
    last = torch.where(weight > 0, places, 0).amax(-1, keepdim=True)
    return torch.minimum(place, last)


@dataclass(frozen=True)
class Truncation:
    """Which ids are kept, of those that temperature and penalty have left: at most the `top_k` most likely (0: all);
    of what that leaves the fewest that together have `top_p` of it; of what that leaves those at least `min_p` times as
    likely as the most likely one. The most likely one is always kept; of equally likely ones all or none by top_k and
    min_p, and by top_p those with the lower id first.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def keeps_all(self) -> bool:
        return self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0

    def dropped(self, logits_V: torch.Tensor) -> torch.Tensor:
        """True for ids that are not kept, of one row's shaped logits."""
        candidates_C = self._most_likely(logits_V)
        dropped_V = torch.ones_like(logits_V, dtype=torch.bool)
        dropped_V[candidates_C] = False
        if self.top_p < 1.0:
            ids_C = candidates_C[torch.argsort(logits_V[candidates_C], descending=True, stable=True)]
            probability_C = torch.softmax(logits_V[ids_C].double(), -1)
            before_C = probability_C.cumsum(-1) - probability_C
            dropped_V[ids_C[(before_C >= self.top_p) & (torch.arange(len(ids_C), device=ids_C.device) > 0)]] = True
        if self.min_p > 0.0:
            dropped_V |= torch.exp((logits_V - logits_V.max()).double()) < self.min_p
        return dropped_V

    def _most_likely(self, logits_V: torch.Tensor) -> torch.Tensor:
        """Ids in ascending order; what is not a number is among them, so that it comes to light."""
        if self.top_k == 0 or self.top_k >= len(logits_V):
            return torch.arange(len(logits_V), device=logits_V.device)
        threshold = logits_V.topk(self.top_k).values[-1]
        return (~(logits_V < threshold)).nonzero()[:, 0]


@dataclass(frozen=True)
class Drawn:
    """One token per row, its log-prob under the distribution it was drawn from, and the ids kept (None: all)."""

    tokens: list[int]
    logprobs: list[float]
    kept: list[torch.Tensor | None]


def sample(
    head: Head,
    hidden_ND: torch.Tensor,
    uniform_N: torch.Tensor,
    shapes: Sequence[Shape],
    truncations: Sequence[Truncation] | None = None,
    seen: Sequence[torch.Tensor | None] = (),
) -> Drawn:
    """uniform_N: float64 in [0, 1), one per row; the token is where it falls in the cumulative distribution.

    shapes, truncations (None: all is kept), seen (for rows with a repetition penalty): by row. Temperature 0 takes the
    most likely token, whose log-prob is then 0. Logits that are nan give log-prob nan.
    """
    num_rows = len(hidden_ND)
    logits_NV = head.logits(hidden_ND)
    greedy = [shape.temperature == 0 for shape in shapes]
    divisors = [shape.temperature or 1.0 for shape in shapes] + [1.0] * (len(logits_NV) - num_rows)
    for row, shape in enumerate(shapes):
        if shape.repetition_penalty != 1.0:
            ids = seen[row]
            assert ids is not None, "a penalty needs the ids of the context"
            logits_NV[row : row + 1] = _penalised(logits_NV[row : row + 1], [ids], shape.repetition_penalty)
    if any(divisor != 1.0 for divisor in divisors):
        logits_NV /= torch.tensor(divisors, device=logits_NV.device)[:, None]
    kept: list[torch.Tensor | None] = [None] * num_rows
    for row, truncation in enumerate(truncations or ()):
        if not (truncation.keeps_all or greedy[row]):
            dropped_V = truncation.dropped(logits_NV[row])
            logits_NV[row].masked_fill_(dropped_V, LEAST)
            kept[row] = (~dropped_V).nonzero()[:, 0]
    spread = Spread.of(logits_NV)
    tokens_N = spread.draw(F.pad(uniform_N, (0, len(logits_NV) - num_rows)))
    if any(greedy):
        greedy_N = torch.tensor(greedy + [False] * (len(logits_NV) - num_rows), device=logits_NV.device)
        tokens_N = torch.where(greedy_N, logits_NV.argmax(-1), tokens_N)
        logp_N = spread.logprobs(logits_NV, tokens_N)
        logp_N = torch.where(greedy_N & ~logp_N.isnan(), 0.0, logp_N)
    else:
        logp_N = spread.logprobs(logits_NV, tokens_N)
    return Drawn(tokens_N[:num_rows].tolist(), logp_N[:num_rows].tolist(), kept)
