"""Requests as values: headers, bodies and their encodings, limits; and the watch for clients that leave."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import pytest

from compaction_proxy.errors import BodyTooLarge
from compaction_proxy.http import ClientGone, Request, read_request, run_until_disconnect

LIMIT = 1_000_000
BODY = b'{"model": "m", "messages": []}' * 2_000


async def received(body: bytes, *headers: tuple[bytes, bytes], limit: int = LIMIT, pieces: int = 1) -> Request:
    size = len(body) // pieces + 1
    messages = [
        {"type": "http.request", "body": body[at : at + size], "more_body": at + size < len(body)}
        for at in range(0, max(len(body), 1), size)
    ]

    async def receive() -> Any:
        return messages.pop(0)

    scope = {"method": "POST", "path": "/v1/x", "headers": list(headers), "client": ("10.0.0.7", 1)}
    return await read_request(scope, receive, limit)


def encoded(how: bytes) -> tuple[bytes, bytes]:
    return (b"content-encoding", how)


async def test_a_body_in_pieces_is_one_body() -> None:
    request = await received(BODY, pieces=7)
    assert request.sent == request.body == BODY
    assert request.client == "10.0.0.7"


@pytest.mark.parametrize(
    ("how", "sent"),
    [
        (b"gzip", gzip.compress(BODY)),
        (b"X-GZIP", gzip.compress(BODY)),
        (b"gzip", gzip.compress(BODY[:99]) + gzip.compress(BODY[99:])),
        (b"deflate", zlib.compress(BODY)),
        (b"identity", BODY),
    ],
    ids=["gzip", "x-gzip", "gzip in two members", "deflate", "identity"],
)
async def test_an_encoded_body_is_read_and_kept_as_sent(how: bytes, sent: bytes) -> None:
    request = await received(sent, encoded(how))
    assert request.sent == sent
    assert request.body == BODY


@pytest.mark.parametrize(
    ("how", "sent"),
    [
        (b"br", BODY),
        (b"gzip, gzip", gzip.compress(gzip.compress(BODY))),
        (b"gzip", BODY),
        (b"deflate", BODY),
        (b"gzip", gzip.compress(BODY)[:-9]),
        (b"deflate", zlib.compress(BODY)[:-4]),
        (b"gzip", gzip.compress(BODY)[:5]),
    ],
    ids=["unknown", "twice", "not gzip", "not deflate", "gzip cut off", "deflate without its checksum", "half a head"],
)
async def test_what_cannot_be_decoded_is_not_read_and_kept_as_sent(how: bytes, sent: bytes) -> None:
    request = await received(sent, encoded(how))
    assert request.sent == sent
    assert request.body is None


@pytest.mark.parametrize("how", [b"gzip", b"deflate"])
async def test_the_limit_holds_for_what_a_body_unpacks_to(how: bytes) -> None:
    packed = (gzip.compress if how == b"gzip" else zlib.compress)(b"0" * (LIMIT + 1))
    with pytest.raises(BodyTooLarge, match=str(LIMIT)):
        await received(packed, encoded(how))
    packed = (gzip.compress if how == b"gzip" else zlib.compress)(b"0" * LIMIT)
    assert len((await received(packed, encoded(how))).body or b"") == LIMIT


async def test_a_declared_length_over_the_limit_is_refused_before_a_byte_is_read() -> None:
    with pytest.raises(BodyTooLarge, match="maxBodyBytes"):
        await received(b"", (b"content-length", b"1000001"))


async def test_an_undeclared_length_over_the_limit_is_refused() -> None:
    assert (await received(b"x" * 10, limit=10, pieces=3)).sent == b"x" * 10
    with pytest.raises(BodyTooLarge):
        await received(b"x" * 11, limit=10, pieces=3)


async def test_a_client_that_leaves_while_it_sends_is_gone() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        await read_request({"method": "POST", "path": "/", "headers": []}, receive, LIMIT)


async def test_lines_of_the_same_name_are_one_list() -> None:
    request = await received(b"", (b"X-Forwarded-For", b"127.0.0.1"), (b"x-forwarded-for", b" 8.8.8.8 "), (b"x", b""))
    assert request.header("X-Forwarded-For") == "127.0.0.1, 8.8.8.8"
    assert request.header("x") == ""
    assert request.header("absent") is None


async def test_work_is_cancelled_when_the_client_leaves_and_cleans_up_first() -> None:
    left, cleaned = asyncio.Event(), asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        left.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    with pytest.raises(ClientGone):
        await run_until_disconnect(receive, work())
    assert cleaned.is_set()


async def test_work_that_ends_gives_its_result_or_its_error() -> None:
    async def receive() -> Any:
        await asyncio.Event().wait()

    async def result() -> int:
        return 7

    async def error() -> None:
        raise ValueError("its own")

    assert await run_until_disconnect(receive, result()) == 7
    with pytest.raises(ValueError, match="its own"):
        await run_until_disconnect(receive, error())


async def test_a_shutdown_cancels_the_work_too() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.ensure_future(run_until_disconnect(receive, work()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
