"""``compaction-proxy serve``: read the configuration, say what will happen, run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import uvicorn
from starlette.types import ASGIApp
from uvicorn.supervisors import Multiprocess

from compaction_proxy import __version__
from compaction_proxy.app import Proxy
from compaction_proxy.config import ConfigError, Settings, find_config, load_settings, process_environment, with_address
from compaction_proxy.logs import setup_logging
from compaction_proxy.serving import server_config
from compaction_proxy.store import EmbeddedServer, default_state_dir


@click.command()
@click.option(
    "--config",
    "config",
    type=click.Path(path_type=Path),
    help="Configuration file. [default: $COMPACTION_PROXY_CONFIG, else ./proxy.yaml, else built-in]",
)
@click.option("--host", help="Address to listen on. [default: server.host, 127.0.0.1]")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port to listen on, 0 = any free one. [default: server.port, 8787]"
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Worker processes; they share the store.",
)
def command(config: Path | None, host: str | None, port: int | None, workers: int) -> None:
    """Run the proxy."""
    environment = process_environment()
    path = find_config(config, environment)
    setup_logging(sys.stderr)
    try:
        settings = with_address(load_settings(path, environment), host, port)
    except ConfigError as error:
        for problem in error.problems:
            click.echo(str(problem), err=True)
        raise SystemExit(2) from None
    for line in (*settings.warnings, *banner(settings, path, environment)):
        click.echo(line, err=True)
    listen = functools.partial(server_config, host=settings.server.host, port=settings.server.port)
    if workers == 1:
        uvicorn.Server(listen(worker_app(path, host, port))).run()
        return
    if settings.store.scheme == "memory":
        click.echo("store memory:// is not shared: each worker keeps its own records", err=True)
    server = _embedded(settings, environment)
    try:
        shared = listen(functools.partial(worker_app, path, host, port), factory=True, workers=workers)
        Multiprocess(shared, sockets=[shared.bind_socket()]).run()
    finally:
        if server is not None:
            server.stop()


def worker_app(path: Path | None, host: str | None, port: int | None) -> ASGIApp:
    """The app of one worker process, from the same files."""
    environment = process_environment()
    setup_logging(sys.stderr)
    settings = with_address(load_settings(path, environment), host, port)
    return Proxy(settings, config=path, environment=environment).app


def _embedded(settings: Settings, environment: Mapping[str, str]) -> EmbeddedServer | None:
    """The embedded store's server, started by the parent so that it outlives each worker."""
    if settings.store.scheme != "embedded":
        return None
    server = EmbeddedServer(settings.store.state_dir or default_state_dir(environment, Path.home()))
    server.ensure()
    return server


def banner(settings: Settings, path: Path | None, environment: Mapping[str, str]) -> list[str]:
    """What a person wants to know at start."""
    server, store = settings.server, settings.store
    host = f"[{server.host}]" if ":" in server.host else server.host
    days = f"{store.ttl_seconds / 86_400:g} days"
    originals = (
        f"originals of replaced content {store.originals_ttl_seconds / 3_600:g} h"
        if store.keep_originals
        else "no originals"
    )
    tracing = [
        name
        for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
        if environment.get(name)
    ]
    routes = ", ".join(f"{route.match} -> {route.provider} ({route.policy})" for route in settings.routes[:6])
    return [
        f"compaction-proxy {__version__}, configuration: {path or 'built-in'}",
        f"base_url   http://{host}:{server.port}/v1",
        f"models     {routes}{' ...' if len(settings.routes) > 6 else ''}",
        f"store      {store.public_url}: summaries are kept {days} after their last use, {originals}"
        " (store.keepOriginals: false turns that off; store.url: memory:// keeps nothing on disk)",
        f"tracing    {'by ' + ', '.join(tracing) if tracing else 'off (set OTEL_EXPORTER_OTLP_ENDPOINT)'}",
    ]
