"""Running an ASGI app on uvicorn: the one set of options, for ``serve``, the demonstration and benchmarks alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

GRACE_SECONDS = 10
"""How long shutdown waits for open requests."""


def server_config(app: ASGIApp | Callable[[], ASGIApp], *, host: str, port: int, **more: Any) -> uvicorn.Config:
    """uvloop and httptools, no access log, no headers of our own; proxy headers are read by :mod:`access` alone.

    ``app`` may be a factory (with ``factory=True``), which each worker process calls.
    """
    return uvicorn.Config(
        cast(ASGIApp, app),
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        log_config=None,
        timeout_graceful_shutdown=GRACE_SECONDS,
        **more,
    )


@contextlib.asynccontextmanager
async def running(app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve inside the current event loop; yields the base address without a path, and stops on exit."""
    server = uvicorn.Server(server_config(app, host=host, port=port))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    config = server.config
    if not config.loaded:
        config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    if server.should_exit:
        message = f"no server on {host}:{port}"
        raise OSError(message)
    async with asyncio.TaskGroup() as group:
        loop = group.create_task(server.main_loop())
        try:
            bound = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://{host}:{bound}"
        finally:
            server.should_exit = True
            await loop
            await server.shutdown()
