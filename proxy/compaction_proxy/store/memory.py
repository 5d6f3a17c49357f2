"""The store inside this process: bounded by bytes, lifetimes on a monotonic clock. It never fails and never waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from compaction_proxy.store import index
from compaction_proxy.store.index import CommitReply, IndexEntry
from compaction_proxy.store.lru import ByteLru

DEFAULT_MAX_BYTES = 64 * 1024 * 1024


class MemoryStore:
    """``memory://``, and what stands in for a shared store that is away. See :class:`compaction_proxy.store.base.Store`.

    Args:
        max_bytes: keys, values and overhead together; what was used longest ago goes first.
        clock: monotonic seconds.
    """

    label = "memory of this process"
    degraded = False

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: ByteLru[tuple[bytes, float]] = ByteLru(max_bytes)

    @property
    def size(self) -> int:
        """Bytes held: keys, values and overhead."""
        return self._values.bytes

    def __len__(self) -> int:
        return len(self._values)

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._get(key) for key in keys]

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        self._put(key, value, ttl)

    async def put_many(self, values: Mapping[str, bytes], ttl: float) -> None:
        for key, value in values.items():
            self._put(key, value, ttl)

    async def put_if_absent(self, key: str, value: bytes, ttl: float) -> bytes:
        held = self._get(key)
        winner = value if held is None else held
        self._put(key, winner, ttl)
        return winner

    async def touch(self, keys: Sequence[str], ttl: float) -> None:
        for key in keys:
            held = self._get(key)
            if held is not None:
                self._put(key, held, ttl)

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._values.pop(key)

    async def acquire(self, key: str, token: str, ttl_ms: int) -> bool:
        if self._get(key) is not None:
            return False
        self._put(key, token.encode(), ttl_ms / 1000)
        return True

    async def renew(self, key: str, token: str, ttl_ms: int) -> bool:
        if self._get(key) != token.encode():
            return False
        self._put(key, token.encode(), ttl_ms / 1000)
        return True

    async def release(self, key: str, token: str) -> bool:
        if self._get(key) != token.encode():
            return False
        self._values.pop(key)
        return True

    async def commit_index(
        self,
        read_keys: Sequence[str],
        write_key: str,
        expected_id: str,
        ignore_ids: Collection[str],
        entry: IndexEntry,
        ttl: float,
    ) -> CommitReply:
        read = [found for key in {*read_keys, write_key} for found in index.decode_index(self._get(key))]
        reply = index.commit(read, expected_id, ignore_ids, entry)
        if reply.committed:
            self.add_entry(write_key, entry, ttl)
        return reply

    def add_entry(self, key: str, entry: IndexEntry, ttl: float) -> None:
        """Put ``entry`` into the set at ``key`` without a comparison: somebody else has made it."""
        entries = index.add(index.decode_index(self._get(key)), entry)
        self._put(key, index.encode_index(entries), ttl)

    async def ping(self) -> None:
        return

    async def close(self) -> None:
        return

    def _get(self, key: str) -> bytes | None:
        held = self._values.get(key)
        if held is None:
            return None
        value, expires = held
        if expires <= self._clock():
            self._values.pop(key)
            return None
        return value

    def _put(self, key: str, value: bytes, ttl: float) -> None:
        self._values.put(key, (value, self._clock() + ttl), len(value))
