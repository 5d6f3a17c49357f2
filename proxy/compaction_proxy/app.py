"""The composition root: settings -> services -> an ASGI app. Nothing here waits but the lifespan."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from starlette.applications import Starlette
from starlette.routing import Mount

from compaction_policies.measure import Count, Units
from compaction_policies.succession import follows
from compaction_proxy.catalogue import Catalogue
from compaction_proxy.compaction import Compactor, Result
from compaction_proxy.config import Reload, Settings, Watcher
from compaction_proxy.jobs import Jobs
from compaction_proxy.logs import log_event
from compaction_proxy.routes import Surface
from compaction_proxy.services import Services
from compaction_proxy.shaping import Shaper
from compaction_proxy.store import Records, default_state_dir, open_store
from compaction_proxy.telemetry import Telemetry
from compaction_proxy.tokens import Counters
from compaction_proxy.upstream import Upstream

log = logging.getLogger(__name__)

T = TypeVar("T")
DRAIN_SECONDS = 10.0


class Proxy:
    """The app and what it runs on; ``services`` exists while it is open."""

    def __init__(
        self,
        settings: Settings,
        *,
        counters: Counters | None = None,
        units: Callable[[Count], Units] = Units,
        telemetry: Telemetry | None = None,
        config: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._config = config
        self._environment = environment or {}
        self._counters = counters
        self._units = units
        self._telemetry = telemetry
        self._services: Services | None = None
        self.app = Starlette(routes=[Mount("/", Surface(self.services))], lifespan=self._lifespan)

    def services(self) -> Services:
        if self._services is None:
            message = "the proxy is not open"
            raise RuntimeError(message)
        return self._services

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with opened(self._settings, self._counters, self._units, self._telemetry, self._environment) as services:
            self._services = services
            with self._watching(services):
                yield
        self._services = None

    @contextlib.contextmanager
    def _watching(self, services: Services) -> Iterator[None]:
        """Providers, models and policies of the next request follow their files, on change and on SIGHUP."""

        def report(result: Reload) -> None:
            for line in result.lines():
                (log.error if result.problems else log.info)("%s", line)
            services.settings = result.settings

        watcher = Watcher(self._config, self._environment, self._settings, report)
        watcher.start()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(RuntimeError, ValueError):  # not the main thread: nobody sends it signals
            loop.add_signal_handler(signal.SIGHUP, lambda: services.jobs.background(asyncio.to_thread(watcher.reload)))
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGHUP)
            watcher.stop()


@contextlib.asynccontextmanager
async def opened(
    settings: Settings,
    counters: Counters | None,
    units: Callable[[Count], Units],
    telemetry: Telemetry | None,
    environment: Mapping[str, str],
) -> AsyncIterator[Services]:
    """Open the long-lived parts in order, and close them in the opposite one."""
    cache_dir = environment.get("TIKTOKEN_CACHE_DIR")
    counters = counters or Counters(cache_dir=Path(cache_dir) if cache_dir else None)
    telemetry = telemetry or Telemetry(settings.telemetry, environment)
    catalogue = Catalogue()
    await catalogue.load()
    kept = settings.store
    store = await open_store(
        str(kept.url),
        state_dir=kept.state_dir or default_state_dir(environment, Path.home()),
        ttl_seconds=kept.ttl_seconds,
        on_change=_store_changed,
    )
    records = Records(
        store,
        ttl_seconds=kept.ttl_seconds,
        originals_ttl_seconds=kept.originals_ttl_seconds,
        keep_originals=kept.keep_originals,
        clock_ms=lambda: int(time.time() * 1000),
        follows=follows,
    )
    jobs: Jobs[Result] = Jobs(_job_failed)
    upstream = Upstream()

    async def threads(work: Callable[[], T]) -> T:
        return await counters.off_loop(work)

    compactor = Compactor(records, jobs, threads)
    shaper = Shaper(records, counters, compactor, jobs, units)
    try:
        yield Services(settings, upstream, records, counters, catalogue, jobs, shaper, telemetry)
    finally:
        await jobs.drain(DRAIN_SECONDS)
        await upstream.close()
        await store.close()
        counters.close()
        await asyncio.to_thread(telemetry.shutdown)


def create_app(settings: Settings, **parts: object) -> Starlette:
    """The ASGI app of a configuration. ``parts`` as :class:`Proxy` takes them."""
    return Proxy(settings, **parts).app  # type: ignore[arg-type]


def _store_changed(degraded: bool, why: str) -> None:
    if degraded:
        log_event("store unavailable; memory stands in", reason="store-unavailable", detail=why)
    else:
        log_event("store is back", detail=why)


def _job_failed(error: BaseException) -> None:
    log.error("a background job failed", exc_info=error)
