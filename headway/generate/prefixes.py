"""Prompts whose keys and values are in the cache, each once for all rollouts that stand on it.

They are known by their tokens under one version of the weights: new weights make the store forget them, and whoever
still stands on an old one keeps it to himself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from headway.models.paged import Blocks, Stretch, num_blocks_for

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Prefix:
    """Blocks of a prompt's keys and values, of which the first `cached` tokens are there.

    last_hidden_D: the state that predicts what follows it, once all are; num_readers: rollouts that stand on it.
    """

    tokens: Tokens
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    last_hidden_D: torch.Tensor | None = None
    num_readers: int = 0

    @property
    def is_complete(self) -> bool:
        return self.last_hidden_D is not None

    def stretch(self, num_rows: int) -> Stretch:
        """The next so many of its tokens as rows of a pass."""
        return Stretch(self.cached, num_rows, self.blocks)


class Prefixes:
    """Those of one engine, in the blocks of its pool.

    Unused ones stay until their blocks are needed, or more than `max_unused` are kept.
    """

    def __init__(self, blocks: Blocks, *, max_unused: int) -> None:
        self._blocks, self._max_unused = blocks, max_unused
        self._known: OrderedDict[Tokens, Prefix] = OrderedDict()
        self._num_unused = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_blocks(self) -> int:
        """That are held by known prompts."""
        return sum(len(prefix.blocks) for prefix in self._known.values())

    @property
    def num_evictable(self) -> int:
        """Blocks of those on which no rollout stands."""
        return sum(len(prefix.blocks) for prefix in self._known.values() if not prefix.num_readers)

    @property
    def num_missing(self) -> int:
        """Blocks that prompts on which rollouts stand have yet to take."""
        in_use = (prefix for prefix in self._known.values() if prefix.num_readers)
        return sum(num_blocks_for(len(prefix.tokens)) - len(prefix.blocks) for prefix in in_use)

    def num_needed(self, tokens: Tokens) -> int:
        """Blocks that standing on these tokens takes from what is free or evictable and not missing elsewhere."""
        known = self._known.get(tokens)
        return 0 if known and known.num_readers else num_blocks_for(len(tokens))

    def stand_on(self, tokens: Tokens) -> Prefix:
        """The prompt's prefix with one reader more; new ones have no blocks yet."""
        prefix = self._known.get(tokens)
        if prefix is None:
            prefix = self._known[tokens] = Prefix(tokens)
        elif not prefix.num_readers:
            self._num_unused -= 1
        self._known.move_to_end(tokens)
        prefix.num_readers += 1
        return prefix

    def leave(self, prefix: Prefix) -> None:
        """One reader less. What is known stays, unless it was never completed."""
        prefix.num_readers -= 1
        assert prefix.num_readers >= 0
        if prefix.num_readers:
            return
        if not (self._known.get(prefix.tokens) is prefix and prefix.is_complete):
            self._drop(prefix)
            return
        self._num_unused += 1
        if self._num_unused > self._max_unused:
            self.evict_one()

    def evict_one(self) -> bool:
        """Give back the blocks of the prompt that was asked for longest ago; False: all are in use."""
        unused = next((prefix for prefix in self._known.values() if not prefix.num_readers), None)
        if unused is None:
            return False
        self._num_unused -= 1
        self._drop(unused)
        return True

    def forget(self) -> None:
        """New weights: nothing that is known may be served any more."""
        for prefix in list(self._known.values()):
            if prefix.num_readers == 0:
                self._drop(prefix)
        self._known.clear()
        self._num_unused = 0

    def _drop(self, prefix: Prefix) -> None:
        if self._known.get(prefix.tokens) is prefix:
            del self._known[prefix.tokens]
        self._blocks.give_back(prefix.blocks)
        prefix.blocks = []
