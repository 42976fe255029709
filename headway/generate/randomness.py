"""Uniform numbers keyed by identity: token t of a rollout has the same one whenever and wherever it is sampled.

There is no generator state: the number is a hash of (run seed, prompt uid, epoch, member, turn) and t. A schedule
therefore changes *when* a rollout happens, not *what* is drawn under given weights.
"""

from __future__ import annotations

import hashlib

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def stream_key(*identity: int | str) -> int:
    """The stream's 64-bit key. Parts are length-prefixed, so ("a", "bc") and ("ab", "c") differ."""
    text = "".join(f"{type(part).__name__}{len(str(part))}:{part}" for part in identity)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def uniforms(keys_N: torch.Tensor, counters_N: torch.Tensor) -> torch.Tensor:
    """float64 in [0, 1): the SplitMix64 output (Steele, Lea and Flood, 2014) of each stream at its counter.

    keys_N, counters_N: int64; their arithmetic wraps, as SplitMix64's does.
    """
    state_N = keys_N + (counters_N + 1) * _signed(_GOLDEN)
    state_N = (state_N ^ _shift_right(state_N, 30)) * _signed(_MIX1)
    state_N = (state_N ^ _shift_right(state_N, 27)) * _signed(_MIX2)
    state_N = state_N ^ _shift_right(state_N, 31)
    return _shift_right(state_N, 11).double() * 2.0**-53


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(values_N: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift: int64 shifts by copying the sign, which is masked off."""
    return (values_N >> bits) & ((1 << (64 - bits)) - 1)
