"""Parts of a batch's trained tokens: by source of mismatch, by lag, by position in the response.

Axis: N tokens, flat.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

FIRST_POSITION_BUCKET = 16
"""Buckets of position are 0..15, 16..31, 32..63, 64..127 and so on, doubling."""


def buckets(lag_N: Tensor, position_N: Tensor, rollout_N: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Name and tokens (bool) of every part that has any: `numerics`, `stale_cache`, `staleness`, `lag_L`,
    `position_A_B`. position_N: nan where positions are not known, and then there are none by position.
    """
    yield from _sources(lag_N, rollout_N)
    for lag in lag_N.unique().long().tolist():
        yield f"lag_{lag}", lag_N == lag
    yield from _positions(position_N)


def _sources(lag_N: Tensor, rollout_N: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Where a mismatch can come from, as far as versions tell: no token is put down to a cause that is not sure."""
    _, place_N = rollout_N.unique(return_inverse=True)
    oldest_R = lag_N.new_zeros(int(place_N.max()) + 1).scatter_reduce(0, place_N, lag_N, "amax")
    newest_N = lag_N == 0
    for name, inside_N in (
        ("numerics", oldest_R[place_N] == 0),
        ("stale_cache", newest_N & (oldest_R[place_N] > 0)),
        ("staleness", ~newest_N),
    ):
        if inside_N.any():
            yield name, inside_N


def _positions(position_N: Tensor) -> Iterator[tuple[str, Tensor]]:
    if position_N.isnan().any():
        return
    start, end = 0, FIRST_POSITION_BUCKET
    while start <= int(position_N.max()):
        inside_N = (position_N >= start) & (position_N < end)
        if inside_N.any():
            yield f"position_{start}_{end - 1}", inside_N
        start, end = end, 2 * end
