"""What a store can do: the primitives that everything else is built on. No key layout and no policy lives here.

Errors::

    StoreUnavailable    the store gave no answer in time, or refused; never raised by the memory store
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from compaction_proxy.store.index import CommitReply, IndexEntry


class StoreUnavailable(Exception):
    """The store did not answer in time, or answered with an error. The message holds no key and no value."""


class Store(Protocol):
    """Values are bytes, lifetimes are seconds, and every key has one.

    Attributes:
        label: where the data is kept, for people; without credentials.
        degraded: another store stands in for the configured one.
    """

    @property
    def label(self) -> str: ...

    @property
    def degraded(self) -> bool: ...

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of ``keys`` in their order; ``None`` for a missing one and for one that is no plain value."""

    async def put(self, key: str, value: bytes, ttl: float) -> None: ...

    async def put_many(self, values: Mapping[str, bytes], ttl: float) -> None:
        """Bulk content that is only ever read back on demand: no stand-in store needs a copy of it."""

    async def put_if_absent(self, key: str, value: bytes, ttl: float) -> bytes:
        """First writer wins: returns what is stored now, and renews its lifetime."""

    async def touch(self, keys: Sequence[str], ttl: float) -> None:
        """Renew the lifetimes of those that exist."""

    async def delete(self, keys: Sequence[str]) -> None: ...

    async def acquire(self, key: str, token: str, ttl_ms: int) -> bool:
        """Take a lock that nobody holds."""

    async def renew(self, key: str, token: str, ttl_ms: int) -> bool:
        """Prolong a lock; false if ``token`` no longer holds it."""

    async def release(self, key: str, token: str) -> bool:
        """Give a lock back; false if ``token`` no longer holds it, and then nothing is deleted."""

    async def commit_index(
        self,
        read_keys: Sequence[str],
        write_key: str,
        expected_id: str,
        ignore_ids: Collection[str],
        entry: IndexEntry,
        ttl: float,
    ) -> CommitReply:
        """One atomic compare-and-set over index values.

        Reads the sets at ``read_keys`` and ``write_key``; where their best active entry outside ``ignore_ids`` is
        ``expected_id`` (``""`` = there is none), ``entry`` joins the set at ``write_key``. See
        :func:`compaction_proxy.store.index.commit`.
        """

    async def ping(self) -> None:
        """Raises :exc:`StoreUnavailable` where there is no answer."""

    async def close(self) -> None: ...
