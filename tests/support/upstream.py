"""A scripted provider on a real socket: it records every byte it is sent and answers as told, oddities included."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

CUT = object()
"""In a reply's chunks: close the connection here, without an end."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request as it arrived. ``headers`` in order, names as sent."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.json["messages"]  # type: ignore[no-any-return]


@dataclass(slots=True)
class Reply:
    """``chunks``: bytes to send, events to wait for, or :data:`CUT`; ``None`` = never answer; status 0 = hang up at once."""

    status: int = 200
    headers: Sequence[tuple[str, str]] = (("content-type", "application/json"),)
    chunks: Sequence[Any] | None = ()
    length: bool = True

    @classmethod
    def json(cls, value: Any, status: int = 200, headers: Sequence[tuple[str, str]] = ()) -> Reply:
        return cls(status, (("content-type", "application/json"), *headers), [json.dumps(value).encode()])

    @classmethod
    def sse(cls, *chunks: Any) -> Reply:
        """Chunks are JSON values, raw bytes, events, or CUT."""
        raw = [b"data: " + json.dumps(c).encode() + b"\n\n" if isinstance(c, dict) else c for c in chunks]
        return cls(200, (("content-type", "text/event-stream"),), raw, length=False)


def answer(text: str = "ok", **more: Any) -> Reply:
    message = {"role": "assistant", "content": text, **more}
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return Reply.json(
        {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    )


def chunk(text: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {} if text is None else {"role": "assistant", "content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice], **more}


@dataclass(slots=True)
class ScriptedUpstream:
    """``chat`` answers requests, ``summary`` private summary calls; both get the request and may be replaced at any time."""

    chat: Callable[[Recorded], Reply] = lambda request: answer()
    summary: Callable[[Recorded], Reply] = lambda request: answer("## State\nSUMMARY-OF-THE-OLD-PART")
    requests: list[Recorded] = field(default_factory=list)
    summaries: list[Recorded] = field(default_factory=list)
    cancelled: int = 0
    close_idle: bool = False
    connections: int = 0
    address: str = ""
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ScriptedUpstream]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=64 * 1024 * 1024)
        self.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for writer in self._writers:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while (request := await self._read(reader)) is not None:
                if not await self._answer(request, reader, writer):
                    break
                if self.close_idle:
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Recorded | None:
        line = await reader.readline()
        if not line:
            return None
        method, target, _ = line.decode("latin-1").split(" ", 2)
        headers = []
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers.append((name.strip(), value.strip()))
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        return Recorded(method, target, tuple(headers), await reader.readexactly(length))

    async def _answer(self, request: Recorded, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        private = request.header("x-compaction-hop") == "1"
        (self.summaries if private else self.requests).append(request)
        reply = (self.summary if private else self.chat)(request)
        gone = asyncio.ensure_future(reader.read(1))
        try:
            if reply.chunks is None:
                await gone
                self.cancelled += 1
                return False
            return await self._send(reply, writer, gone)
        finally:
            gone.cancel()

    async def _send(self, reply: Reply, writer: asyncio.StreamWriter, gone: asyncio.Future[bytes]) -> bool:
        chunks = list(reply.chunks or ())
        if reply.status == 0:
            writer.transport.abort()
            return False
        head = [f"HTTP/1.1 {reply.status} X", *(f"{name}: {value}" for name, value in reply.headers)]
        declared = any(name == "content-length" for name, _ in reply.headers)
        if reply.length and not declared:
            head.append(f"content-length: {sum(len(c) for c in chunks if isinstance(c, bytes))}")
        elif not declared:
            head.append("transfer-encoding: chunked")
        writer.write(("\r\n".join(head) + "\r\n\r\n").encode("latin-1"))
        for piece in chunks:
            if piece is CUT:
                await writer.drain()
                writer.transport.abort()
                return False
            if isinstance(piece, asyncio.Event):
                await writer.drain()
                waiting = asyncio.ensure_future(piece.wait())
                await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if gone.done():
                    self.cancelled += 1
                    return False
                continue
            writer.write(piece if reply.length else b"%x\r\n%s\r\n" % (len(piece), piece))
        if not reply.length:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
