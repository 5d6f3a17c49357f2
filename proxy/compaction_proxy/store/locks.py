"""Single flight across replicas: who holds the lock does the work, and a dead holder's lock expires by itself."""

from __future__ import annotations

import asyncio
import secrets
from types import TracebackType

from compaction_proxy.store.base import Store, StoreUnavailable

LOCK_MS = 60_000
RENEW_SECONDS = 20.0


class Lock:
    """A lock as an asynchronous context: ``async with Lock(store, key) as lock: if lock.held: ...``.

    It is tried once, without waiting. While held it is renewed in the background; ``held`` turns false if it was lost.

    Args:
        ttl_ms: how long a lock outlives a holder that died.
        renew_seconds: how often a live holder renews it.
    """

    def __init__(self, store: Store, key: str, *, ttl_ms: int = LOCK_MS, renew_seconds: float = RENEW_SECONDS) -> None:
        self.held = False
        self._store = store
        self._key = key
        self._ttl_ms = ttl_ms
        self._renew_seconds = renew_seconds
        self._token = secrets.token_hex(16)
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Lock:
        self.held = await self._store.acquire(self._key, self._token, self._ttl_ms)
        if self.held:
            self._renewing = asyncio.create_task(self._keep(), name="lock-renewal")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewing is None:
            return
        self._renewing.cancel()
        self._renewing = None
        self.held = False
        try:
            await self._store.release(self._key, self._token)
        except StoreUnavailable:
            return  # it expires

    async def _keep(self) -> None:
        while self.held:
            await asyncio.sleep(self._renew_seconds)
            try:
                self.held = await self._store.renew(self._key, self._token, self._ttl_ms)
            except StoreUnavailable:
                continue
