"""Bitwise parity: whether a row's bits are its own, with this model on this machine, is tried before it is promised.

Three rules make them so. Every matrix product has a multiple of so many rows (`TILES`), since those of a few rows take
other paths; attention sums in an order that follows from the rollout alone; everything else works row by row. Whether
the libraries of this machine keep to that is not ours to promise, so the policy is run in several companies and with
different numbers of threads, and with its weights laid out as an engine has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from headway.models.attention import PackedAttention, Segment
from headway.models.distribution import Shape, token_logprobs
from headway.types import UserError

if TYPE_CHECKING:
    from headway.models.policy import Policy

TILES = (4, 8, 16, 32, 64)
"""Numbers of rows that are tried, the smallest first."""

_LENGTHS = ([1], [5], [5, 1], [7, 5], [5, 37], [37, 5, 21, 64], [5, 90, 1, 33, 12, 7, 37], [37, *[9] * 30, 5])
"""Sequences of one pass each; the same sequence has the same ids everywhere."""


def bitwise(policy: Policy) -> Policy:
    """The policy with rows that have the same bits in any company. Raises UserError where that can't be had."""
    name = type(policy.model).__name__
    if policy.dtype != torch.float32:
        raise UserError(f"model.parity bitwise needs float32, and {name} is in {policy.dtype}: use model.parity close")
    if any(parameter.ndim > 2 for parameter in policy.model.parameters()):
        raise UserError(
            f"model.parity bitwise can't be had for {name}: it keeps experts in one tensor, and their products have "
            "as many rows as chance sends there; use model.parity close"
        )
    for tile in TILES:
        tried = replace(policy, parity="bitwise", head=replace(policy.head, row_tile=tile), may_pack=True)
        known: dict[int, torch.Tensor] = {}
        if _rows_are_their_own(tried, known):
            alike = _rows_are_their_own(tried.packed_up(), known)
            return replace(tried.unpacked(), may_pack=alike)
    raise UserError(
        f"model.parity bitwise can't be had for {name} on this machine: a row's bits depend on what it is computed "
        "with; use model.parity close"
    )


def _rows_are_their_own(policy: Policy, known: dict[int, torch.Tensor]) -> bool:
    """Whether a sequence's log-probs are the same bits in every pass, and with every number of threads.

    known: of sequences by their length, as far as they have been seen.
    """
    num_threads = torch.get_num_threads()
    try:
        for threads in sorted({1, max(1, num_threads // 2), num_threads}):
            torch.set_num_threads(threads)
            for lengths in _LENGTHS:
                lengths = [length for length in lengths if length <= policy.context_tokens]
                for length, logp_N in zip(lengths, _logprobs(policy, lengths), strict=True):
                    if not torch.equal(known.setdefault(length, logp_N), logp_N):
                        return False
    finally:
        torch.set_num_threads(num_threads)
    return True


@torch.no_grad()
def _logprobs(policy: Policy, lengths: Sequence[int]) -> Iterator[torch.Tensor]:
    starts = [0, *accumulate(lengths)]
    vocabulary = policy.head.weight_VD.shape[0]
    ids_T = torch.cat([_ids(length, vocabulary) for length in lengths]).to(policy.device)
    positions_T = torch.cat([torch.arange(length) for length in lengths]).to(policy.device)
    segments = [Segment(start, length) for start, length in zip(starts, lengths, strict=False)]
    plan = PackedAttention(segments, policy.device, fixed_order=True)
    hidden_TD = policy.hidden(ids_T, positions_T, plan)
    logp_T, _ = token_logprobs(policy.head, hidden_TD, ids_T, Shape())
    return iter(logp_T.split(list(lengths)))


def _ids(length: int, vocabulary: int) -> torch.Tensor:
    return (torch.arange(length) * 7919 + length * 104_729) % vocabulary
