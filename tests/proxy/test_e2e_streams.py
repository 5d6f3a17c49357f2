"""Streams that end badly, clients that leave, and what is told about both."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from test_e2e_compaction import CLEAR, SUMMARIZE, body

from support.bench import loop, turns, user
from support.proxy import Running, config, running_proxy, until
from support.upstream import CUT, Reply, ScriptedUpstream, answer, chunk

LONG = [user(0), *loop(1, 20, 150)]
DONE = b"data: [DONE]\n\n"
ERROR = {"error": {"message": "overloaded", "type": "server_error"}}


def spans_named(proxy: Running, spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    proxy.proxy.services().telemetry._tracers.force_flush()  # type: ignore[union-attr]
    return [span for span in spans.get_finished_spans() if span.name == name]


@pytest.mark.parametrize(
    "chunks",
    [
        [ERROR, DONE],
        [chunk("a"), ERROR],
        [chunk("a"), chunk("b"), {**chunk(), "choices": [], "usage": {"prompt_tokens": 5}}, DONE],
        [b": ping\n\n", b"event: error\ndata: {}\n\n", b"data: x\r\n\r\n"],
        [chunk("no end")],
    ],
    ids=["error first", "error later", "usage without choices", "odd frames", "no DONE"],
)
async def test_frames_are_the_providers_whatever_they_say(chunks: list[Any]) -> None:
    upstream = ScriptedUpstream(chat=lambda request: Reply.sse(*chunks))
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR)) as proxy:
        got = await proxy.post(body(LONG, stream=True))
    assert got.said.startswith("compacted")
    assert (got.status, got.body) == (200, b"".join(Reply.sse(*chunks).chunks or ()))
    assert "stream_options" not in upstream.requests[0].json, "no usage is asked for on behalf of the client"


async def test_a_stream_that_breaks_off_is_not_retried_and_the_sdk_sees_it() -> None:
    upstream = ScriptedUpstream(chat=lambda request: Reply.sse(chunk("a"), chunk("b"), CUT))
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=CLEAR)) as proxy,
        proxy.sdk() as client,
    ):
        creating: Any = client.chat.completions.create
        said: list[str] = []
        with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
            async for event in await creating(model="m", messages=LONG, stream=True):
                said.append(event.choices[0].delta.content)
        assert said == ["a", "b"], "once"
        assert len(upstream.requests) == 1
        upstream.chat = lambda request: answer("fine")
        assert (await creating(model="m", messages=LONG)).choices[0].message.content == "fine", "the proxy goes on"


async def test_the_sdk_sees_the_providers_errors_as_its_own() -> None:
    error = {"error": {"message": "slow down", "type": "rate", "code": "rate_limit_exceeded"}}
    upstream = ScriptedUpstream(
        chat=lambda request: Reply.json(error, 429, [("retry-after", "17"), ("x-request-id", "r1")])
    )
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=CLEAR)) as proxy,
        proxy.sdk() as client,
    ):
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as raised:
                await client.chat.completions.create(model="m", messages=LONG, stream=stream)  # type: ignore[call-overload]
            assert raised.value.code == "rate_limit_exceeded"
            assert raised.value.response.headers["retry-after"] == "17"
            assert raised.value.request_id == "r1"
    assert len(upstream.requests) == 2


@pytest.mark.parametrize("first_chunk", [False, True], ids=["before the first byte", "in mid-stream"])
async def test_the_span_of_a_call_whose_client_left_ends_with_what_is_known(first_chunk: bool) -> None:
    spans = InMemorySpanExporter()
    never = asyncio.Event()
    reply = Reply.sse(chunk("a"), never) if first_chunk else Reply(chunks=None)
    upstream = ScriptedUpstream(chat=lambda request: reply)
    async with upstream.running():
        text = config(upstream, policy=CLEAR)
        async with running_proxy(text, exporter=spans) as proxy, aiohttp.ClientSession() as session:
            asking = asyncio.ensure_future(
                session.post(proxy.address + "/v1/chat/completions", json=body(LONG, stream=True))
            )
            await until(lambda: len(upstream.requests) == 1)
            if first_chunk:
                reply_of_proxy = await asking
                assert await reply_of_proxy.content.readany()
                reply_of_proxy.close()
            else:
                asking.cancel()
                await asyncio.wait({asking})
            await until(lambda: upstream.cancelled == 1)
            await until(lambda: bool(spans_named(proxy, spans, "POST /v1/chat/completions")))
            (call,) = spans_named(proxy, spans, "chat m")
            (server,) = spans_named(proxy, spans, "POST /v1/chat/completions")
            assert (call.attributes or {})["error.type"] == "client-disconnect"
            assert (server.attributes or {})["compaction.outcome"] == "compacted"
            assert (await proxy.get("/healthz")).status == 200


@pytest.mark.parametrize(("status", "outcome"), [(200, "compacted"), (500, "unchanged")])
async def test_a_compaction_that_failed_is_told_apart_from_one_that_was_not_due(status: int, outcome: str) -> None:
    spans = InMemorySpanExporter()
    upstream = ScriptedUpstream(
        summary=lambda request: answer("## State\nfine") if status == 200 else Reply.json(ERROR, status)
    )
    chats = [[*turns(0, 40, 60), user(99)], [user(0, 600)]]
    async with upstream.running():
        text = config(upstream, policy=SUMMARIZE)
        async with running_proxy(text, exporter=spans) as proxy:
            for chat in chats:
                await proxy.post(body(chat))
            metrics = (await proxy.get("/metrics")).body.decode()
            told = [dict(span.attributes or {}) for span in spans_named(proxy, spans, "POST /v1/chat/completions")]
    assert [each["compaction.outcome"] for each in told] == [outcome, "unchanged"]
    reason = "over-threshold" if status == 200 else "summarizer-failed"
    assert [each["compaction.reason"] for each in told] == [reason, "under-threshold"]
    assert ('context_compaction_failed_total{reason="summarizer-failed"} 1' in metrics) is (status == 500)
    assert ("context_compaction_triggered_total{" in metrics) is (status == 200)
    assert 'context_compaction_skipped_total{reason="under-threshold"} 1' in metrics


async def test_no_header_goes_out_while_a_stream_waits_for_its_summary() -> None:
    """So that the provider's own status still reaches the client."""
    release = asyncio.Event()
    summary = answer("## State\nlate")
    summary.chunks = [release, *(summary.chunks or ())]
    upstream = ScriptedUpstream(summary=lambda request: summary, chat=lambda request: Reply.json(ERROR, 503))
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE)) as proxy:
        asking = asyncio.ensure_future(proxy.post(body([*turns(0, 40, 60), user(99)], stream=True)))
        await until(lambda: len(upstream.summaries) == 1)
        assert not asking.done()
        assert upstream.requests == []
        release.set()
        got = await asking
    assert (got.status, json.loads(got.body)) == (503, ERROR)
    assert got.said == "compacted; reason=over-threshold"
