"""Work that belongs to the process and not to the request that began it: one flight per key, ended with the process.

The only place that creates tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Jobs(Generic[T]):
    """Running jobs by key. A job's exceptions reach whoever waits for it; one nobody waits for goes to ``on_error``."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._by_key: dict[Hashable, asyncio.Task[T]] = {}
        self._others: set[asyncio.Task[Any]] = set()
        self._on_error = on_error

    def __len__(self) -> int:
        return len(self._by_key) + len(self._others)

    def find(self, key: Hashable) -> asyncio.Task[T] | None:
        return self._by_key.get(key)

    def start(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """The job in flight under ``key``, begun with ``work`` if there is none."""
        task = self._by_key.get(key)
        if task is None:
            task = asyncio.create_task(work())
            self._by_key[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def background(self, work: Coroutine[Any, Any, object]) -> None:
        """Run something that nobody waits for: renewing lifetimes, writing down an attempt."""
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._finished)

    async def drain(self, seconds: float) -> None:
        """Wait for what runs, at most so long; then cancel the rest."""
        running: set[asyncio.Task[Any]] = {*self._by_key.values(), *self._others}
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=seconds)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=1)

    def _ended(self, key: Hashable, task: asyncio.Task[T]) -> None:
        if self._by_key.get(key) is task:
            del self._by_key[key]
        self._report(task)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._others.discard(task)
        self._report(task)

    def _report(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)


async def wait_at_most(task: asyncio.Task[T], seconds: float) -> bool:
    """Whether a job ended in time. It goes on either way, also when the waiter is cancelled."""
    done, _ = await asyncio.wait({task}, timeout=seconds)
    return bool(done)
