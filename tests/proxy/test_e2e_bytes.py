"""Bytes in and bytes out: what is not replaced leaves as the client wrote it, in whatever way it was sent."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from test_e2e_compaction import CLEAR, SUMMARIZE, body

from support.bench import assistant, loop, turns, user
from support.proxy import config, running_proxy
from support.upstream import Reply, ScriptedUpstream, answer

LARGE = json.dumps(body([user(0), *loop(1, 20, 150), assistant(2), user(3)])).encode()


def raw_body(*messages: bytes, rest: bytes = b"") -> bytes:
    """A body as no library would write it: odd spaces, numbers, escapes, unknown keys."""
    start = b'{ "seed":12345678901234567890,"temperature" :0.10, "x":{"b":1e400,"a":[ ]},\t"model":"m", "messages": [ '
    return start + b" ,\n ".join(messages) + b" ]" + rest + b' ,"caf\\u00e9":"\\ud83c"\n}'


@pytest.mark.parametrize(
    ("raw", "headers", "policy", "said"),
    [
        (LARGE, {}, "    mode: off\n", "disabled"),
        (LARGE, {}, "    mode: shadow\n", "shadow"),
        (LARGE, {"x-compaction": "off"}, "", "disabled"),
        (LARGE, {"x-compaction": "shadow"}, "", "shadow"),
        (LARGE, {}, "    thresholds: {thresholdTokens: 1000000}\n", "under-threshold"),
        (LARGE, {}, "    thresholds: never\n", "no-limit"),
        (raw_body(b'{"role":"user","content":"cut \\ud83c here ' + b"x" * 1500 + b'"}'), {}, "", "under-threshold"),
        (raw_body(b'{"role":"user","content":"' + b"x" * 4000 + b'","content":"y"}'), {}, "", "unreadable"),
        (raw_body(b'{"role":"user","content":"' + b"x" * 4000 + b'\xff"}'), {}, "", "unreadable"),
        (raw_body(b'{"role":"user","content":"' + b"x" * 4000 + b'"}', rest=b',"model":"n"'), {}, "", "unreadable"),
        (b"\xef\xbb\xbf" + LARGE, {}, "", "unreadable"),
        (b"", {}, "", "under-threshold"),
    ],
    ids=[
        "mode off",
        "mode shadow",
        "header off",
        "header shadow",
        "under the limit",
        "never",
        "lone surrogate",
        "key twice in a message",
        "invalid UTF-8",
        "key twice",
        "byte order mark",
        "nothing",
    ],
)
async def test_where_nothing_is_to_be_done_the_bytes_are_the_clients(
    raw: bytes, headers: dict[str, str], policy: str, said: str
) -> None:
    upstream = ScriptedUpstream()
    async with upstream.running():
        text = config(upstream, policy=CLEAR + policy)
        if "thresholds" in policy:
            text = text.replace("    thresholds: {thresholdTokens: 2000, thresholdRatio: null}\n", "")
        async with running_proxy(text) as proxy:
            got = await proxy.post(raw, headers)
    assert upstream.requests[0].body == raw
    assert got.said == f"unchanged; reason={said}"
    assert upstream.summaries == []


async def test_a_summary_leaves_every_other_byte_as_it_came() -> None:
    old = [
        b'{"content":"m%dm %s" , "role":"%s"}' % (n, b"word " * 60, (b"user", b"assistant")[n % 2]) for n in range(40)
    ]
    call = (
        b'{"role":"assistant","content":[ ],"reasoning_content":"","zz":-0.0,"tool_calls":[ {"id":"a","type":"function","extra":1E+2,'
        b'"function":{"name":"f","arguments":"{ \\"id\\": 12345678901234567890, \\"h\\":\\"<b>\\\\u0026\\" }"}}]}'
    )
    result = b'{"tool_call_id":"a", "content":"1 \\/ \\ud83c \xc3\xa9 \\u00e9", "role":"tool","cache_control":{"type":"ephemeral"}}'
    last = b'{ "role":"user", "content":[{"type":"text","text":"go on","n":1e400}], "name":"z" }'
    system = b'{"role":"system","content":"caf\\u00e9","k":0.10}'
    tools = (
        b',"tools":[{"type":"function","function":{"name":"b","x":1.0}},{"function":{"name":"a"},"type":"function"}]'
    )
    raw = raw_body(system, *old, call, result, last, rest=tools + b',"metadata":{"a":[1,2.50]}')
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE)) as proxy:
        got = await proxy.post(raw)
        assert got.said.startswith("compacted")
        again = await proxy.post(raw)
        assert again.said == "sticky; reason=sticky"
    forwarded = upstream.requests[0].body
    assert upstream.requests[1].body == forwarded
    first = raw.index(old[0])
    assert forwarded[:first] == raw[:first]
    kept = next(n for n in range(40) if forwarded.endswith(raw[raw.index(old[n]) :]))
    assert 30 < kept < 40, "all behind the cut, the white space between messages too"
    synthetic = forwarded[first : len(forwarded) - len(raw[raw.index(old[kept]) :])].rstrip(b" ,\n")
    assert json.loads(synthetic)["role"] == "user"
    assert isinstance(json.loads(synthetic)["content"], str)


async def test_a_lone_surrogate_is_summarized_like_any_text() -> None:
    raw = raw_body(
        *(
            b'{"role":"%s","content":"m%dm \\ud83c %s"}' % ((b"user", b"assistant")[n % 2], n, b"word " * 60)
            for n in range(41)
        )
    )
    upstream = ScriptedUpstream(summary=lambda request: answer("## State\ncut \ud83c here"))
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE), by_characters=False) as proxy:
        assert (await proxy.post(raw)).said.startswith("compacted")
        assert (await proxy.post(raw)).said == "sticky; reason=sticky"
    upstream.requests[0].body.decode("utf-8")
    assert b"cut \\ud83c here" in upstream.requests[0].body


@pytest.mark.parametrize(
    ("encoding", "pack"), [("deflate", zlib.compress), ("gzip", gzip.compress)], ids=["deflate", "gzip"]
)
async def test_a_compressed_body_is_compacted_and_sent_plain(encoding: str, pack: Any) -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR)) as proxy:
        got = await proxy.post(pack(LARGE), {"content-encoding": encoding})
        assert got.said.startswith("compacted")
    sent = upstream.requests[0]
    assert sent.header("content-encoding") is None
    assert sent.header("content-length") == str(len(sent.body))
    assert sent.messages[-1] == json.loads(LARGE)["messages"][-1]


@pytest.mark.parametrize(
    ("encoding", "sent"),
    [("br", LARGE), ("gzip", LARGE), ("gzip", gzip.compress(LARGE)[:-20]), ("gzip, br", LARGE)],
    ids=["unknown", "not gzip", "cut off", "twice"],
)
async def test_an_encoding_that_is_not_understood_is_forwarded(encoding: str, sent: bytes) -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR)) as proxy:
        got = await proxy.post(sent, {"content-encoding": encoding})
    assert (got.status, got.said) == (200, "unchanged; reason=unreadable")
    assert upstream.requests[0].body == sent
    assert upstream.requests[0].header("content-encoding") == encoding


async def _pieces() -> AsyncIterator[bytes]:
    for at in range(0, len(LARGE), 1_000):
        yield LARGE[at : at + 1_000]


async def test_length_and_framing_are_those_of_the_body_that_is_sent() -> None:
    upstream = ScriptedUpstream()
    headers = {"content-type": "application/json", "connection": "keep-alive, x-foo", "x-foo": "1"}
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR)) as proxy:
        url = proxy.address + "/v1/chat/completions"
        for compaction in ("off", "on"):
            more = {**headers, "x-compaction": compaction}
            async with proxy.http.post(url, data=_pieces(), headers=more, expect100=True) as got:
                assert got.status == 200
    for request in upstream.requests:
        assert [value for name, value in request.headers if name.lower() == "content-length"] == [
            str(len(request.body))
        ]
        for name in ("transfer-encoding", "expect", "x-foo"):
            assert request.header(name) is None
    assert upstream.requests[0].body == LARGE
    assert len(upstream.requests[1].body) < len(LARGE)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip"])
async def test_an_encoded_answer_is_neither_unpacked_nor_relabelled(encoding: str) -> None:
    packed = b"\x1b\x00 packed, whatever it is \xff\xfe"
    reply = Reply(200, (("content-type", "application/json"), ("content-encoding", encoding)), [packed])
    upstream = ScriptedUpstream(chat=lambda request: reply)
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=CLEAR)) as proxy,
        aiohttp.ClientSession(auto_decompress=False) as http,
        http.post(proxy.address + "/v1/chat/completions", data=LARGE, headers={"accept-encoding": encoding}) as got,
    ):
        assert got.headers["content-encoding"] == encoding
        assert await got.read() == packed
    assert upstream.requests[0].header("accept-encoding") == encoding


async def test_the_forwarded_body_has_no_key_that_the_client_did_not_send() -> None:
    upstream = ScriptedUpstream()
    given = body([user(0), *turns(1, 40, 60), user(500)], stream=True, user="u", prompt_cache_key="theirs")
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE)) as proxy:
        headers = {
            "x-compaction": "on",
            "x-compaction-session": "ours",
            "x-compaction-policy": "tested",
            "x-session-id": "s",
        }
        assert (await proxy.post(given, headers)).said.startswith("compacted")
    sent = upstream.requests[0]
    assert list(sent.json) == list(given)
    assert {name: value for name, value in sent.json.items() if name != "messages"} == {
        name: value for name, value in given.items() if name != "messages"
    }
    assert [name for name, _ in sent.headers if name.lower().startswith("x-compaction")] == []
    assert sent.header("x-session-id") == "s"
    assert sorted(sent.messages[0]) == ["content", "role"]
