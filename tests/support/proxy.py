"""A proxy for tests: from YAML text to an address, on a real socket, in this event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
from opentelemetry.sdk.trace.export import SpanExporter
from yarl import URL

from compaction_proxy.app import Proxy
from compaction_proxy.config import load_settings
from compaction_proxy.demo.run import settings_of
from compaction_proxy.serving import running
from compaction_proxy.telemetry import Telemetry
from compaction_proxy.tokens import Counters
from support.upstream import ScriptedUpstream

BASIC = """\
store: {{url: "{store}"}}
providers:
  main: {{kind: openai, baseUrl: "{upstream}/v1"{provider}}}
models:
  - {{match: "*", provider: main, policy: tested, contextWindow: {window}}}
server: {{tenant: {tenant}{server}}}
policies:
  tested:
    preset: {preset}
    thresholds: {{thresholdTokens: {limit}, thresholdRatio: null}}
{policy}
"""


def config(upstream: ScriptedUpstream, **given: Any) -> str:
    """YAML of a proxy in front of ``upstream``; ``policy`` holds further lines of the policy, indented by four."""
    known: dict[str, Any] = {
        "store": "memory://",
        "tenant": "single",
        "preset": "balanced",
        "limit": 2000,
        "window": "null",
        "policy": "",
        "provider": "",
        "server": "",
    }
    return BASIC.format(upstream=upstream.address, **{**known, **given})


@dataclass(slots=True)
class Running:
    """A running proxy and clients for it."""

    address: str
    http: aiohttp.ClientSession
    proxy: Proxy

    def sdk(self, key: str = "sk-client", **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, **more)

    async def post(
        self, body: Any, headers: dict[str, str] | None = None, path: str = "/v1/chat/completions"
    ) -> Answer:
        """Send JSON (or raw bytes) and read the whole answer."""
        sent: Any = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        known = {"content-type": "application/json", "authorization": "Bearer sk-client", **(headers or {})}
        async with self.http.post(URL(self.address + path, encoded=True), headers=known, **sent) as reply:
            return Answer(reply.status, reply.headers, await reply.read())

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        async with self.http.get(URL(self.address + path, encoded=True), headers=headers) as reply:
            return Answer(reply.status, reply.headers, await reply.read())


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def said(self) -> str:
        return self.headers.get("x-compaction", "")


@contextlib.asynccontextmanager
async def running_proxy(
    text: str, *, exporter: SpanExporter | None = None, file: Path | None = None, by_characters: bool = True
) -> AsyncIterator[Running]:
    """Run a proxy on a free port. With ``file`` the text is written there and watched.

    Args:
        by_characters: count a quarter token a character, which spares each proxy the 0.6 s that a vocabulary takes.
    """
    if file is not None:
        file.write_text(text, encoding="utf-8")
    settings = settings_of(text) if file is None else load_settings(file, {})
    telemetry = Telemetry(settings.telemetry, exporters=[exporter]) if exporter is not None else None
    counters = Counters(by_characters=True) if by_characters else None
    proxy = Proxy(settings, config=file, telemetry=telemetry, counters=counters)
    async with running(proxy.app) as address, aiohttp.ClientSession() as http:
        yield Running(address, http, proxy)


@contextlib.asynccontextmanager
async def served(folder: Path, text: str) -> AsyncIterator[tuple[str, Process]]:
    """``compaction-proxy serve`` as a process of its own, which the test may kill: its address, and the process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = folder / "proxy.yaml"
    file.write_text(text, encoding="utf-8")
    command = ("-m", "compaction_proxy", "serve", "--config", str(file), "--port", str(port))
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=DEVNULL, stderr=DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as http:

            async def healthy() -> bool:
                assert process.returncode is None, "it ended"
                try:
                    async with http.get(f"{address}/healthz") as reply:
                        return reply.status == 200
                except aiohttp.ClientError:
                    return False

            await until(healthy, 30)
        yield address, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until(predicate: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    """Wait for a fact; fails after ``seconds``."""
    async with asyncio.timeout(seconds):
        while True:
            found = predicate()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.005)
