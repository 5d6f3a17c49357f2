"""Usage from the end of an answer, and answers that have no body."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.relay import Usage, find_usage
from support.proxy import config, running_proxy
from support.upstream import Reply, ScriptedUpstream, chunk

BILLED = {"prompt_tokens": 100, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 64}}


def sse(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (json.dumps({"choices": [], "usage": BILLED}).encode(), Usage(100, 20, 64)),
        (json.dumps({"usage": BILLED, "choices": []}, indent=2).encode(), Usage(100, 20, 64)),
        (sse({"choices": [1], "usage": None}, {"choices": [], "usage": BILLED}), Usage(100, 20, 64)),
        (sse({"usage": {"prompt_tokens": 1}}, {"usage": BILLED}, {"usage": None}), Usage(100, 20, 64)),
        (b'{"usage":{"input_tokens":7,"output_tokens":3,"input_tokens_details":{"cached_tokens":2}}}', Usage(7, 3, 2)),
        (b'{"usage":{"prompt_tokens":"7","completion_tokens":-1,"prompt_tokens_details":[]}}', Usage()),
        (b'{"usage":{"prompt_tokens":true,"completion_tokens":1.5}}', Usage()),
        (json.dumps({"content": '"usage": {"prompt_tokens": 9}'}).encode(), None),
        (b'{"usage": {"prompt_tokens": 100, "comple', None),
        (b'{"usage": null}', None),
        (b"\xff\xfe", None),
        (b"", None),
    ],
)
def test_usage_is_what_the_provider_said_last(tail: bytes, usage: Usage | None) -> None:
    assert find_usage(tail) == usage


@given(st.binary(max_size=200))
def test_usage_is_looked_for_in_anything_without_an_error(rest: bytes) -> None:
    found = find_usage(b'"usage":{' + rest)
    assert found is None or isinstance(found, Usage)


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(5):
            yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def test_an_answer_without_a_body_keeps_the_connection() -> None:
    upstream = ScriptedUpstream(chat=lambda request: Reply(304, (("etag", "x"), ("content-length", "200"))))
    async with (
        upstream.running(),
        running_proxy(config(upstream)) as proxy,
        connected(proxy.address) as (reader, writer),
    ):
        for _ in range(2):
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nif-none-match: x\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 304 Not Modified\r\netag: x\r\n\r\n"


async def test_header_lines_and_encoded_bytes_of_an_answer_are_the_providers() -> None:
    packed = b"\x1f\x8b not really gzip"
    headers = (("content-encoding", "gzip"), ("x-a", "1"), ("x-a", "2"), ("connection", "x-hop"), ("x-hop", "here"))
    upstream = ScriptedUpstream(chat=lambda request: Reply(200, headers, [packed]))
    async with (
        upstream.running(),
        running_proxy(config(upstream)) as proxy,
        connected(proxy.address) as (reader, writer),
    ):
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(packed)) == packed
    assert head.rstrip().split(b"\r\n")[1:] == [
        b"content-encoding: gzip",
        b"x-a: 1",
        b"x-a: 2",
        b"content-length: %d" % len(packed),
    ]


async def test_the_clean_end_of_an_answer_adds_nothing_to_it() -> None:
    """A provider that ends without a finish_reason and without ``[DONE]``: so it reaches the client."""
    upstream = ScriptedUpstream(chat=lambda request: Reply.sse(chunk("half")))
    async with upstream.running(), running_proxy(config(upstream)) as proxy:
        got = await proxy.post({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True})
    assert got.body == b"data: " + json.dumps(chunk("half")).encode() + b"\n\n"
