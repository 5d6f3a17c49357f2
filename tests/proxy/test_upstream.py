"""The one client of providers: which connection a call goes over, when it is sent again, and its bytes on the wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from compaction_proxy.config import ProviderSettings, Secret, Timeouts
from compaction_proxy.errors import UpstreamTimeout, UpstreamUnreachable
from compaction_proxy.upstream import RawHeaders, Response, Upstream, request_headers, target
from support.proxy import until

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
SILENCE = None
HALF = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"
FIRST_BYTES = b"HTTP/1.1 200 OK\r\ncontent-ty"
SECONDS = Timeouts(connect_seconds=5.0, first_byte_seconds=5.0, idle_seconds=5.0)


@dataclass(slots=True)
class Wire:
    """A provider that is told, for the n-th request of each connection, which bytes to write.

    Behind ``OK`` the connection stays open, behind ``HALF`` and ``SILENCE`` nothing more comes, behind all else it ends.

    ``together`` holds back the first answers until so many connections are open.
    """

    says: Callable[[int], bytes | None]
    together: int = 1
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0
    address: str = ""
    _gathered: asyncio.Event = field(default_factory=asyncio.Event)
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for writer in self._open:
                writer.transport.abort()
            await until(lambda: not self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        if self.connections >= self.together:
            self._gathered.set()
        number = 0
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                self.heads.append(head)
                await self._gathered.wait()
                number += 1
                said = self.says(number)
                writer.write(said or b"")
                await writer.drain()
                if said in (SILENCE, HALF):
                    await reader.read(1)
                if said != OK:
                    break
        writer.close()
        self._open.discard(writer)


def provider(address: str, **seconds: float) -> ProviderSettings:
    timeouts = replace(SECONDS, **seconds)
    return ProviderSettings("main", "openai", f"{address}/v1", None, {}, timeouts)


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    try:
        yield upstream
    finally:
        await upstream.close()


async def called(upstream: Upstream, to: ProviderSettings, method: str = "POST", headers: RawHeaders = ()) -> int:
    """Send a small request, read the answer whole; the status."""
    body = b"{}" if method == "POST" else b""
    return await read(await upstream.send(to, method, "chat/completions", b"", headers, body))


async def read(response: Response) -> int:
    async for _ in response.chunks():
        pass
    response.close()
    return response.status


def then(*answers: bytes | None) -> Callable[[int], bytes | None]:
    """The n-th answer for the n-th request of a connection; the last one for all further."""
    return lambda number: answers[min(number, len(answers)) - 1]


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_request_on_a_dead_pooled_connection_is_sent_once_more(method: str) -> None:
    wire = Wire(then(OK, b""))
    async with wire.running(), opened() as upstream:
        assert await called(upstream, provider(wire.address)) == 200
        assert await called(upstream, provider(wire.address), method) == 200
    assert len(wire.heads) == 3
    assert wire.connections == 2


async def test_the_second_attempt_never_goes_over_another_dead_connection() -> None:
    wire = Wire(then(OK, b""), together=4)
    async with wire.running(), opened() as upstream:
        await asyncio.gather(*(called(upstream, provider(wire.address)) for _ in range(4)))
        assert await called(upstream, provider(wire.address)) == 200
    assert len(wire.heads) == 4 + 2
    assert wire.connections == 5


async def test_the_connection_of_a_second_attempt_is_not_kept() -> None:
    wire = Wire(then(OK, b""))
    async with wire.running(), opened() as upstream:
        for _ in range(6):
            assert await called(upstream, provider(wire.address)) == 200
    assert len(wire.heads) == 9, "every second one found a dead connection"


@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize("said", [b"", FIRST_BYTES, b"HTTP/1.1 2"], ids=["nothing", "half a head", "half a line"])
async def test_a_new_connection_that_breaks_is_not_tried_again(method: str, said: bytes) -> None:
    wire = Wire(then(said))
    async with wire.running(), opened() as upstream:
        with pytest.raises(UpstreamUnreachable):
            await called(upstream, provider(wire.address), method)
    assert len(wire.heads) == 1


@pytest.mark.parametrize("said", [FIRST_BYTES, b"HTTP/1.1 2"], ids=["half a head", "half a line"])
async def test_a_call_is_not_sent_again_once_a_byte_of_an_answer_came(said: bytes) -> None:
    wire = Wire(then(OK, said))
    async with wire.running(), opened() as upstream:
        await called(upstream, provider(wire.address))
        with pytest.raises(UpstreamUnreachable):
            await called(upstream, provider(wire.address))
    assert len(wire.heads) == 2


async def test_a_call_is_not_sent_again_after_a_time_out() -> None:
    wire = Wire(then(OK, SILENCE))
    async with wire.running(), opened() as upstream:
        await called(upstream, provider(wire.address))
        with pytest.raises(UpstreamTimeout, match=r"within 0\.2 seconds"):
            await called(upstream, provider(wire.address, first_byte_seconds=0.2))
    assert len(wire.heads) == 2


async def test_the_second_attempt_is_the_last() -> None:
    answers = iter([OK, b"", b""])
    wire = Wire(lambda number: next(answers))
    async with wire.running(), opened() as upstream:
        await called(upstream, provider(wire.address))
        with pytest.raises(UpstreamUnreachable):
            await called(upstream, provider(wire.address))
    assert len(wire.heads) == 3


async def test_a_silence_in_mid_answer_is_a_time_out() -> None:
    wire = Wire(then(HALF))
    async with wire.running(), opened() as upstream:
        response = await upstream.send(provider(wire.address, idle_seconds=0.2), "GET", "models", b"", (), b"")
        got = []
        with pytest.raises(UpstreamTimeout, match=r"for 0\.2 seconds"):
            async for chunk in response.chunks():
                got.append(chunk)
        response.close()
    assert got == [b"half"]


async def test_header_bytes_reach_the_provider_as_they_came() -> None:
    headers = (
        (b"x-title", "caf\u00e9 \u4e0a".encode()),
        (b"x-twice", b"1"),
        (b"x-twice", b"2"),
        (b"accept-encoding", b"zstd"),
    )
    wire = Wire(then(OK))
    async with wire.running(), opened() as upstream:
        await called(upstream, provider(wire.address), headers=headers)
    lines = wire.heads[0].rstrip().split(b"\r\n")[1:]
    ours = [line for line in lines if line.partition(b":")[0].lower() not in (b"host", b"content-length")]
    assert ours == [name + b": " + value for name, value in headers], "all of the client's, none invented"


def headers_of(given: Sequence[tuple[bytes, bytes]], *, key: str | None = None, **more: bool) -> RawHeaders:
    own = {"X-Org": Secret("\u00f6rg")}
    to = ProviderSettings("main", "openai", "http://up/v1", Secret(key) if key else None, own, SECONDS)
    return request_headers(to, given, **{"strip_credentials": False, "same_body": True, **more})


def test_credentials_follow_the_providers_key_and_the_client_keys() -> None:
    given = [(b"authorization", b"Bearer c"), (b"x-api-key", b"c"), (b"api-key", b"c"), (b"x-org", b"theirs")]
    own = (b"x-org", "\u00f6rg".encode())
    assert headers_of(given) == (*given[:3], own)
    assert headers_of(given, strip_credentials=True) == (own,)
    with_key = headers_of(given, key="provider")
    assert with_key == ((b"authorization", b"Bearer provider"), own)
    assert headers_of(given, key="provider", strip_credentials=True) == with_key


def test_a_changed_body_loses_the_encoding_of_the_old_one() -> None:
    given = [(b"content-encoding", b"gzip"), (b"content-type", b"application/json")]
    assert given[0] in headers_of(given)
    assert given[0] not in headers_of(given, same_body=False)
    assert given[1] in headers_of(given, same_body=False)


@pytest.mark.parametrize("base", ["http://up/api/v3", "http://up/api/v3/"])
def test_path_and_query_keep_their_escapes(base: str) -> None:
    to = ProviderSettings("main", "openai", base, None, {}, SECONDS)
    assert str(target(to, "/files/a%2Fb%20c", b"x=%2F&y=a+b&z")) == "http://up/api/v3/files/a%2Fb%20c?x=%2F&y=a+b&z"
