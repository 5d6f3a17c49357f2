"""Compaction over real sockets: what the provider gets when a client simply goes on talking."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from support.bench import Message, assistant, loop, turns, user
from support.proxy import Running, config, running_proxy, until
from support.upstream import Reply, ScriptedUpstream, answer, chunk

SUMMARIZE = """\
    strategies:
      - {kind: summarize-old-preserve-recent, preserveRecentTokens: 400, ledger: false}
"""
CLEAR = """\
    strategies:
      - {kind: clear-old-tool-results, clearAtLeast: 200}
"""


def body(messages: list[Message], **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": messages, **more}


def is_synthetic(message: Message) -> bool:
    return "[record of the earlier conversation]" in json.dumps(message)


async def test_a_long_conversation_is_forwarded_compacted_and_stays_so_with_the_real_sdk() -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE), by_characters=False) as proxy:
        client = proxy.sdk()
        chat: list[Any] = [{"role": "system", "content": "Be brief."}]
        said = []
        for number in range(60):
            chat.append(user(number, 60))
            raw = await client.chat.completions.with_raw_response.create(model="m", messages=chat)
            said.append(raw.headers["x-compaction"])
            chat.append({"role": "assistant", "content": raw.parse().choices[0].message.content})
            got = upstream.requests[-1].messages
            assert got[0] == chat[0]
            assert got[-1] == chat[-2]
            if number and not said[-1].startswith("compacted"):
                before = upstream.requests[-2].messages
                assert got[: len(before)] == before
        await client.close()
    events = [word for word in said if word.startswith("compacted")]
    assert 1 <= len(events) <= 3
    assert len(upstream.summaries) == len(events)
    assert sum(map(is_synthetic, upstream.requests[-1].messages)) == 1
    assert "SUMMARY-OF-THE-OLD-PART" in upstream.requests[-1].messages[1]["content"]


async def test_streams_are_relayed_byte_for_byte_and_compacted_too() -> None:
    upstream = ScriptedUpstream()
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
    upstream.chat = lambda request: Reply.sse(
        chunk("hi"),
        b": comment\n\n",
        chunk(finish="stop"),
        {**chunk(), "choices": [], "usage": usage},
        b"data: [DONE]\n\n",
    )
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR)) as proxy:
        chat = [user(0), *loop(1, 20, 150)]
        got = await proxy.post(body(chat, stream=True))
        expected = b"".join(upstream.chat(upstream.requests[0]).chunks or ())
        assert got.body == expected
        assert got.said == "compacted; reason=pre-step"
        before, after = map(int, got.headers["x-compaction-tokens"].split("/"))
        assert after < before
        assert len(got.headers["x-compaction-id"]) == 32
        client = proxy.sdk()
        text = ""
        async for event in await client.chat.completions.create(model="m", messages=chat, stream=True):  # type: ignore[call-overload]
            text += event.choices[0].delta.content or "" if event.choices else ""
        assert text == "hi"
        await client.close()


@pytest.mark.parametrize(
    ("raw", "headers", "said"),
    [
        (json.dumps(body([user(0, 5000), assistant(1), user(2)])).encode(), {"x-compaction": "off"}, "disabled"),
        (json.dumps(body([user(0, 5000), assistant(1), user(2)])).encode(), {"x-compaction": "shadow"}, "shadow"),
        (
            b' { "model" : "m",  "messages" : [ ' + b'{"role":"user","content":"' + b"x" * 2000 + b'"} ] , "n":1e400 }',
            {},
            "under-threshold",
        ),
        (b'{"model":"m","messages":[{"role":"user","content":"short"}]}', {}, "under-threshold"),
        (b'{"model":"m","model":"m","messages":[],"pad":"' + b"x" * 2000 + b'"}', {}, "unreadable"),
        (
            b'{"model":"m","messages":[{"role":"user","role":"user","content":"' + b"x" * 2000 + b'"}]}',
            {},
            "unreadable",
        ),
        (b'{"model":"m","messages":"no","pad":"' + b"x" * 2000 + b'"}', {}, "unreadable"),
        (b'{"model":"m","messages":[{"role":"user","content":"\xff' + b"x" * 2000 + b'"}]}', {}, "unreadable"),
        (b"not json at all " + b"x" * 2000, {}, "unreadable"),
    ],
)
async def test_bytes_in_are_bytes_out_where_nothing_is_to_be_done(
    raw: bytes, headers: dict[str, str], said: str
) -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream)) as proxy:
        got = await proxy.post(raw, headers)
    assert upstream.requests[0].body == raw
    assert got.said == f"unchanged; reason={said}"


async def test_only_the_replaced_values_of_a_compacted_body_differ() -> None:
    upstream = ScriptedUpstream()
    odd = (
        b'{"temperature": 0.10, "seed": 12345678901234567890,  "x": {"b":1e400,"a":[ ]}, "model":"m", "messages": [ '
        b'{"content":"task \\ud83c caf\\u00e9 \xc3\xa9", "role":"user", "zz": [1.50, {"k":null}]} '
    )
    steps = []
    for number in range(12):
        steps.append(
            b', {"role":"assistant","content":null,"refusal":null,"reasoning_content":"why","tool_calls":[{"id":"c%d","type":"function",'
            b'"extra":{"q":0.10},"function":{"arguments":"{ \\"n\\": 12345678901234567890, \\"p\\":\\"\\u00e9\\" }","name":"read"}}]}'
            % number
        )
        steps.append(b', {"tool_call_id":"c%d", "role":"tool","content":"%s","k":1e400}' % (number, b"word " * 150))
    raw = odd + b"".join(steps) + b'], "tools":[],"user":"u" }'
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR)) as proxy:
        got = await proxy.post(raw)
        assert got.said.startswith("compacted")
    forwarded = upstream.requests[0].body
    pieces = forwarded.split(b'"[Old result of read cleared to save space. Stored as ')
    assert len(pieces) > 5
    rebuilt = pieces[0] + b"".join(b'"' + b"word " * 150 + piece[piece.index(b'.]"') + 2 :] for piece in pieces[1:])
    assert rebuilt == raw


async def test_a_compressed_request_is_read_and_forwarded_as_it_came_unless_changed() -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR)) as proxy:
        small = gzip.compress(json.dumps(body([user(0, 400)])).encode())
        await proxy.post(small, {"content-encoding": "gzip"})
        assert upstream.requests[0].body == small
        assert upstream.requests[0].header("content-encoding") == "gzip"
        large = gzip.compress(json.dumps(body([user(0), *loop(1, 20, 150)])).encode())
        got = await proxy.post(large, {"content-encoding": "gzip"})
        assert got.said.startswith("compacted")
        assert upstream.requests[1].header("content-encoding") is None
        assert len(upstream.requests[1].messages) == 41


async def test_what_clients_change_between_turns_finds_the_same_record() -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR)) as proxy:
        chat = [user(0), *loop(1, 20, 150)]
        first = await proxy.post(body(chat))
        changed = json.loads(json.dumps(chat))
        for message in changed:
            if message["role"] == "user":
                message["content"] = [
                    {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
                ]
            if "tool_call_id" in message:
                message["tool_call_id"] = "renamed-" + message["tool_call_id"]
                message["name"] = "read"
            for call in message.get("tool_calls") or ():
                call["id"] = "renamed-" + call["id"]
                call["function"]["arguments"] = "{ }"
                message["reasoning_content"] = "thought"
        again = await proxy.post(body([dict(reversed(message.items())) for message in changed]))
        assert again.headers["x-compaction-id"] == first.headers["x-compaction-id"]
        assert again.said == "sticky; reason=sticky"


@pytest.mark.parametrize("session", ["shared", ""])
async def test_edits_branches_and_other_chats_never_get_a_strangers_summary(session: str) -> None:
    upstream = ScriptedUpstream()
    upstream.summary = lambda request: answer(
        "## State\n" + " ".join(sorted(set(request.body.decode().split()) & marks))
    )
    marks = {f"m{number}m" for number in range(2000)}
    headers = {"x-session-id": session} if session else {}
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE)) as proxy:
        chat = [*turns(0, 60, 40), user(500)]
        await proxy.post(body(chat), headers)
        edited = [user(900), *chat[1:]]
        branch = [*chat[:40], user(901, 900), assistant(902), user(903, 900)]
        other = [*turns(1000, 60, 40), user(1500)]
        for variant in (edited, branch, other, chat[:-2], chat):
            await proxy.post(body(variant), headers)
            theirs = {word for message in variant for word in str(message["content"]).split() if word in marks}
            got = {
                word
                for word in upstream.requests[-1].body.decode().replace("\\n", " ").replace('"', " ").split()
                if word in marks
            }
            assert got <= theirs


async def test_force_compacts_a_short_conversation_and_only_shrinks() -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, limit=100000), by_characters=False) as proxy:
        chat = [user(0), *loop(1, 8, 300), user(50)]
        got = await proxy.post(body(chat), {"x-compaction": "force"})
        assert got.said == "compacted; reason=manual"
        assert len(upstream.requests[0].body) < len(json.dumps(body(chat)))
        later = await proxy.post(body([*chat, assistant(51), user(52)]))
        assert later.said == "sticky; reason=sticky"
        tiny = await proxy.post(body([user(0, 300), assistant(1), user(2)]), {"x-compaction": "force"})
        assert tiny.said.startswith("unchanged")


async def test_an_edited_policy_governs_the_next_event_only(tmp_path: Any) -> None:
    upstream = ScriptedUpstream()
    async with upstream.running():
        file = tmp_path / "proxy.yaml"
        async with running_proxy(config(upstream, policy=CLEAR), file=file) as proxy:
            chat = [user(0), *loop(1, 20, 150)]
            await proxy.post(body(chat))
            before = upstream.requests[-1].messages
            file.write_text(config(upstream, policy=CLEAR + '    excludeTools: ["read"]\n'), encoding="utf-8")
            await until(lambda: proxy.proxy.services().settings.policies["tested"].exclude_tools == ("read",))
            again = await proxy.post(body(chat))
            assert again.said == "sticky; reason=sticky"
            assert upstream.requests[-1].messages == before
            file.write_text("policies: {tested: {preset: nonsense}}", encoding="utf-8")
            assert (await proxy.post(body(chat))).said == "sticky; reason=sticky"


async def test_a_small_window_with_an_output_limit_as_large_compacts_sensibly() -> None:
    upstream = ScriptedUpstream()
    async with (
        upstream.running(),
        running_proxy(config(upstream, limit=120000, window=4096)) as proxy,
    ):
        chat: list[Message] = []
        events = 0
        for number in range(60):
            chat.append(user(number, 90))
            events += (await proxy.post(body(chat, max_tokens=4096))).said.startswith("compacted")
            chat.append(assistant(number + 100, 90))
        assert 2 <= events <= 20


async def test_originals_are_fetched_back_by_the_handle_in_the_placeholder() -> None:
    upstream = ScriptedUpstream()
    keyed = ', adminKey: "admin-secret"'
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR, server=keyed)) as proxy:
        chat = [user(0), *loop(1, 20, 150)]
        await proxy.post(body(chat))
        index, cleared = next(
            (at, message)
            for at, message in enumerate(upstream.requests[0].messages)
            if "Stored as" in str(message["content"])
        )
        handle = cleared["content"].rsplit("Stored as ", 1)[1].rstrip(".]")
        path, key = f"/compaction/api/results/{handle}", {"authorization": "Bearer admin-secret"}
        whole = json.loads((await proxy.get(path, key)).body)
        assert whole["content"] == chat[index]["content"]
        page = json.loads((await proxy.get(f"{path}?offset=5&limit=7", key)).body)
        assert page["content"] == chat[index]["content"][5:12]
        assert page["next_offset"] == 12
        assert (await proxy.get(path)).status == 401
        assert (await proxy.get("/compaction/api/results/0000", key)).status == 404
        assert (await proxy.get(f"{path}?limit=0", key)).status == 400
        services = proxy.proxy.services()
        await services.records.store.delete([f"cp:{{o:{handle[:2]}}}:o:{handle}"])
        gone = await proxy.get(path, key)
        assert gone.status == 410
        assert json.loads(gone.body)["error"]["type"] == "compaction_proxy_error"


async def _answered(proxy: Running, chat: list[Message], count: int) -> list[str]:
    answers = await asyncio.gather(*(proxy.post(body(chat)) for _ in range(count)))
    assert {each.status for each in answers} == {200}
    return [each.said for each in answers]


async def test_identical_concurrent_requests_cause_one_summary() -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE)) as proxy:
        said = await _answered(proxy, [*turns(0, 60, 40), user(500)], 8)
        assert len(upstream.summaries) == 1
        assert len({request.body for request in upstream.requests}) == 1
        assert sorted(word.split(";")[0] for word in said) == ["compacted"] + ["sticky"] * 7
