"""A map bounded by bytes that forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")

ENTRY_OVERHEAD_BYTES = 200
"""What one entry costs beside its key and its value: the objects that hold it."""


class ByteLru(Generic[V]):
    """Keys to values of a stated size; reading one makes it the newest.

    Args:
        max_bytes: bound of all sizes, keys and overhead included. A value above it is not kept at all.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._held: OrderedDict[str, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: str) -> V | None:
        held = self._held.get(key)
        if held is None:
            return None
        self._held.move_to_end(key)
        return held[0]

    def put(self, key: str, value: V, size: int) -> None:
        """Keep ``value``, which takes ``size`` bytes."""
        self.pop(key)
        cost = len(key) + size + ENTRY_OVERHEAD_BYTES
        if cost > self.max_bytes:
            return
        self._held[key] = (value, cost)
        self.bytes += cost
        while self.bytes > self.max_bytes:
            _, (_, dropped) = self._held.popitem(last=False)
            self.bytes -= dropped

    def pop(self, key: str) -> V | None:
        held = self._held.pop(key, None)
        if held is None:
            return None
        self.bytes -= held[1]
        return held[0]
