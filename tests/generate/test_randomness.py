"""Numbers keyed by identity, against SplitMix64 in plain integers."""

from __future__ import annotations

import itertools

import pytest
import torch

from headway.generate.randomness import stream_key, uniforms

MASK = (1 << 64) - 1


def splitmix64(seed: int) -> list[int]:
    """The first outputs of the published generator, in Python's unbounded integers."""
    state, outputs = seed & MASK, []
    for _ in range(64):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(mixed ^ (mixed >> 31))
    return outputs


def stream(key: int, num: int) -> list[float]:
    return uniforms(torch.full((num,), key), torch.arange(num)).tolist()


def test_published_outputs():
    """Those of seed 1234567, as printed by many implementations."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix64(1234567)[:4] == published
    assert stream(1234567, 4) == [(output >> 11) / 2**53 for output in published]


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), stream_key(0, "prompt", 0, 0, 0)])
def test_every_key_gives_the_stream_of_plain_integers(key):
    assert stream(key, 64) == [(output >> 11) / 2**53 for output in splitmix64(key)]


def test_a_number_does_not_depend_on_its_batch():
    keys = [stream_key(member) for member in range(8)]
    table = [stream(key, 32) for key in keys]
    for key, row in zip(keys, table, strict=True):
        assert uniforms(torch.tensor([key]), torch.tensor([17])).item() == row[17]
    together = uniforms(torch.tensor(keys), torch.arange(8) * 3)
    assert together.tolist() == [row[3 * place] for place, row in enumerate(table)]


IDENTITY = (7, "prompt-1", 0, 3, 0)


@pytest.mark.parametrize("part", range(5), ids=["seed", "prompt", "epoch", "member", "turn"])
def test_every_part_of_an_identity_counts(part):
    other = list(IDENTITY)
    other[part] = other[part] + 1 if isinstance(other[part], int) else "prompt-2"
    assert stream_key(*other) != stream_key(*IDENTITY)
    assert not set(stream(stream_key(*other), 32)) & set(stream(stream_key(*IDENTITY), 32))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "bc"), ("ab", "c")),
        ((1, 23), (12, 3)),
        ((1,), ("1",)),
        ((0, 1), (1, 0)),
        (("a",), ("a", "")),
        ((-1,), (1,)),
    ],
)
def test_identities_that_read_alike_have_different_keys(one, other):
    assert stream_key(*one) != stream_key(*other)


def test_many_identities_have_different_keys():
    identities = itertools.product(range(2), (f"addition-{n}" for n in range(50)), range(2), range(8), range(2))
    keys = [stream_key(*identity) for identity in identities]
    assert len(set(keys)) == len(keys)


def test_keys_are_the_same_in_every_process():
    assert stream_key(*IDENTITY) == -7963038871043250007


def test_numbers_are_uniform_along_a_stream_and_across_streams():
    along = uniforms(torch.full((40_000,), stream_key("s")), torch.arange(40_000))
    across = uniforms(torch.tensor([stream_key(0, "p", 0, n, 0) for n in range(40_000)]), torch.zeros(40_000).long())
    for numbers in (along, across):
        assert numbers.dtype == torch.float64
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = torch.histc(numbers, bins=20, min=0, max=1)
        assert ((counts - 2000).abs() < 5 * 2000**0.5).all()
    neighbours = torch.corrcoef(torch.stack([along[:-1], along[1:]]))[0, 1]
    assert abs(neighbours.item()) < 0.02
