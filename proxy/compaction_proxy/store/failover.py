"""A shared store with the memory of this process behind it: no operation fails, and an outage costs one time-out.

The breaker opens at the first failure; from then on memory answers, while a probe in the background asks the shared
store after 1, 2, 4 ... 30 seconds. Single values that are read from or written to the shared store are mirrored, so that
an outage keeps the form last sent. What is committed while away is remembered until it was offered to the shared store.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from compaction_proxy.store.base import Store, StoreUnavailable
from compaction_proxy.store.index import CommitReply, IndexEntry
from compaction_proxy.store.memory import MemoryStore

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
MAX_AWAY = 65_536
"""Keys, and conversations, that are remembered as written while away."""

T = TypeVar("T")


async def _nothing() -> None:
    return


class FailoverStore:
    """See the module docstring, and :class:`compaction_proxy.store.base.Store`.

    Args:
        shared: the configured store.
        local: what stands in for it.
        mirror_ttl: lifetime in seconds of what is mirrored from a read, whose own lifetime is unknown.
        on_change: called with (degraded, why) when the breaker opens and when it closes.
        revive: called before each probe; may start the shared store. Its :exc:`StoreUnavailable` counts as the probe's.
    """

    def __init__(
        self,
        shared: Store,
        local: MemoryStore,
        *,
        mirror_ttl: float,
        on_change: Callable[[bool, str], None] = lambda degraded, why: None,
        revive: Callable[[], Awaitable[None]] = _nothing,
        first_pause: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        self.shared = shared
        self.local = local
        self._mirror_ttl = mirror_ttl
        self._on_change = on_change
        self._revive = revive
        self._first_pause = first_pause
        self._probe: asyncio.Task[None] | None = None
        self._away_keys: OrderedDict[str, None] = OrderedDict()
        self._away_records: OrderedDict[str, set[str]] = OrderedDict()

    @property
    def label(self) -> str:
        return self.shared.label

    @property
    def degraded(self) -> bool:
        """Memory answers because the shared store does not."""
        return self._probe is not None

    @property
    def offline_scopes(self) -> Collection[str]:
        """The hash tags under which records were committed while away and not yet offered."""
        return self._away_records.keys()

    def offline_ids(self, tag: str) -> frozenset[str]:
        """Ids of the records that were committed under ``tag`` while away and not yet offered."""
        return frozenset(self._away_records.get(tag, ()))

    def settle(self, tag: str, ids: Iterable[str]) -> None:
        """These records were offered: taken over, or not wanted."""
        left = self._away_records.get(tag)
        if left is not None:
            left.difference_update(ids)
            if not left:
                del self._away_records[tag]

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        online, values = await self._ask(lambda store: store.mget(keys))
        return await self._mirror(keys, values) if online else values

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        online, _ = await self._ask(lambda store: store.put(key, value, ttl))
        if online:
            await self.local.put(key, value, ttl)
        self._mark(online, (key,))

    async def put_many(self, values: Mapping[str, bytes], ttl: float) -> None:
        online, _ = await self._ask(lambda store: store.put_many(values, ttl))
        self._mark(online, values)

    async def put_if_absent(self, key: str, value: bytes, ttl: float) -> bytes:
        online, winner = await self._ask(lambda store: store.put_if_absent(key, value, ttl))
        if online:
            await self.local.put(key, winner, ttl)
        self._mark(online, (key,))
        return winner

    async def touch(self, keys: Sequence[str], ttl: float) -> None:
        online, _ = await self._ask(lambda store: store.touch(keys, ttl))
        if online:
            await self.local.touch(keys, ttl)

    async def delete(self, keys: Sequence[str]) -> None:
        online, _ = await self._ask(lambda store: store.delete(keys))
        if online:
            await self.local.delete(keys)
        self._mark(True, keys)

    async def acquire(self, key: str, token: str, ttl_ms: int) -> bool:
        return (await self._ask(lambda store: store.acquire(key, token, ttl_ms)))[1]

    async def renew(self, key: str, token: str, ttl_ms: int) -> bool:
        return (await self._ask(lambda store: store.renew(key, token, ttl_ms)))[1]

    async def release(self, key: str, token: str) -> bool:
        """Gives the lock back wherever it was taken: the breaker may have moved in between."""
        released = (await self._ask(lambda store: store.release(key, token)))[1]
        return await self.local.release(key, token) or released

    async def commit_index(
        self,
        read_keys: Sequence[str],
        write_key: str,
        expected_id: str,
        ignore_ids: Collection[str],
        entry: IndexEntry,
        ttl: float,
    ) -> CommitReply:
        online, reply = await self._ask(
            lambda store: store.commit_index(read_keys, write_key, expected_id, ignore_ids, entry, ttl)
        )
        if reply.committed and online:
            self.local.add_entry(write_key, entry, ttl)
        elif reply.committed:
            self._away_records.setdefault(hash_tag(write_key), set()).add(entry.id)
            _trim(self._away_records)
        return reply

    async def connect(self) -> None:
        """Start and ask the shared store once, so that a start without it is already known to be degraded."""
        try:
            await self._revive()
            await self.shared.ping()
        except StoreUnavailable as error:
            self._open(str(error))

    async def ping(self) -> None:
        """Never raises: a failure opens the breaker."""
        await self._ask(lambda store: store.ping())

    async def close(self) -> None:
        probe = self._probe
        if probe is not None:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
        await self.shared.close()

    async def _ask(self, work: Callable[[Store], Awaitable[T]]) -> tuple[bool, T]:
        """The shared store's answer, else this process's; and whether it is the shared store's."""
        if not self.degraded:
            try:
                return True, await work(self.shared)
            except StoreUnavailable as error:
                self._open(str(error))
        return False, await work(self.local)

    def _open(self, why: str) -> None:
        if self._probe is None:
            self._probe = asyncio.create_task(self._wait_for_shared(), name="store-probe")
            self._on_change(True, why)

    async def _wait_for_shared(self) -> None:
        pause = self._first_pause
        while True:
            await asyncio.sleep(pause)
            try:
                await self._revive()
                await self.shared.ping()
            except StoreUnavailable:
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            else:
                break
        self._probe = None
        self._on_change(False, "")

    async def _mirror(self, keys: Sequence[str], values: list[bytes | None]) -> list[bytes | None]:
        """Copies what was read; a key that only this process has, written while away, is answered from here.

        The index values of a conversation with records to offer are left alone until those were offered.
        """
        answers = list(values)
        for position, (key, value) in enumerate(zip(keys, values, strict=True)):
            if value is None and key in self._away_keys:
                answers[position] = (await self.local.mget([key]))[0]
                continue
            self._away_keys.pop(key, None)
            if self._away_records and hash_tag(key) in self._away_records:
                continue
            if value is None:
                await self.local.delete([key])
            else:
                await self.local.put(key, value, self._mirror_ttl)
        return answers

    def _mark(self, online: bool, keys: Iterable[str]) -> None:
        for key in keys:
            self._away_keys.pop(key, None)
            if not online:
                self._away_keys[key] = None
        _trim(self._away_keys)


def hash_tag(key: str) -> str:
    """What stands between the first braces of a key: all keys of one conversation share it."""
    return key.partition("{")[2].partition("}")[0]


def _trim(remembered: OrderedDict[str, T]) -> None:
    while len(remembered) > MAX_AWAY:
        remembered.popitem(last=False)
