"""Provider kind ``openai``: raw forwarding over one pooled client. Bytes go out and come back as they are.

One retry, on a pooled connection that turned out to be closed before a byte of the answer came, and on nothing else. It
goes over a new connection: where one pooled connection is dead, the others often are too.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from compaction_proxy.config.settings import ProviderSettings
from compaction_proxy.errors import UpstreamTimeout, UpstreamUnreachable

LARGE_BODY_BYTES = 512 * 1024
"""Larger bodies are written in pieces, so that the event loop gets its turn between them."""
HOP_HEADER = "x-compaction-hop"
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
_SET_ANEW = frozenset((b"host", b"content-length", b"expect"))
_CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"api-key"))

RawHeaders = tuple[tuple[bytes, bytes], ...]


@dataclass(slots=True)
class Response:
    """An upstream's answer whose body has not been read. Close it, or read it to its end."""

    status: int
    headers: RawHeaders
    _reply: aiohttp.ClientResponse
    _idle_seconds: float

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises :class:`UpstreamUnreachable` or :class:`UpstreamTimeout` where it breaks off."""
        stream = self._reply.content.iter_any()
        while True:
            try:
                async with asyncio.timeout(self._idle_seconds):
                    chunk = await anext(stream, None)
            except TimeoutError:
                message = f"the provider sent nothing for {self._idle_seconds:g} seconds"
                raise UpstreamTimeout(message) from None
            except (aiohttp.ClientError, OSError) as error:
                message = f"the provider's answer broke off ({type(error).__name__})"
                raise UpstreamUnreachable(message) from None
            if chunk is None:
                return
            yield chunk

    def close(self) -> None:
        """Give the connection back if the body was read to its end, else drop it and cancel the call."""
        if self._reply.content.at_eof():
            self._reply.release()
        else:
            self._reply.close()


class Upstream:
    """The pooled client. Open it inside the event loop that uses it."""

    def __init__(self) -> None:
        tracing = aiohttp.TraceConfig(trace_config_ctx_factory=_context)  # type: ignore[arg-type]
        tracing.on_connection_reuseconn.append(_reused)
        self._pooled = _session(aiohttp.TCPConnector(limit=0, ttl_dns_cache=60), tracing)
        self._unpooled = _session(aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, force_close=True), tracing)

    async def close(self) -> None:
        await self._pooled.close()
        await self._unpooled.close()

    async def send(
        self,
        provider: ProviderSettings,
        method: str,
        path_after_v1: str,
        query: bytes,
        headers: RawHeaders,
        body: bytes,
    ) -> Response:
        """Forward a request. ``headers`` are final: see :func:`request_headers`.

        Raises :class:`UpstreamUnreachable` and :class:`UpstreamTimeout`.
        """
        url = target(provider, path_after_v1, query)
        sent = CIMultiDict((_text(name), _text(value)) for name, value in headers)
        try:
            reply = await self._once(self._pooled, provider, method, url, sent, body)
        except _Stale:
            reply = await self._once(self._unpooled, provider, method, url, sent, body)
        return Response(reply.status, tuple(reply.raw_headers), reply, provider.timeouts.idle_seconds)

    async def _once(
        self,
        session: aiohttp.ClientSession,
        provider: ProviderSettings,
        method: str,
        url: URL,
        headers: CIMultiDict[str],
        body: bytes,
    ) -> aiohttp.ClientResponse:
        connection = _Connection()
        try:
            async with asyncio.timeout(provider.timeouts.first_byte_seconds):
                return await session.request(
                    method,
                    url,
                    headers=headers,
                    data=(io.BytesIO(body) if len(body) > LARGE_BODY_BYTES else body) or None,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=provider.timeouts.connect_seconds),
                    trace_request_ctx=connection,
                )
        except aiohttp.ConnectionTimeoutError:
            message = f"no connection to provider {provider.name} within {provider.timeouts.connect_seconds:g} seconds"
            raise UpstreamTimeout(message) from None
        except TimeoutError:
            message = f"provider {provider.name} did not answer within {provider.timeouts.first_byte_seconds:g} seconds"
            raise UpstreamTimeout(message) from None
        except aiohttp.ClientConnectorError as error:
            message = f"provider {provider.name} cannot be reached ({type(error).__name__})"
            raise UpstreamUnreachable(message) from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError) as error:
            if connection.reused and not _began(error):
                raise _Stale from error
            message = f"provider {provider.name} closed the connection without an answer"
            raise UpstreamUnreachable(message) from None
        except (aiohttp.ClientError, OSError) as error:
            message = f"provider {provider.name} cannot be reached ({type(error).__name__})"
            raise UpstreamUnreachable(message) from None

    async def complete(
        self, provider: ProviderSettings, path_after_v1: str, body: Any, headers: RawHeaders, timeout_seconds: float
    ) -> tuple[int, bytes]:
        """One private call, read whole, under one deadline. Raises as :meth:`send` does."""
        try:
            async with asyncio.timeout(timeout_seconds):
                data = json.dumps(body).encode("ascii")
                response = await self.send(provider, "POST", path_after_v1, b"", headers, data)
                try:
                    return response.status, b"".join([chunk async for chunk in response.chunks()])
                finally:
                    response.close()
        except TimeoutError:
            message = f"no answer within {timeout_seconds:g} seconds"
            raise UpstreamTimeout(message) from None


def _session(connector: aiohttp.TCPConnector, tracing: aiohttp.TraceConfig) -> aiohttp.ClientSession:
    session = aiohttp.ClientSession(
        trace_configs=[tracing],
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        trust_env=False,
        read_bufsize=256 * 1024,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        max_line_size=64 * 1024,
        max_field_size=64 * 1024,
    )
    session._retry_connection = False  # aiohttp's own second attempt, for GET and the like, on new connections too
    return session


def _text(value: bytes) -> str:
    """Header bytes as text that aiohttp, which encodes as UTF-8, writes as the same bytes; others are taken for latin-1."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _began(error: aiohttp.ClientConnectionError) -> bool:
    """True if a part of an answer came: the provider has read the request. aiohttp's message is then no string."""
    return isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)


class _Stale(Exception):
    """A pooled connection was closed before a byte of the answer came."""


@dataclass(slots=True)
class _Connection:
    """What one call is told of its connection."""

    reused: bool = False


def _context(*, trace_request_ctx: Any) -> Any:
    return trace_request_ctx


async def _reused(
    session: aiohttp.ClientSession, connection: Any, _params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    connection.reused = True


def target(provider: ProviderSettings, path_after_v1: str, query: bytes = b"") -> URL:
    """``baseUrl`` is a prefix of what follows ``/v1``; escapes and query stay as they came."""
    text = f"{provider.base_url.rstrip('/')}/{path_after_v1.lstrip('/')}"
    return URL(f"{text}?{query.decode('latin-1')}" if query else text, encoded=True)


def request_headers(
    provider: ProviderSettings, headers: Iterable[tuple[bytes, bytes]], *, strip_credentials: bool, same_body: bool
) -> RawHeaders:
    """The client's headers as they go upstream.

    Without hop-by-hop headers, those that must be set anew, and all ``x-compaction*``. The provider's own key replaces
    the client's; with ``strip_credentials`` a client's key never goes upstream. ``same_body`` keeps the content encoding.
    """
    listed = list(headers)
    dropped = _connection_names(listed) | _HOP_BY_HOP | _SET_ANEW
    if not same_body:
        dropped |= {b"content-encoding"}
    if strip_credentials or provider.api_key is not None:
        dropped |= _CREDENTIALS
    own = {name.lower().encode(): value.encode() for name, value in provider.headers.items()}
    kept = [
        (name, value)
        for name, value in listed
        if name not in dropped and name not in own and not name.startswith(b"x-compaction")
    ]
    if provider.api_key is not None and b"authorization" not in own:
        kept.append((b"authorization", b"Bearer " + provider.api_key.encode()))
    return (*kept, *own.items())


def response_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The provider's headers as they reach the client: all but hop-by-hop."""
    listed = [(name.lower(), value) for name, value in headers]
    dropped = _connection_names(listed) | _HOP_BY_HOP
    return [(name, value) for name, value in listed if name not in dropped]


def credentials(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """The headers that hold a client's credential."""
    return tuple((name, value) for name, value in headers if name in _CREDENTIALS)


def _connection_names(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    return frozenset(
        token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")
    )
