"""HTTP around the proxy: what passes unchanged, who may ask, and what never leaks."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from test_e2e_compaction import CLEAR, SUMMARIZE, body

from support.bench import loop, turns, user
from support.proxy import config, running_proxy, until
from support.upstream import CUT, Reply, ScriptedUpstream, answer, chunk

LONG = [*turns(0, 60, 40), user(500)]


async def test_status_body_and_headers_of_upstream_errors_pass_unchanged() -> None:
    error = {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}
    more = [
        ("retry-after", "17"),
        ("x-ratelimit-remaining-requests", "0"),
        ("set-cookie", "a=1"),
        ("set-cookie", "b=2"),
    ]
    upstream = ScriptedUpstream(chat=lambda request: Reply.json(error, 429, more))
    async with upstream.running(), running_proxy(config(upstream)) as proxy:
        async with proxy.http.post(proxy.address + "/v1/chat/completions", json=body([user(0, 400)])) as reply:
            assert reply.status == 429
            assert reply.headers["retry-after"] == "17"
            assert reply.headers.getall("set-cookie") == ["a=1", "b=2"]
            assert await reply.json() == error
        assert len(upstream.requests) == 1, "never retried"


@pytest.mark.parametrize(
    "reply",
    [
        Reply.json({"error": {"message": "network lost", "code": 429}}),
        Reply.sse({"error": {"message": "overloaded"}}),
        Reply(200, (("content-type", "text/html"),), [b"<html>\x00\xff"]),
        Reply(200, (("content-type", "application/json"), ("content-encoding", "gzip")), [gzip.compress(b'{"a":1}')]),
        Reply(302, (("location", "/elsewhere"),), [b""]),
    ],
    ids=["error in a 200", "error as first event", "not json", "gzip", "redirect"],
)
async def test_whatever_the_provider_answers_reaches_the_client(reply: Reply) -> None:
    upstream = ScriptedUpstream(chat=lambda request: reply)
    async with (
        upstream.running(),
        running_proxy(config(upstream)) as proxy,
        proxy.http.post(
            proxy.address + "/v1/chat/completions", json=body([user(0, 400)]), allow_redirects=False
        ) as got,
    ):
        assert got.status == reply.status
        expected = b"".join(reply.chunks or ())
        assert await got.read() == (
            gzip.decompress(expected) if dict(reply.headers).get("content-encoding") else expected
        )


async def test_a_stream_passes_byte_by_byte_as_it_comes() -> None:
    gates = [asyncio.Event() for _ in range(3)]
    text = b"data: " + json.dumps(chunk("a\u00e9b")).encode() + b"\n\n"
    upstream = ScriptedUpstream(
        chat=lambda request: Reply.sse(
            *[text[at : at + 1] for at in range(len(text))], gates[0], text, gates[1], b"data: [DONE]\n\n"
        )
    )
    async with (
        upstream.running(),
        running_proxy(config(upstream)) as proxy,
        proxy.http.post(proxy.address + "/v1/chat/completions", json=body([user(0, 400)], stream=True)) as reply,
    ):
        assert await reply.content.readexactly(len(text)) == text
        gates[0].set()
        assert await reply.content.readexactly(len(text)) == text
        gates[1].set()
        assert await reply.content.read() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("length", [True, False])
async def test_an_answer_that_breaks_off_never_looks_complete(length: bool) -> None:
    reply = Reply.sse(chunk("half"), CUT)
    if length:
        reply = Reply(200, (("content-type", "application/json"), ("content-length", "1000")), [b'{"half":', CUT])
    upstream = ScriptedUpstream(chat=lambda request: reply)
    async with upstream.running(), running_proxy(config(upstream)) as proxy:
        raw = await asyncio.to_thread(_raw_post, proxy.address, json.dumps(body([user(0, 400)])).encode())
        assert b"200" in raw.split(b"\r\n", 1)[0]
        assert b"half" in raw
        assert not raw.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in raw
        assert b'finish_reason": "stop' not in raw


def _raw_post(address: str, data: bytes) -> bytes:
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        received = b""
        while True:
            try:
                piece = connection.recv(65536)
            except ConnectionError:
                return received
            if not piece:
                return received
            received += piece


async def test_one_retry_on_a_stale_connection_and_on_nothing_else() -> None:
    upstream = ScriptedUpstream(close_idle=True)
    async with upstream.running(), running_proxy(config(upstream)) as proxy:
        for _ in range(60):
            assert (await proxy.post(body([user(0, 400)]))).status == 200
        assert len(upstream.requests) == 60
    upstream = ScriptedUpstream(chat=lambda request: Reply(0))
    async with upstream.running(), running_proxy(config(upstream)) as proxy:
        got = await proxy.post(body([user(0, 400)]))
        assert got.status == 502
        assert len(upstream.requests) == 1


async def test_an_unreachable_or_silent_provider_is_a_clear_error() -> None:
    upstream = ScriptedUpstream(chat=lambda request: Reply(chunks=None))
    async with upstream.running():
        slow = config(upstream, provider=", timeouts: {firstByteSeconds: 0.2}")
        async with running_proxy(slow) as proxy:
            got = await proxy.post(body([user(0, 400)]))
            error = json.loads(got.body)["error"]
            assert (got.status, error["type"], error["code"]) == (504, "compaction_proxy_error", "upstream_timeout")
    async with running_proxy(slow) as proxy:
        got = await proxy.post(body([user(0, 400)]))
        assert (got.status, json.loads(got.body)["error"]["code"]) == (502, "upstream_unreachable")


async def test_hop_by_hop_headers_and_ours_stay_here_and_all_others_pass() -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, provider=', headers: {x-team: "blue"}')) as proxy:
        await proxy.post(
            body([user(0, 400)]),
            {
                "connection": "keep-alive, x-foo",
                "x-foo": "1",
                "x-bar": "2",
                "x-compaction": "on",
                "x-compaction-session": "s",
                "x-session-id": "theirs",
                "te": "trailers",
                "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            },
            path="/v1/chat/completions?api-version=1&q=a%2Fb",
        )
    got = upstream.requests[0]
    assert got.target == "/v1/chat/completions?api-version=1&q=a%2Fb"
    assert (got.header("x-bar"), got.header("x-session-id"), got.header("x-team")) == ("2", "theirs", "blue")
    for name in ("x-foo", "te", "x-compaction", "x-compaction-session"):
        assert got.header(name) is None
    assert got.header("authorization") == "Bearer sk-client"
    assert "4bf92f3577b34da6a3ce929d0e0e4736" in (got.header("traceparent") or "")


async def test_other_paths_are_forwarded_as_they_are() -> None:
    upstream = ScriptedUpstream(chat=lambda request: Reply.json({"object": "list", "data": []}))
    async with upstream.running(), running_proxy(config(upstream)) as proxy:
        assert json.loads((await proxy.get("/v1/models?x=%20y")).body) == {"object": "list", "data": []}
        await proxy.post(b"\x00\xffraw", {"content-type": "audio/wav"}, path="/v1/audio/transcriptions")
        assert (upstream.requests[0].method, upstream.requests[0].target) == ("GET", "/v1/models?x=%20y")
        assert upstream.requests[1].body == b"\x00\xffraw"
        missing = await proxy.get("/nothing")
        assert (missing.status, json.loads(missing.body)["error"]["code"]) == (404, "not_found")
        assert (await proxy.get("/healthz")).status == 200


async def test_bodies_are_bounded_with_a_clear_error_and_large_ones_pass() -> None:
    upstream = ScriptedUpstream()
    async with (
        upstream.running(),
        running_proxy(config(upstream, server=", maxBodyBytes: 25000000", limit=100000000)) as proxy,
    ):
        large = json.dumps(body([user(0, 400), {"role": "user", "content": "y" * 20_000_000}])).encode()
        assert (await proxy.post(large)).status == 200
        assert upstream.requests[0].body == large
        got = await proxy.post(b"z" * 25_000_001)
        assert got.status == 413
        assert "25000000" in json.loads(got.body)["error"]["message"]
        bomb = gzip.compress(b" " * 30_000_000)
        assert (await proxy.post(bomb, {"content-encoding": "gzip"})).status == 413


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({"x-compaction": "always"}, 400, "off, shadow, on, force"),
        ({"x-compaction-policy": "nope"}, 400, "balanced"),
        ({"x-compaction-hop": "2"}, 508, "baseUrl"),
    ],
)
async def test_bad_requests_are_told_what_would_be_right(headers: dict[str, str], status: int, says: str) -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream)) as proxy:
        got = await proxy.post(body([user(0, 400)]), headers)
        assert got.status == status
        assert says in json.loads(got.body)["error"]["message"]
        assert upstream.requests == []


async def test_client_keys_name_tenants_and_never_go_upstream() -> None:
    upstream = ScriptedUpstream()
    keys = ', clientKeys: [{name: a, key: "key-a", policies: [tested]}, {name: b, key: "key-b"}]'
    async with upstream.running():
        text = config(upstream, server=keys, tenant="auto", policy=SUMMARIZE, provider=', apiKey: "sk-provider"')
        async with running_proxy(text) as proxy:
            assert (await proxy.post(body(LONG), {"authorization": "Bearer nobody"})).status == 401
            assert (await proxy.get("/v1/models")).status == 401
            a, b = {"authorization": "Bearer key-a"}, {"authorization": "Bearer key-b"}
            assert (await proxy.post(body(LONG), {**a, "x-compaction-policy": "balanced"})).status == 403
            first = await proxy.post(body(LONG), {**a, "x-session-id": "same"})
            second = await proxy.post(body(LONG), {**b, "x-session-id": "same"})
            assert first.said.startswith("compacted")
            assert second.said.startswith("compacted"), "no tenant is served another's record"
            assert len(upstream.summaries) == 2
            for request in (*upstream.requests, *upstream.summaries):
                assert request.header("authorization") == "Bearer sk-provider"
                assert b"key-a" not in request.body


async def test_credentials_are_tenants_of_their_own() -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE, tenant="credential")) as proxy:
        for key in ("sk-one", "sk-two"):
            got = await proxy.post(body(LONG), {"authorization": f"Bearer {key}", "x-session-id": "s1"})
            assert got.said.startswith("compacted")
        assert [request.header("authorization") for request in upstream.summaries] == ["Bearer sk-one", "Bearer sk-two"]


@pytest.mark.parametrize("own_key", [True, False])
async def test_a_summarizer_elsewhere_never_gets_the_clients_credential(own_key: bool) -> None:
    upstream, elsewhere = ScriptedUpstream(), ScriptedUpstream()
    async with upstream.running(), elsewhere.running():
        policy = SUMMARIZE.replace("ledger: false", "ledger: false, summarizerModel: small")
        key = ', apiKey: "sk-elsewhere"' if own_key else ""
        text = config(upstream, policy=policy)
        text = text.replace(
            "models:\n",
            f'  other: {{kind: openai, baseUrl: "{elsewhere.address}/v1"{key}}}\nmodels:\n  - {{match: small, provider: other, policy: tested}}\n',
        )
        async with running_proxy(text) as proxy:
            assert (await proxy.post(body(LONG))).said.startswith("compacted")
        assert elsewhere.summaries[0].header("authorization") == ("Bearer sk-elsewhere" if own_key else None)
        assert upstream.summaries == []


async def test_no_text_and_no_key_in_spans_logs_and_metrics(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    spans = InMemorySpanExporter()
    upstream = ScriptedUpstream(summary=lambda request: answer("## State\nSECRET-SUMMARY"))
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE), exporter=spans) as proxy:
        chat = [
            {"role": "system", "content": "SECRET-SYSTEM"},
            user(0),
            *turns(2, 60, 40),
            {"role": "user", "content": "SECRET-USER"},
        ]
        await proxy.post(
            body(chat), {"authorization": "Bearer SECRET-KEY"}, path="/v1/chat/completions?key=SECRET-QUERY"
        )
        await proxy.post(body(chat), {"authorization": "Bearer SECRET-KEY"})
        metrics = (await proxy.get("/metrics")).body.decode()
        proxy.proxy.services().telemetry.shutdown()
        finished = spans.get_finished_spans()
    seen = "".join(span.to_json() for span in finished) + caplog.text + metrics
    assert "SECRET" not in seen
    names = [span.name for span in finished]
    assert names.count("POST /v1/chat/completions") == 2
    assert names.count("compaction") == 2
    assert names.count("chat m") == 3
    first = next(span for span in finished if span.name == "compaction")
    calls = [span for span in finished if span.name == "chat m"]
    assert [(span.attributes or {})["gen_ai.usage.input_tokens"] for span in calls] == [11, 11, 11], "the summary's too"
    assert [(span.attributes or {}).get("compaction.purpose") for span in calls] == ["summary", None, None]
    assert calls[0].end_time <= calls[1].start_time
    assert 'compaction_purpose="summary"' in metrics
    assert "gen_ai.conversation.id" not in (calls[-1].attributes or {}), "only an id that a client sent"
    attributes: dict[str, Any] = dict(first.attributes or {})
    assert attributes["compaction.outcome"] == "compacted"
    assert attributes["compaction.reason"] == "over-threshold"
    assert attributes["compaction.tokens_after"] < attributes["compaction.tokens_before"]
    assert attributes["compaction.trust"] == "trusted"
    server = next(span for span in finished if span.name == "POST /v1/chat/completions")
    assert (server.attributes or {})["compaction.outcome"] == "compacted"
    assert "context_compaction_triggered_total{" in metrics
    assert "context_compaction_sticky_hit_total 1" in metrics


async def test_the_span_of_a_stream_ends_with_the_stream_and_keeps_its_usage() -> None:
    spans = InMemorySpanExporter()
    gate = asyncio.Event()
    usage = {"prompt_tokens": 21, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
    upstream = ScriptedUpstream(
        chat=lambda request: Reply.sse(
            chunk("a"), gate, {**chunk(), "choices": [], "usage": usage}, b"data: [DONE]\n\n"
        )
    )
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR), exporter=spans) as proxy:
        async with proxy.http.post(
            proxy.address + "/v1/chat/completions", json=body([user(0, 400), *loop(1, 3)], stream=True)
        ) as reply:
            assert await reply.content.readany()
            proxy.proxy.services().telemetry._tracers.force_flush()  # type: ignore[union-attr]
            assert not [span for span in spans.get_finished_spans() if span.name == "chat m"]
            gate.set()
            await reply.read()

        def ended() -> bool:
            proxy.proxy.services().telemetry._tracers.force_flush()  # type: ignore[union-attr]
            return any(span.name == "POST /v1/chat/completions" for span in spans.get_finished_spans())

        await until(ended)
        call = next(span for span in spans.get_finished_spans() if span.name == "chat m")
        attributes = dict(call.attributes or {})
        assert attributes["gen_ai.usage.input_tokens"] == 21
        assert attributes["gen_ai.usage.cache_read.input_tokens"] == 8
        assert attributes["gen_ai.request.stream"] is True


@pytest.mark.parametrize("base", ["/api/v3", "/api/v3/", ""])
async def test_the_base_url_is_a_prefix_of_what_follows_v1(base: str) -> None:
    upstream = ScriptedUpstream()
    async with upstream.running():
        text = config(upstream).replace(f'"{upstream.address}/v1"', f'"{upstream.address}{base}"')
        async with running_proxy(text) as proxy:
            await proxy.post(body([user(0, 400)]), path="/v1/chat/completions?api-version=1")
    assert upstream.requests[0].target == base.rstrip("/") + "/chat/completions?api-version=1"


async def test_the_summary_is_in_the_span_only_where_asked_for() -> None:
    for asked in (False, True):
        spans = InMemorySpanExporter()
        upstream = ScriptedUpstream(summary=lambda request: answer("## State\nTHE-SUMMARY"))
        async with upstream.running():
            text = config(upstream, policy=SUMMARIZE) + f"telemetry: {{captureContent: {str(asked).lower()}}}\n"
            async with running_proxy(text, exporter=spans) as proxy:
                await proxy.post(body(LONG))
                proxy.proxy.services().telemetry.shutdown()
        assert ("THE-SUMMARY" in "".join(span.to_json() for span in spans.get_finished_spans())) is asked


async def test_shadow_says_what_would_be_done() -> None:
    spans = InMemorySpanExporter()
    upstream = ScriptedUpstream()
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=CLEAR + "    mode: shadow\n"), exporter=spans) as proxy,
    ):
        for messages in ([user(0), *loop(1, 20, 150)], [user(0, 400)]):
            got = await proxy.post(body(messages))
            assert got.said == "unchanged; reason=shadow"
            assert upstream.requests[-1].messages == messages
        proxy.proxy.services().telemetry.shutdown()
    said = [dict(span.attributes or {}) for span in spans.get_finished_spans() if span.name.startswith("POST")]
    assert said[0]["compaction.would"] == "clear-old-tool-results"
    assert said[0]["compaction.tokens_before"] > said[0]["compaction.tokens_limit"] == 2000
    assert "compaction.would" not in said[1]
    assert upstream.summaries == []
