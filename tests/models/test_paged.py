"""Keys and values in blocks: every schedule of a sequence's rows gives what one pass over all of it gives."""

from __future__ import annotations

import os
import random
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from headway.models import paged
from headway.models.attention import BLOCK, PackedAttention, Segment
from headway.models.paged import Blocks, CachedPass, KeyValuePool, LayerShape, Stretch, block_bytes, num_blocks_for
from headway.models.policy import Policy
from headway.types import UserError
from tests import tiny
from tests.tiny import make_policy, random_ids

CPU = torch.device("cpu")


def make_pool(
    shapes: Sequence[LayerShape], num_blocks: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> KeyValuePool:
    pool = KeyValuePool(shapes, num_blocks, dtype, device)
    pool.allocate()
    return pool


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- which blocks are free


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (BLOCK, 1), (BLOCK + 1, 2), (3 * BLOCK, 3)])
def test_blocks_for_tokens(tokens, expected):
    assert num_blocks_for(tokens) == expected


def test_the_lowest_and_the_highest_free_block_are_taken():
    blocks = Blocks(5)
    assert [blocks.take(), blocks.take(high=True), blocks.take(), blocks.take(high=True)] == [0, 4, 1, 3]
    blocks.give_back([4, 0])
    assert blocks.num_free == 3
    assert [blocks.take(high=True), blocks.take(high=True), blocks.take(high=True)] == [4, 2, 0]
    with pytest.raises(AssertionError, match="no block is free"):
        blocks.take()


@pytest.mark.parametrize("seed", range(5))
def test_no_block_is_handed_out_twice_and_none_is_lost(seed):
    chance, blocks = random.Random(seed), Blocks(40)
    held: set[int] = set()
    for _ in range(2000):
        if held and (chance.random() < 0.5 or not blocks.num_free):
            given = chance.sample(sorted(held), chance.randint(1, len(held)))
            blocks.give_back(given)
            held -= set(given)
        else:
            high, free = chance.random() < 0.5, set(range(40)) - held
            number = blocks.take(high=high)
            assert number == (max(free) if high else min(free))
            held.add(number)
        assert blocks.num_free == 40 - len(held)


@pytest.mark.parametrize(
    ("given", "message"),
    [([1, 1], "block 1 is free already"), ([3], "block 3 is free already"), ([5], "no block 5"), ([-1], "no block -1")],
    ids=["twice at once", "never taken", "too high", "negative"],
)
def test_what_was_not_taken_is_not_taken_back(given, message):
    blocks = Blocks(5)
    for _ in range(3):
        blocks.take()
    with pytest.raises(AssertionError, match=message):
        blocks.give_back(given)


def test_handing_out_blocks_for_ever_takes_no_memory():
    blocks = Blocks(64)
    tracemalloc.start()
    try:
        for _ in range(20_000):
            blocks.give_back([blocks.take(), blocks.take(high=True)])
        current, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert current < 10_000


# ---- the storage


TWO_LAYERS = (LayerShape(2, 8, 4), LayerShape(1, 16, 16))


def test_the_bytes_of_a_block():
    """(2 heads of 8 + 4, 1 head of 16 + 16) numbers for each of 32 tokens."""
    assert block_bytes(TWO_LAYERS, torch.float32) == (2 * 12 + 32) * 32 * 4
    assert block_bytes(TWO_LAYERS, torch.bfloat16) == (2 * 12 + 32) * 32 * 2
    pool = KeyValuePool(TWO_LAYERS, 10, torch.bfloat16, CPU)
    assert pool.num_bytes == 10 * pool.block_bytes == 10 * 3584


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_storage_is_made_of_zeros_and_has_the_shapes_of_the_layers(dtype):
    pool = make_pool(TWO_LAYERS, 3, dtype)
    assert [(tuple(keys.shape), tuple(values.shape)) for keys, values in pool.layers] == [
        ((3, 2, BLOCK, 8), (3, 2, BLOCK, 4)),
        ((3, 1, BLOCK, 16), (3, 1, BLOCK, 16)),
    ]
    assert {tensor.dtype for pair in pool.layers for tensor in pair} == {dtype}
    assert not any(tensor.any() for pair in pool.layers for tensor in pair)


def test_allocating_again_keeps_what_is_there_and_releasing_forgets_it():
    pool = make_pool(TWO_LAYERS, 3)
    pool.layers[0][0].fill_(7.0)
    pool.allocate()
    assert (pool.layers[0][0] == 7.0).all()
    pool.release()
    assert pool.layers == []
    pool.allocate()
    assert not pool.layers[0][0].any()


def write_a_quarter(pool: KeyValuePool) -> None:
    for pair in pool.layers:
        for tensor in pair:
            tensor[: pool.blocks.total // 4] = 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of the process from /proc")
def test_memory_is_taken_by_what_is_written_and_given_back_on_release():
    """256 MiB, of which a quarter is written; and 1 TiB that is only described."""
    KeyValuePool([LayerShape(1, 512, 512)], 2**23, torch.float32, CPU)
    pool = KeyValuePool([LayerShape(4, 128, 128)] * 2, 1024, torch.float32, CPU)
    assert pool.num_bytes == 2**28
    before = resident_bytes()
    pool.allocate()
    allocated = resident_bytes()
    write_a_quarter(pool)
    written = resident_bytes()
    pool.release()
    released = resident_bytes()
    assert allocated - before < 2**23
    assert 0.9 * 2**26 < written - allocated < 1.3 * 2**26
    assert released - before < 2**23


def sized(num_bytes: int | None, *, num_sequences: int = 3, longest: int = 100) -> KeyValuePool:
    return KeyValuePool.sized(
        TWO_LAYERS, torch.float32, CPU, num_sequences=num_sequences, longest=longest, num_bytes=num_bytes
    )


def test_a_budget_in_bytes_is_never_exceeded():
    block = block_bytes(TWO_LAYERS, torch.float32)
    for num_bytes, blocks in ((2 * block, 2), (3 * block - 1, 2), (3 * block, 3), (1000 * block + 5, 1000)):
        assert sized(num_bytes).blocks.total == blocks


@pytest.mark.parametrize("num_bytes", [0, 1, 2 * 7168 - 1])
def test_a_budget_without_room_for_two_blocks_is_refused(num_bytes):
    with pytest.raises(UserError) as caught:
        sized(num_bytes)
    assert str(caught.value) == (
        f"generate.cache_bytes is {num_bytes}, and a block of 32 tokens takes 7168 with this model: give at least 14336"
    )


@pytest.mark.parametrize(
    ("free_blocks", "expected"),
    [(10_000, 15), (61, 15), (40, 10), (8, 2), (7, 2), (0, 2)],
    ids=["plenty", "just enough", "a quarter of it", "two blocks", "less", "nothing"],
)
def test_by_default_all_sequences_fit_within_a_quarter_of_what_is_free(free_blocks, expected, monkeypatch):
    """Three of 100 tokens: four blocks each, and one, since prompt and answer are filled up apart."""
    monkeypatch.setattr(paged, "free_memory_bytes", lambda device: free_blocks * 7168)
    assert sized(None).blocks.total == expected


def test_free_memory_is_some_of_the_machines():
    assert 2**20 < paged.free_memory_bytes(CPU) < 2**50


# ---- any schedule is one pass over everything


@dataclass(eq=False)
class Part:
    """Rows [start, start + length) of all, after those of `prompt`; `blocks` are taken as it grows."""

    start: int
    length: int
    prompt: Part | None = None
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    num_readers: int = 0

    @property
    def may_go_on(self) -> bool:
        return self.cached < self.length and (self.prompt is None or self.prompt.cached == self.prompt.length)

    def stretch(self, num_rows: int, pool: KeyValuePool, *, high: bool) -> Stretch:
        while len(self.blocks) < num_blocks_for(self.cached + num_rows):
            self.blocks.append(pool.blocks.take(high=high))
        if self.prompt is None:
            return Stretch(self.cached, num_rows, list(self.blocks))
        return Stretch(self.cached, num_rows, list(self.blocks), list(self.prompt.blocks), self.prompt.length)


@dataclass
class Schedule:
    """Random numbers decide who gets how many rows in which pass, and where blocks lie.

    groups: answers to each prompt: how many at least and at most, or how many to each of so many; scatter: blocks
    come from both ends, with holes between them; in_step: all of them take part in every pass, with one row each.
    """

    seed: int
    shape: LayerShape
    ratio: int
    groups: tuple[int, ...] = (1, 4)
    scatter: bool = False
    in_step: bool = False
    fixed_order: bool = True
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._sequences: list[Part] = []
        sizes = self.groups
        if len(self.groups) == 2:
            sizes = tuple(self._chance.randint(*self.groups) for _ in range(self._chance.randint(1, 4)))
        for size in sizes:
            prompt = self._grow(self._chance.choice([1, 5, BLOCK, BLOCK + 1, self._chance.randint(1, 80)]), None)
            for _ in range(size):
                self._grow(self._chance.choice([1, 2, BLOCK, self._chance.randint(1, 90)]), prompt)
        num_rows = sum(sequence.length for sequence in self._sequences)
        numbers, (G, key_size, value_size) = torch.Generator().manual_seed(self.seed), self._sizes
        self.query_HTD = torch.randn(G * self.ratio, num_rows, key_size, generator=numbers)
        self.key_GTD = torch.randn(G, num_rows, key_size, generator=numbers) * 2
        self.value_GTD = torch.randn(G, num_rows, value_size, generator=numbers)
        self.scale = key_size**-0.5

    def move_to(self, device: torch.device) -> None:
        self.query_HTD, self.key_GTD, self.value_GTD = (
            tensor.to(device) for tensor in (self.query_HTD, self.key_GTD, self.value_GTD)
        )

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.shape.num_heads, self.shape.key_size, self.shape.value_size

    def _grow(self, length: int, prompt: Part | None) -> Part:
        start = sum(sequence.length for sequence in self._sequences)
        self._sequences.append(Part(start, length, prompt))
        if prompt:
            prompt.num_readers += 1
        return self._sequences[-1]

    def at_once(self) -> torch.Tensor:
        segments = [
            Segment(one.start, one.length, one.prompt.start, one.prompt.length)
            if one.prompt
            else Segment(one.start, one.length)
            for one in self._sequences
        ]
        plan = PackedAttention(segments, self.query_HTD.device, fixed_order=self.fixed_order)
        return plan.attend(0, self.query_HTD, self.key_GTD, self.value_GTD, self.scale)

    def in_passes(self) -> torch.Tensor:
        """Blocks hold what others left; those of answers that are over are handed out again."""
        pool = make_pool([self.shape], 200, self.dtype, self.query_HTD.device)
        for tensor in pool.layers[0]:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) * 30)
        holes = [pool.blocks.take(high=bool(number % 2)) for number in range(60)] if self.scatter else []
        pool.blocks.give_back(self._chance.sample(holes, len(holes) // 3))
        outputs = self.query_HTD.new_empty(self.query_HTD.shape[1], self.query_HTD.shape[0], self.shape.value_size)
        while going := [sequence for sequence in self._sequences if sequence.may_go_on]:
            chosen = self._chance.sample(going, len(going) if self.in_step else self._chance.randint(1, len(going)))
            self._one_pass(pool, chosen, outputs)
            for sequence in chosen:
                self._give_back_if_over(pool, sequence)
        return outputs

    def _one_pass(self, pool: KeyValuePool, chosen: Sequence[Part], outputs: torch.Tensor) -> None:
        work = []
        for sequence in chosen:
            left = sequence.length - sequence.cached
            single = self.in_step if sequence.prompt else self._chance.random() < 0.3
            num = min(left, 1 if single or self._chance.random() < 0.6 else self._chance.randint(1, 50))
            high = self._chance.random() < 0.5 if self.scatter else sequence.prompt is None
            work.append((sequence.start + sequence.cached, sequence.stretch(num, pool, high=high)))
            sequence.cached += num
        work.sort(key=lambda one: not one[1].is_single)
        rows = torch.tensor([row for first, stretch in work for row in range(first, first + stretch.num_rows)])
        plan = CachedPass(pool, [stretch for _, stretch in work], fixed_order=self.fixed_order)
        assert plan.num_rows == len(rows)
        query, key, value = (x[:, rows].to(self.dtype) for x in (self.query_HTD, self.key_GTD, self.value_GTD))
        outputs[rows] = plan.attend(0, query, key, value, self.scale).float()

    def _give_back_if_over(self, pool: KeyValuePool, sequence: Part) -> None:
        if sequence.prompt is None or sequence.cached < sequence.length:
            return
        pool.blocks.give_back(sequence.blocks)
        sequence.prompt.num_readers -= 1
        if not sequence.prompt.num_readers:
            pool.blocks.give_back(sequence.prompt.blocks)


SHAPES = [
    (LayerShape(3, 64, 64), 3),
    (LayerShape(2, 8, 8), 2),
    (LayerShape(1, 16, 16), 4),
    (LayerShape(4, 32, 32), 1),
    (LayerShape(2, 12, 8), 5),
    (LayerShape(1, 24, 40), 8),
]
"""Layers, and query heads to each of their key heads; keys and values may differ in size."""

every_shape = pytest.mark.parametrize(("shape", "ratio"), SHAPES, ids=str)
every_layout = pytest.mark.parametrize(
    "layout",
    [
        {"groups": (1, 1)},
        {"groups": (3, 5)},
        {"groups": (3, 5), "in_step": True},
        {"groups": (3, *[1] * 9), "in_step": True},
        {"groups": (1,) * 12, "in_step": True},
        {"groups": (1, 4), "scatter": True},
    ],
    ids=["alone", "groups", "in step", "few share a prompt", "many alone", "scattered"],
)


@every_shape
@every_layout
def test_with_a_fixed_order_every_schedule_gives_the_bits_of_one_pass(shape, ratio, layout):
    for seed in range(4):
        schedule = Schedule(seed, shape, ratio, **layout)
        assert torch.equal(schedule.in_passes(), schedule.at_once()), seed


@every_shape
@every_layout
def test_in_any_order_every_schedule_gives_what_one_pass_gives(shape, ratio, layout):
    for seed in range(2):
        schedule = Schedule(seed, shape, ratio, **layout, fixed_order=False)
        torch.testing.assert_close(schedule.in_passes(), schedule.at_once(), atol=1e-5, rtol=1e-5)


def test_a_cache_in_bfloat16_is_as_near_as_its_numbers():
    for seed in range(4):
        schedule = Schedule(seed, LayerShape(2, 16, 16), 2, fixed_order=False, dtype=torch.bfloat16)
        gap = (schedule.in_passes() - schedule.at_once()).abs()
        assert gap.mean() < 0.01
        assert gap.max() < 0.15


# ---- worked by hand


def one_layer(num_blocks: int = 8) -> KeyValuePool:
    return make_pool([LayerShape(1, 1, 1)], num_blocks)


def mean_of_values(pool: KeyValuePool, stretches: Sequence[Stretch], values: Sequence[float]) -> list[float]:
    """With all keys alike, a row gets the mean of the values it sees."""
    ones_HTD, value_GTD = torch.ones(1, len(values), 1), torch.tensor(values).view(1, -1, 1)
    plan = CachedPass(pool, stretches, fixed_order=True)
    return plan.attend(0, ones_HTD, ones_HTD, value_GTD, 1.0).flatten().tolist()


def test_rows_see_their_prompt_their_past_and_nothing_else():
    pool = one_layer()
    assert mean_of_values(pool, [Stretch(0, 2, [7])], [3.0, 5.0]) == [3, 4]
    one, other = Stretch(0, 1, [0], [7], 2), Stretch(0, 1, [1], [7], 2)
    assert mean_of_values(pool, [one, other], [1.0, 10.0]) == [3, 6]
    one, alone = Stretch(1, 2, [0], [7], 2), Stretch(0, 1, [2])
    assert mean_of_values(pool, [one, alone], [7.0, 4.0, 100.0]) == [4, 4, 100]
    assert mean_of_values(pool, [Stretch(1, 1, [1], [7], 2)], [2.0]) == [5]


def test_a_row_is_written_into_its_own_block():
    pool = one_layer()
    mean_of_values(pool, [Stretch(0, BLOCK + 2, [5, 2])], [float(number) for number in range(BLOCK + 2)])
    keys, values = pool.layers[0]
    assert values[5].flatten().tolist() == list(range(BLOCK))
    assert values[2].flatten().tolist() == [BLOCK, BLOCK + 1, *[0] * (BLOCK - 2)]
    assert keys.sum() == BLOCK + 2


def test_the_longest_sequence_counts_what_it_stands_on():
    pool = one_layer()
    stretches = [Stretch(3, 1, [0], [7, 6], 40), Stretch(0, 30, [1])]
    plan = CachedPass(pool, stretches, fixed_order=False)
    assert (plan.longest, plan.num_rows) == (44, 31)


def test_single_rows_behind_others_are_our_mistake():
    with pytest.raises(AssertionError, match="single rows come first"):
        CachedPass(one_layer(), [Stretch(0, 3, [7]), Stretch(0, 1, [0], [7], 3)], fixed_order=True)


# ---- a policy's passes


def cached_hidden(policy: Policy, ids_T: torch.Tensor, chunks: Sequence[int], prompt: int, pool: KeyValuePool):
    """Last hidden states of a sequence whose rows come in these chunks; the first `prompt` of them are its prefix."""
    prefix, own, hidden, first = [pool.blocks.take(high=True)], [], [], 0
    for num in chunks:
        if first < prompt:
            stretch = Stretch(first, num, prefix)
        else:
            while len(own) < num_blocks_for(first + num - prompt):
                own.append(pool.blocks.take())
            stretch = Stretch(first - prompt, num, own, prefix, prompt)
        plan = CachedPass(pool, [stretch], fixed_order=policy.fixed_order)
        hidden.append(policy.hidden(ids_T[first : first + num], torch.arange(first, first + num), plan))
        first += num
    pool.blocks.give_back(prefix + own)
    return torch.cat(hidden)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen2", "gpt2", "deepseek_v3", "gemma", "mixtral"])
@torch.no_grad()
def test_cached_decoding_equals_the_whole_sequence(architecture):
    policy = make_policy(architecture)
    pool = make_pool(policy.cache_shapes, 8)
    for seed, (prompt, chunks) in enumerate([(7, [3, 4, *[1] * 40]), (1, [1, 1, 20, 1, 1]), (12, [12, 30, 1, 5])]):
        ids_T = random_ids(sum(chunks), seed)
        expected_TD = tiny.plain(policy).base_model(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
        hidden_TD = cached_hidden(policy, ids_T, chunks, prompt, pool)
        torch.testing.assert_close(hidden_TD, expected_TD, atol=2e-5, rtol=1e-4)
    assert pool.blocks.num_free == 8


@torch.no_grad()
def test_what_an_earlier_occupant_left_is_not_seen(policy):
    """Bit for bit: what is behind the end of a block has no weight at all."""
    used, fresh, short = make_pool(policy.cache_shapes, 3), make_pool(policy.cache_shapes, 3), random_ids(8, 2)
    cached_hidden(policy, random_ids(60, 1), [20, *[1] * 40], 20, used)
    assert used.blocks.num_free == 3
    expected_TD = cached_hidden(policy, short, [3, *[1] * 5], 3, fresh)
    assert torch.equal(cached_hidden(policy, short, [3, *[1] * 5], 3, used), expected_TD)


@torch.no_grad()
@pytest.mark.parametrize(("chunks", "prompt"), [([15, 1, 1], 15), ([3, 10, 4], 3), ([1, 16], 1)], ids=str)
def test_decoding_beyond_the_sliding_window_is_refused(chunks, prompt):
    policy = make_policy("mistral")
    cached_hidden(policy, random_ids(16), [prompt, 16 - prompt], prompt, make_pool(policy.cache_shapes, 3))
    with pytest.raises(UserError, match=r"MistralAttention attends within a sliding window of 16 tokens .* has 17"):
        cached_hidden(policy, random_ids(17), chunks, prompt, make_pool(policy.cache_shapes, 3))
