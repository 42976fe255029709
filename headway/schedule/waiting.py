"""Who wants a lane."""

from __future__ import annotations

import heapq

Key = tuple[int, int]
"""Group and member of a rollout."""


class Waiting:
    """Rollouts of groups that have started and that want a lane: the oldest group's first. Each is in it once."""

    def __init__(self) -> None:
        self._heap: list[Key] = []
        self._keys: set[Key] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        if key not in self._keys:
            self._keys.add(key)
            heapq.heappush(self._heap, key)

    def discard(self, key: Key) -> None:
        self._keys.discard(key)  # its place in the heap is passed over, or used again

    def pop(self) -> Key:
        while True:
            key = heapq.heappop(self._heap)
            if key in self._keys:
                self._keys.remove(key)
                return key
