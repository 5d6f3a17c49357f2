"""Requests as values, read from raw ASGI: one buffer for the body, headers as they came. And a watch for clients that leave."""

from __future__ import annotations

import asyncio
import gzip
import io
import zlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from compaction_proxy.errors import BodyTooLarge

T = TypeVar("T")
_DECODE_IN_LOOP_BYTES = 64 * 1024
_PIECE = 256 * 1024


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Args:
        path: decoded; ``raw_path`` as it came, without the query.
        query: the query string as it came, without the question mark.
        headers: names in lower case, in order, duplicates kept.
        sent: the body as it came; ``body`` is it without a content encoding, ``None`` where that is not understood.
        client: the peer's address.
    """

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    sent: bytes
    body: bytes | None
    client: str
    scheme: str = "http"

    def header(self, name: str) -> str | None:
        """The value of a header, without surrounding space; ``None`` where absent.

        Lines of the same name are one list, joined by commas (RFC 9110, 5.3): some proxies add their ``X-Forwarded-For``
        as a line of its own behind the one that a client sent.
        """
        wanted = name.lower().encode("ascii")
        values = [value.strip() for key, value in self.headers if key == wanted]
        return b", ".join(values).decode("latin-1") if values else None


async def read_request(scope: Scope, receive: Receive, max_body_bytes: int) -> Request:
    """Read a request whole. Raises :class:`BodyTooLarge`, :class:`ClientGone`."""
    headers = tuple((name.lower(), value) for name, value in scope["headers"])
    declared = next((value for name, value in headers if name == b"content-length"), b"")
    if declared.isdigit() and int(declared) > max_body_bytes:
        raise _too_large(max_body_bytes)
    sent = await _read_body(receive, max_body_bytes)
    encoding = b",".join(value for name, value in headers if name == b"content-encoding").strip().lower()
    body = await _decoded(sent, encoding.decode("latin-1"), max_body_bytes)
    return Request(
        method=scope["method"],
        path=scope["path"],
        raw_path=scope.get("raw_path") or scope["path"].encode(),
        query=scope.get("query_string", b""),
        headers=headers,
        sent=sent,
        body=body,
        client=(scope.get("client") or ("", 0))[0],
        scheme=scope.get("scheme", "http"),
    )


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and cancel it, upstream call and all, as soon as the client leaves. Raises :class:`ClientGone` then.

    No stock stack watches before the first byte of the answer; the provider would go on and bill.
    """
    running = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled() and running.exception() is None:
            return running.result()
        raise ClientGone
    finally:
        for task in (running, watching):
            if not task.done():
                task.cancel()
        await asyncio.wait({running, watching})
        if not watching.cancelled():
            watching.exception()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(receive: Receive, max_body_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_body_bytes:
            raise _too_large(max_body_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(max_body_bytes: int) -> BodyTooLarge:
    message = f"the request body is larger than server.maxBodyBytes ({max_body_bytes} bytes)"
    return BodyTooLarge(message)


async def _decoded(sent: bytes, encoding: str, max_body_bytes: int) -> bytes | None:
    if encoding in ("", "identity"):
        return sent
    if encoding not in ("gzip", "x-gzip", "deflate"):
        return None
    if len(sent) <= _DECODE_IN_LOOP_BYTES // 8:
        return _decode(sent, encoding, max_body_bytes)
    return await asyncio.to_thread(_decode, sent, encoding, max_body_bytes)


def _decode(sent: bytes, encoding: str, max_body_bytes: int) -> bytes | None:
    """Bounded: a small body that unpacks to more than the limit is refused, not unpacked."""
    pieces: list[bytes] = []
    size = 0
    try:
        for piece in _inflated(sent, encoding):
            size += len(piece)
            if size > max_body_bytes:
                raise _too_large(max_body_bytes)
            pieces.append(piece)
    except (OSError, EOFError, zlib.error):
        return None
    return b"".join(pieces)


def _inflated(sent: bytes, encoding: str) -> Any:
    if encoding == "deflate":
        inflate = zlib.decompressobj()
        pending = sent
        while pending:
            yield inflate.decompress(pending, _PIECE)
            pending = inflate.unconsumed_tail
        yield inflate.flush()
        if not inflate.eof:
            message = "the deflate stream is cut off"
            raise EOFError(message)
        return
    with gzip.GzipFile(fileobj=io.BytesIO(sent)) as file:
        while piece := file.read(_PIECE):
            yield piece
