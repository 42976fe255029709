"""Keys and values of an engine's rollouts in blocks of a pool, and the attention that reads them where they are.

A sequence is a prefix, which others may share, and what is its own; each has blocks of `BLOCK` tokens, the last of
which is partly filled. Blocks of sequences' own are taken from the low end of the pool and those of prefixes from the
high end, so that what one token per sequence reads is close together: it is one product over a stretch of the pool, in
the order in which blocks lie there, and nothing is copied. Results of blocks are then added up by sequence, block after
block.

Axes: T rows of a pass, N of them single (one new token of a sequence), B blocks that are read, M readers of one block,
H query heads, G key-value heads, R = H / G (in a fixed order rounded up to `QUERY_ROWS`), L = BLOCK, D head size; K
keys, S segments and Q rows of the others.
"""

from __future__ import annotations

import math
import mmap
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from headway.models.attention import BLOCK, QUERY_ROWS, Padded, pad, row_order, size_class, taken
from headway.types import UserError

SPARSE = 1.5
"""Blocks that are read in a stretch of so many times their number are read in place, scattered ones are gathered."""

FEW = 64
"""Blocks that are read together, prefixes and others, since few products cost less than little copying."""


def num_blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


class Blocks:
    """Which blocks of a pool are free. They are numbers; what they hold is `KeyValuePool`'s business."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))  # in ascending order

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, *, high: bool = False) -> int:
        """The lowest free block, or the highest; there must be one."""
        assert self._free, "no block is free"
        return self._free.pop(-1 if high else 0)

    def give_back(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            assert 0 <= number < self.total, f"there is no block {number}"
            place = bisect_left(self._free, number)
            assert self._free[place : place + 1] != [number], f"block {number} is free already"
            self._free.insert(place, number)


@dataclass(frozen=True)
class LayerShape:
    """Of one layer's cache: key-value heads, and the sizes of a key and a value."""

    num_heads: int
    key_size: int
    value_size: int


class KeyValuePool:
    """The storage of all blocks, by layer: keys [blocks, G, L, D] and values.

    It takes no memory until `allocate`, and none after `release`; on a CPU a block takes none until it is written.
    """

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self.device = shapes, dtype, device
        self.blocks = Blocks(num_blocks)
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @staticmethod
    def sized(
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_sequences: int,
        longest: int,
        num_bytes: int | None,
    ) -> KeyValuePool:
        """Of so many bytes; by default for so many sequences of the longest kind, but at most of a quarter of the
        memory that is free now. Raises UserError where that is not even two blocks.
        """
        per_block = block_bytes(shapes, dtype)
        if num_bytes is not None:
            if num_bytes < 2 * per_block:
                raise UserError(
                    f"generate.cache_bytes is {num_bytes}, and a block of {BLOCK} tokens takes {per_block} with this "
                    f"model: give at least {2 * per_block}"
                )
            return KeyValuePool(shapes, num_bytes // per_block, dtype, device)
        wanted = num_sequences * (num_blocks_for(longest) + 1)
        possible = max(2, free_memory_bytes(device) // 4 // per_block)
        return KeyValuePool(shapes, min(wanted, possible), dtype, device)

    @property
    def block_bytes(self) -> int:
        return block_bytes(self._shapes, self._dtype)

    @property
    def num_bytes(self) -> int:
        return self.blocks.total * self.block_bytes

    def check_room(self, uid: str, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """Raises UserError where a whole rollout would not fit even if it had the pool to itself."""
        needed = num_blocks_for(num_prompt_tokens) + num_blocks_for(num_new_tokens)
        if needed > self.blocks.total:
            raise UserError(
                f"prompt {uid} has {num_prompt_tokens} tokens; with {num_new_tokens} new ones its keys and values take "
                f"{needed * self.block_bytes} bytes, and the cache has {self.num_bytes}: raise generate.cache_bytes or "
                "lower max_new_tokens"
            )

    def allocate(self) -> None:
        if not self.layers:
            self.layers = [
                (self._empty(shape.num_heads, shape.key_size), self._empty(shape.num_heads, shape.value_size))
                for shape in self._shapes
            ]

    def _empty(self, num_heads: int, size: int) -> torch.Tensor:
        """Zeros, for what is not a number would reach those who give it no weight."""
        shape = (self.blocks.total, num_heads, BLOCK, size)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self.device)
        # pages of its own: an allocator may keep what is given back, and writes zeros into what it hands out again
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a forked grader has no part in it
        pages = mmap.mmap(-1, math.prod(shape) * self._dtype.itemsize, flags=flags)
        return torch.frombuffer(pages, dtype=self._dtype).view(shape)

    def release(self) -> None:
        self.layers = []


def block_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Of one block's keys and values in all layers."""
    return sum(shape.num_heads * (shape.key_size + shape.value_size) for shape in shapes) * BLOCK * dtype.itemsize


def free_memory_bytes(device: torch.device) -> int:
    """That can be had now; where the system does not say, all there is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Stretch:
    """New rows of one sequence: `num_rows` from number `first` of its own tokens on, whose blocks are there already.

    prefix: blocks of what the sequence stands on, of `prefix_length` tokens; own: its own blocks.
    """

    first: int
    num_rows: int
    own: Sequence[int]
    prefix: Sequence[int] = ()
    prefix_length: int = 0

    @property
    def is_single(self) -> bool:
        return self.num_rows == 1 and self.prefix_length > 0


class CachedPass:
    """A pass over new rows of sequences: their keys and values are written into the pool, then each row attends.

    stretches: in the order of their rows; single ones come first.
    """

    def __init__(self, pool: KeyValuePool, stretches: Sequence[Stretch], *, fixed_order: bool) -> None:
        self._pool = pool
        device = pool.device
        self.num_rows = sum(stretch.num_rows for stretch in stretches)
        self.longest = max(stretch.prefix_length + stretch.first + stretch.num_rows for stretch in stretches)
        places = [place for stretch in stretches for place in range(stretch.first, stretch.first + stretch.num_rows)]
        owners = [stretch for stretch in stretches for _ in range(stretch.num_rows)]
        self._block_T = torch.tensor(
            [stretch.own[place // BLOCK] for stretch, place in zip(owners, places, strict=True)], device=device
        )
        self._offset_T = torch.tensor([place % BLOCK for place in places], device=device)
        self._written: dict[int, torch.Tensor] = {}
        singles = [stretch for stretch in stretches if stretch.is_single]
        assert singles == list(stretches[: len(singles)]), "single rows come first"
        self._num_singles = len(singles)
        self._singles = _Singles(singles, device, fixed_order=fixed_order) if singles else None
        rest = list(stretches[len(singles) :])
        self._rest = _Rest(rest, len(singles), device, fixed_order=fixed_order) if rest else None

    def attend(
        self, layer: int, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys, values = self._pool.layers[layer]
        self._write(keys, key_GTD)
        self._write(values, value_GTD)
        outputs = []
        if self._singles:
            query_NHD = query_HTD[:, : self._num_singles].transpose(0, 1)
            outputs.append(self._singles.attend(query_NHD, keys, values, scale))
        if self._rest:
            outputs.append(self._rest.attend(query_HTD, keys, values, scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _write(self, pool: torch.Tensor, new_GTD: torch.Tensor) -> None:
        num_heads, _, size = new_GTD.shape
        if num_heads not in self._written:  # places in a pool of vectors [blocks * G * L, D], once for all layers
            head_G = torch.arange(num_heads, device=pool.device)
            self._written[num_heads] = (
                (self._block_T[:, None] * num_heads + head_G) * BLOCK + self._offset_T[:, None]
            ).view(-1)
        new = new_GTD.transpose(0, 1).reshape(-1, size).to(pool.dtype)
        pool.view(-1, size).index_copy_(0, self._written[num_heads], new)


class _Reading:
    """Blocks of a pool that are read, in place where they lie close together.

    numbers: their numbers, any of them more than once. `place[i]`: where in what `of` returns the i-th is.
    """

    def __init__(self, numbers: Sequence[int], device: torch.device) -> None:
        low, high = min(numbers), max(numbers) + 1
        self._slice = slice(low, high) if high - low <= SPARSE * len(numbers) and _all_differ(numbers) else None
        if self._slice:
            self.place = [number - low for number in numbers]
            self.num = high - low
        else:
            self.place = list(range(len(numbers)))
            self.num = len(numbers)
            self._index_B = torch.tensor(numbers, device=device)

    def of(self, pool: torch.Tensor) -> torch.Tensor:
        """[B * G, L, D] of a pool [blocks, G, L, D]."""
        read = pool[self._slice] if self._slice else pool.index_select(0, self._index_B)
        return read.view(-1, *pool.shape[2:])

    def spread(self, values: Sequence[int], filler: int) -> list[int]:
        """One value per block -> one per place; places of blocks that nobody reads hold the filler."""
        spread = [filler] * self.num
        for place, value in zip(self.place, values, strict=True):
            spread[place] = value
        return spread


def _all_differ(numbers: Sequence[int]) -> bool:
    return len(set(numbers)) == len(numbers)


def _live_tokens(num_tokens: int) -> list[int]:
    """In each block of a sequence of so many."""
    num = num_blocks_for(num_tokens)
    return [BLOCK] * (num - 1) + [num_tokens - BLOCK * (num - 1)]


def _dead_BL(live: Sequence[int], device: torch.device) -> torch.Tensor:
    return (torch.arange(BLOCK) >= torch.tensor(live)[:, None]).to(device)


@dataclass
class _Bags:
    """Which of the results are summed for which row: `index[offset[n] : offset[n + 1]]` for row n, in that order."""

    index: torch.Tensor
    offset: torch.Tensor

    @staticmethod
    def of(bags: Sequence[Sequence[int]], device: torch.device) -> _Bags:
        offsets = [0]
        for bag in bags:
            offsets.append(offsets[-1] + len(bag))
        index = torch.tensor([place for bag in bags for place in bag], dtype=torch.long, device=device)
        return _Bags(index, torch.tensor(offsets, device=device))

    def sum(self, results: torch.Tensor) -> torch.Tensor:
        return self._bag(results, mode=0)

    def max(self, results: torch.Tensor) -> torch.Tensor:
        """Of bags none of which is empty."""
        return self._bag(results, mode=2)

    def _bag(self, results: torch.Tensor, mode: int) -> torch.Tensor:
        """What `torch.nn.functional.embedding_bag` calls when it has checked its arguments, which takes longer."""
        return torch.embedding_bag(results, self.index, self.offset, False, mode, False, None, True)[0]


@dataclass
class _Reads:
    """Blocks that are read, with M readers each.

    numbers: of the blocks; live: tokens in each; readers: rows that read it, M of each block (repeated to fill up).
    pieces: by row, the blocks (places in these lists) and which of the block's readers the row is, in order.
    """

    num_readers: int = 1
    numbers: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)
    pieces: list[list[tuple[int, int]]] = field(default_factory=list)

    def read(self, blocks: Sequence[int], num_tokens: int, readers: list[int]) -> range:
        """-> the places of these blocks."""
        first, live = len(self.numbers), _live_tokens(num_tokens)
        self.numbers += blocks[: len(live)]
        self.live += live
        self.readers += [readers] * len(live)
        return range(first, len(self.numbers))

    def __add__(self, other: _Reads) -> _Reads:
        """Both, the pieces of the other's rows behind those of these."""
        moved = [[(place + len(self.numbers), reader) for place, reader in piece] for piece in other.pieces]
        return _Reads(
            self.num_readers,
            self.numbers + other.numbers,
            self.live + other.live,
            self.readers + other.readers,
            self.pieces + moved,
        )


def _own_reads(stretches: Sequence[Stretch]) -> _Reads:
    reads = _Reads()
    for row, stretch in enumerate(stretches):
        reads.pieces.append([(place, 0) for place in reads.read(stretch.own, stretch.first + 1, [row])])
    return reads


def _prefix_reads(stretches: Sequence[Stretch]) -> _Reads:
    """Each prefix once for all of its rows, where that pays: all prefixes are read by as many rows as the most popular
    one, so it doesn't where few share one and most don't.
    """
    sharers: defaultdict[int, list[int]] = defaultdict(list)
    for row, stretch in enumerate(stretches):
        sharers[stretch.prefix[0]].append(row)
    most = max(map(len, sharers.values()))
    groups = list(sharers.values())
    if len(groups) * most > 2 * len(stretches):
        groups, most = [[row] for row in range(len(stretches))], 1
    reads = _Reads(most, pieces=[[] for _ in stretches])
    for rows in groups:
        stretch = stretches[rows[0]]
        places = reads.read(stretch.prefix, stretch.prefix_length, rows + rows[:1] * (most - len(rows)))
        for reader, row in enumerate(rows):
            reads.pieces[row] = [(place, reader) for place in places]
    return reads


class _Part:
    """What rows get from some blocks with M readers each, by pair of block and reader.

    pairs: those of each row, in the order in which they are to be summed.
    """

    def __init__(self, reads: _Reads, device: torch.device) -> None:
        self._reading = _Reading(reads.numbers, device)
        dead_BL = _dead_BL(self._reading.spread(reads.live, BLOCK), device)
        self._dead_B1L = dead_BL[:, None]
        readers_BM = torch.zeros(self._reading.num, reads.num_readers, dtype=torch.long)
        readers_BM[torch.tensor(self._reading.place)] = torch.tensor(reads.readers)
        self._reader_BM = readers_BM.to(device)
        self._reader_P = self._reader_BM.reshape(-1)
        self.pairs = [
            [self._reading.place[place] * reads.num_readers + reader for place, reader in pieces]
            for pieces in reads.pieces
        ]

    def scores(self, query_NGRD: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> scores [B, G * M * R, L], and their maxima by pair [B * M, G * R]."""
        _, G, R, D = query_NGRD.shape
        B, M = self._reader_BM.shape
        query = query_NGRD.index_select(0, self._reader_P)
        if M > 1:
            query = query.view(B, M, G, R, D).transpose(1, 2).reshape(B * G, M * R, D)
        scores = torch.bmm(query.view(B * G, M * R, D), self._reading.of(keys).transpose(1, 2)).float()
        scores = scores.view(B, G * M * R, BLOCK).masked_fill_(self._dead_B1L, -torch.inf)
        return scores, self._by_pair(scores.amax(-1), G)

    def weigh(
        self, scores: torch.Tensor, max_NX: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> by pair: weighted values [B * M, G * R * D] and weights [B * M, G * R], under the maxima of rows."""
        B, M = self._reader_BM.shape
        G = values.shape[1]
        maxima = max_NX.index_select(0, self._reader_P)
        if M > 1:
            maxima = maxima.view(B, M, G, -1).transpose(1, 2).reshape(B, -1)
        weights = scores.sub_(maxima.view(B, -1, 1)).exp_()
        totals = self._by_pair(weights.sum(-1), G)
        weighted = torch.bmm(weights.view(B * G, -1, BLOCK).to(values.dtype), self._reading.of(values)).float()
        if M > 1:
            weighted = weighted.view(B, G, M, -1).transpose(1, 2)
        return weighted.reshape(B * M, -1), totals

    def _by_pair(self, x: torch.Tensor, num_heads: int) -> torch.Tensor:
        B, M = self._reader_BM.shape
        if M > 1:
            x = x.view(B, num_heads, M, -1).transpose(1, 2)
        return x.reshape(B * M, -1)


class _Singles:
    """Attention of one new row for each of N sequences: what it gets of its prefix, and of what is its own."""

    def __init__(self, stretches: Sequence[Stretch], device: torch.device, *, fixed_order: bool) -> None:
        self._row_tile = QUERY_ROWS if fixed_order else 1
        prefix, own = _prefix_reads(stretches), _own_reads(stretches)
        if prefix.num_readers == 1 and len(prefix.numbers) + len(own.numbers) <= FEW:
            part = _Part(prefix + own, device)
            of_prefix, of_own = part.pairs[: len(stretches)], part.pairs[len(stretches) :]
            both = [before + after for before, after in zip(of_prefix, of_own, strict=True)]
            self._parts, self._maxima, self._sums = [part], [_Bags.of(both, device)], [_Bags.of(part.pairs, device)]
        else:
            self._parts = [_Part(prefix, device), _Part(own, device)]
            self._maxima = self._sums = [_Bags.of(part.pairs, device) for part in self._parts]

    def attend(self, query_NHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """-> [N, H, D]."""
        N, H, D = query_NHD.shape
        G = keys.shape[1]
        ratio = H // G
        filler = -ratio % self._row_tile
        query = query_NHD.reshape(N, G, ratio, D) * scale
        if filler:
            query = F.pad(query, (0, 0, 0, filler))
        scored = [part.scores(query, keys) for part in self._parts]
        maxima = [bags.max(maxima) for bags, (_, maxima) in zip(self._maxima, scored, strict=True)]
        max_NX = maxima[0] if len(maxima) == 1 else torch.maximum(*maxima)
        weighed = [part.weigh(scores, max_NX, values) for part, (scores, _) in zip(self._parts, scored, strict=True)]
        numerator, denominator = (self._added(of_parts) for of_parts in zip(*weighed, strict=True))
        output = numerator.view(N, G, ratio + filler, -1) / denominator.view(N, G, ratio + filler, 1)
        return output[:, :, :ratio].reshape(N, H, -1).to(values.dtype)

    def _added(self, of_parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """By row, what it gets of its prefix and of what is its own; each is summed first, block after block."""
        sums = [bags.sum(results) for bags, results in zip(self._sums, of_parts, strict=True)]
        of_prefix, of_own = sums if len(sums) == 2 else sums[0].chunk(2)
        return of_prefix + of_own


class _Rest:
    """Attention of stretches of several rows: their keys are gathered, and segments of like length go together."""

    def __init__(
        self, stretches: Sequence[Stretch], first_row: int, device: torch.device, *, fixed_order: bool
    ) -> None:
        self._groups: list[tuple[Padded, torch.Tensor]] = []
        by_shape: defaultdict[tuple[int, int, int], list[tuple[int, Stretch]]] = defaultdict(list)
        row = first_row
        for stretch in stretches:
            shape = size_class(stretch.num_rows), size_class(stretch.first), size_class(stretch.prefix_length)
            by_shape[shape].append((row, stretch))
            row += stretch.num_rows
        for alike in by_shape.values():
            self._groups.append(_gathered(alike, device, fixed_order=fixed_order))
        starts = [[start for start, _ in alike] for alike in by_shape.values()]
        lengths = [[stretch.num_rows for _, stretch in alike] for alike in by_shape.values()]
        self._order_T = row_order(starts, lengths, [padded for padded, _ in self._groups], first_row).to(device)

    def attend(self, query_HTD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        outputs = []
        for padded, blocks_SJ in self._groups:
            key, value = (
                taken(pool, 0, blocks_SJ).transpose(1, 2).reshape(len(blocks_SJ), pool.shape[1], -1, pool.shape[3])
                for pool in (keys, values)
            )
            outputs.append(padded.attend(query_HTD, key, value, scale))
        return torch.cat(outputs)[self._order_T]


def _gathered(
    alike: Sequence[tuple[int, Stretch]], device: torch.device, *, fixed_order: bool
) -> tuple[Padded, torch.Tensor]:
    """Stretches from given rows on, padded to one shape, and their blocks: the prefix's, then their own."""
    stretches = [stretch for _, stretch in alike]
    padded = pad(
        torch.tensor([start for start, _ in alike]),
        torch.tensor([stretch.num_rows for stretch in stretches]),
        torch.tensor([stretch.first for stretch in stretches]),
        torch.tensor([stretch.prefix_length for stretch in stretches]),
        device,
        fixed_order=fixed_order,
        whole_blocks=True,
    )
    num_prefix = padded.num_prefix_keys // BLOCK
    num_own = padded.visible_SQK.shape[2] // BLOCK - num_prefix
    blocks = [
        _filled(stretch.prefix[: num_blocks_for(stretch.prefix_length)], num_prefix) + _filled(stretch.own, num_own)
        for stretch in stretches
    ]
    return padded, torch.tensor(blocks, device=device)


def _filled(blocks: Sequence[int], num: int) -> list[int]:
    """So many blocks; what fills up is seen by nobody."""
    return [*blocks[:num], *[0] * (num - len(blocks))]
