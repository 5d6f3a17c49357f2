"""Stores: where records, originals and locks live. :func:`open_store` turns the setting into one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from compaction_proxy.store.base import Store, StoreUnavailable
from compaction_proxy.store.embedded import EmbeddedServer, EmbeddedStore, default_state_dir
from compaction_proxy.store.failover import FailoverStore
from compaction_proxy.store.keys import Scope
from compaction_proxy.store.locks import Lock
from compaction_proxy.store.memory import MemoryStore
from compaction_proxy.store.records import Committed, Conflict, Found, Records
from compaction_proxy.store.shared import RedisStore

__all__ = [
    "SCHEMES",
    "Committed",
    "Conflict",
    "EmbeddedServer",
    "EmbeddedStore",
    "FailoverStore",
    "Found",
    "Lock",
    "MemoryStore",
    "Records",
    "RedisStore",
    "Scope",
    "Store",
    "StoreUnavailable",
    "default_state_dir",
    "open_store",
]

SCHEMES = ("embedded", "memory", "redis", "rediss", "unix")


async def open_store(
    url: str,
    *,
    state_dir: Path,
    ttl_seconds: float,
    on_change: Callable[[bool, str], None] = lambda degraded, why: None,
) -> Store:
    """The store behind ``url``. One that is away is no error: memory stands in until it answers.

    Args:
        url: one of :data:`SCHEMES`.
        state_dir: folder of the embedded server; see :func:`default_state_dir`.
        ttl_seconds: lifetime of records.
        on_change: called with (degraded, why) whenever memory begins to stand in, and when it ends.

    Raises:
        ValueError: the URL does not read.
    """
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        message = f"unknown store {scheme!r}; one of {', '.join(SCHEMES)}"
        raise ValueError(message)
    if scheme == "memory":
        return MemoryStore()
    store = (
        EmbeddedStore(EmbeddedServer(state_dir), MemoryStore(), mirror_ttl=ttl_seconds, on_change=on_change)
        if scheme == "embedded"
        else FailoverStore(RedisStore(url), MemoryStore(), mirror_ttl=ttl_seconds, on_change=on_change)
    )
    await store.connect()
    return store
