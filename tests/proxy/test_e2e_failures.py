"""What goes wrong around the proxy never reaches the user: stores, summarizers, clients that leave, replicas."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from test_e2e_compaction import CLEAR, SUMMARIZE, body, is_synthetic

from compaction_proxy.compaction import Compactor
from support.bench import Message, assistant, loop, turns, user
from support.proxy import config, running_proxy, until
from support.upstream import Reply, ScriptedUpstream, answer
from support.valkey import ValkeyServer

LONG = [*turns(0, 60, 40), user(500)]
FAST = (
    SUMMARIZE.replace("ledger: false", "ledger: false, summarizerTimeoutMs: 400")
    + "    timing: {inlineBudgetMs: 1000, gateWaitMs: 1000}\n"
)


def tool_call(request: Any) -> Reply:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    return answer(None, tool_calls=[call])  # type: ignore[arg-type]


FAILURES: dict[str, Any] = {
    "500": lambda request: Reply.json({"error": {"message": "boom"}}, 500),
    "401": lambda request: Reply.json({"error": {"message": "no"}}, 401),
    "empty": lambda request: answer(""),
    "tool call": tool_call,
    "markup": lambda request: answer('<tool_call>{"name":"bash"}</tool_call>'),
    "refusal": lambda request: answer("I'm sorry, I can't help with that."),
    "error in a 200": lambda request: Reply.json({"error": {"message": "network lost", "code": 429}}),
    "not json": lambda request: Reply(200, (), [b"<html>"]),
    "never": lambda request: Reply(chunks=None),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failing_summarizer_never_fails_the_user(failure: str) -> None:
    upstream = ScriptedUpstream(summary=FAILURES[failure])
    async with upstream.running(), running_proxy(config(upstream, policy=FAST, window=200_000)) as proxy:
        chat = list(LONG)
        for number in range(10):
            started = time.monotonic()
            got = await proxy.post(body(chat))
            assert got.status == 200
            assert time.monotonic() - started < 5
            assert upstream.requests[-1].messages == chat, "nothing is dropped before its replacement exists"
            assert got.said.split("=")[1] in ("summarizer-failed", "no-progress", "gate-timeout")
            chat += [assistant(600 + number), user(700 + number)]
        calls = {"401": 2, "never": 8}.get(failure, 6)
        assert 1 <= len(upstream.summaries) <= calls, "a broken summarizer is not asked on every request"


async def test_where_no_window_is_known_the_second_failure_is_replaced_by_an_extract() -> None:
    upstream = ScriptedUpstream(summary=FAILURES["500"])
    async with upstream.running(), running_proxy(config(upstream, policy=FAST)) as proxy:
        assert (await proxy.post(body(LONG))).said == "unchanged; reason=summarizer-failed"
        chat = [*LONG, assistant(600, 400), user(601, 400)]
        assert (await proxy.post(body(chat))).said == "compacted; reason=degraded"
        assert upstream.requests[-1].messages[-1] == chat[-1]


async def test_a_summary_that_is_too_long_is_asked_for_again_and_then_cut_with_a_mark() -> None:
    upstream = ScriptedUpstream(summary=lambda request: answer("## State\n" + "a line of the summary\n" * 900))
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE)) as proxy:
        got = await proxy.post(body(LONG))
        assert got.said.startswith("compacted")
        assert len(upstream.summaries) == 2
        assert "cut at its length limit" in upstream.requests[0].messages[0]["content"]
        assert len(upstream.requests[0].messages[0]["content"]) < 6_000


async def test_above_the_hard_limit_a_failing_summarizer_is_replaced_by_an_extract() -> None:
    upstream = ScriptedUpstream(summary=FAILURES["500"])
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=FAST, window=2_100), by_characters=False) as proxy,
    ):
        got = await proxy.post(body(LONG))
        assert got.said == "compacted; reason=degraded"
        assert is_synthetic(upstream.requests[0].messages[0])
        assert upstream.requests[0].messages[-1] == LONG[-1]
        upstream.summary = lambda request: answer("## State\nHEALED")
        chat = [*LONG, assistant(600, 700), user(601, 900)]
        healed = await proxy.post(body(chat))
        assert healed.said.startswith("compacted")
        assert "HEALED" in json.dumps(upstream.requests[-1].messages[0])


async def test_the_summary_call_is_private_and_built_from_the_policy_alone() -> None:
    upstream = ScriptedUpstream()
    tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE)) as proxy:
        chat = [user(0), *loop(1, 30, 90), assistant(90), user(91)]
        chat[1]["reasoning_content"] = "SECRET-CHAIN"
        await proxy.post(
            body(chat, tools=tools, tool_choice="auto", stop=["\n"], n=3, temperature=2, stream=False, seed=1)
        )
    sent = upstream.summaries[0].json
    assert set(sent) == {"model", "messages", "max_tokens"}
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    assert sent["max_tokens"] <= 2000
    assert "SECRET-CHAIN" not in json.dumps(sent)
    assert "m101m" not in sent["messages"][0]["content"]
    assert upstream.requests[0].json["tools"] == tools


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_byte_cancels_the_upstream_call(stream: bool) -> None:
    upstream = ScriptedUpstream(chat=lambda request: Reply(chunks=None))
    async with upstream.running(), running_proxy(config(upstream)) as proxy:
        for number in range(20):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await proxy.post(body([user(0, 300)], stream=stream))
            await until(lambda number=number: upstream.cancelled == number + 1)


async def test_a_client_that_leaves_in_mid_stream_cancels_the_upstream_call() -> None:
    never = asyncio.Event()
    upstream = ScriptedUpstream(chat=lambda request: Reply.sse({"choices": []}, never, b"data: [DONE]\n\n"))
    async with upstream.running(), running_proxy(config(upstream)) as proxy:
        for number in range(20):
            async with aiohttp.ClientSession() as session:
                reply = await session.post(
                    proxy.address + "/v1/chat/completions", json=body([user(0, 300)], stream=True)
                )
                assert await reply.content.readany()
                reply.close()
            await until(lambda number=number: upstream.cancelled == number + 1)


async def test_the_summary_goes_on_when_its_client_leaves_and_serves_the_next_request() -> None:
    release = asyncio.Event()
    upstream = ScriptedUpstream()
    reply = answer("## State\nWORTH-WAITING-FOR")
    reply.chunks = [release, *(reply.chunks or ())]
    upstream.summary = lambda request: reply
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE)) as proxy:
        leaving = asyncio.ensure_future(proxy.post(body(LONG)))
        await until(lambda: len(upstream.summaries) == 1)
        leaving.cancel()
        await asyncio.wait({leaving})
        release.set()
        await until(lambda: len(proxy.proxy.services().jobs) == 0)
        got = await proxy.post(body(LONG))
        assert got.said == "sticky; reason=sticky"
        assert "WORTH-WAITING-FOR" in upstream.requests[-1].messages[0]["content"]
        assert len(upstream.summaries) == 1


async def test_a_slow_summary_costs_its_budget_once_and_is_used_later() -> None:
    release = asyncio.Event()
    upstream = ScriptedUpstream()
    reply = answer("## State\nLATE")
    reply.chunks = [release, *(reply.chunks or ())]
    upstream.summary = lambda request: reply
    policy = SUMMARIZE + "    timing: {inlineBudgetMs: 150, gateWaitMs: 100}\n"
    async with upstream.running(), running_proxy(config(upstream, policy=policy)) as proxy:
        first = await proxy.post(body(LONG))
        assert first.said == "unchanged; reason=gate-timeout"
        assert upstream.requests[-1].messages == LONG
        release.set()
        await until(lambda: len(proxy.proxy.services().jobs) == 0)
        assert (await proxy.post(body(LONG))).said == "sticky; reason=sticky"
        assert len(upstream.summaries) == 1


async def test_replicas_share_one_summary_and_send_the_same_bytes(redis_url: str) -> None:
    release = asyncio.Event()
    upstream = ScriptedUpstream()
    reply = answer("## State\nSHARED")
    reply.chunks = [release, *(reply.chunks or ())]
    upstream.summary = lambda request: reply
    async with upstream.running():
        text = config(upstream, policy=SUMMARIZE, store=redis_url)
        async with running_proxy(text) as one, running_proxy(text) as two:
            asking = [asyncio.ensure_future(proxy.post(body(LONG))) for proxy in (one, two) * 4]
            await until(lambda: len(upstream.summaries) == 1)
            release.set()
            said = [(await task).said for task in asking]
            assert len(upstream.summaries) == 1
            assert len({request.body for request in upstream.requests}) == 1
            assert sum(word.startswith("compacted") for word in said) == 1
            chat = list(LONG)
            for number in range(8):
                chat += [assistant(600 + number, 10), user(700 + number, 10)]
                await (one, two)[number % 2].post(body(chat))
                before, after = (request.messages for request in upstream.requests[-2:])
                assert after[: len(before)] == before


async def test_two_revisions_take_turns_with_the_same_bytes_until_the_next_event(redis_url: str) -> None:
    upstream = ScriptedUpstream()
    async with upstream.running():
        old = config(upstream, policy=CLEAR, store=redis_url)
        new = config(
            upstream, policy=CLEAR.replace("clearAtLeast: 200", "clearAtLeast: 300, keepToolUses: 8"), store=redis_url
        )
        async with running_proxy(old) as one, running_proxy(new) as two:
            chat: list[Message] = [user(0), *loop(1, 20, 150)]
            await one.post(body(chat))
            for number in range(6):
                chat += loop(100 + number, 1, 30)
                got = await (two, one)[number % 2].post(body(chat))
                assert got.said == "sticky; reason=sticky"
                before, after = (request.messages for request in upstream.requests[-2:])
                assert after[: len(before)] == before


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_redis_goes_away_and_comes_back(how: str, own_server: ValkeyServer) -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR, store=own_server.url)) as proxy:
        chat = [user(0), *loop(1, 20, 150)]
        first = await proxy.post(body(chat))
        assert first.said.startswith("compacted")
        own_server.kill() if how == "killed" else own_server.freeze()
        for number in range(5):
            chat += loop(100 + number, 1, 20)
            started = time.monotonic()
            got = await proxy.post(body(chat))
            assert time.monotonic() - started < 4
            assert got.headers["x-compaction-id"] == first.headers["x-compaction-id"], "in the form last sent"
        assert json.loads((await proxy.get("/readyz")).body) == {"status": "degraded"}
        chat += loop(200, 20, 150)
        away = await proxy.post(body(chat))
        assert away.said.startswith("compacted"), "and goes on compacting"
        own_server.start() if how == "killed" else own_server.thaw()

        async def recovered() -> bool:
            return json.loads((await proxy.get("/readyz")).body) == {"status": "ok"}

        await until(recovered, 40)
        back = await proxy.post(body(chat))
        assert back.headers["x-compaction-id"] == away.headers["x-compaction-id"]
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR, store=own_server.url)) as fresh:
        assert (await fresh.post(body(chat))).headers["x-compaction-id"] == away.headers["x-compaction-id"]


async def test_a_proxy_starts_while_redis_is_down() -> None:
    upstream = ScriptedUpstream()
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=CLEAR, store="redis://127.0.0.1:1/0")) as proxy,
    ):
        got = await proxy.post(body([user(0), *loop(1, 20, 150)]))
        assert got.said.startswith("compacted")
        assert (await proxy.get("/readyz")).status == 200


async def test_a_fault_inside_the_proxy_forwards_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = ScriptedUpstream()

    async def broken(*_: Any) -> Any:
        raise RuntimeError

    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR)) as proxy:
        chat = [user(0), *loop(1, 20, 150)]
        monkeypatch.setattr(Compactor, "compact", broken)
        got = await proxy.post(body(chat))
        assert (got.status, got.said) == (200, "unchanged; reason=internal-error")
        assert upstream.requests[0].messages == chat
        monkeypatch.undo()
        first = await proxy.post(body(chat))
        monkeypatch.setattr(Compactor, "compact", broken)
        more = [*chat, *loop(50, 20, 150)]
        got = await proxy.post(body(more))
        assert got.said == "sticky; reason=internal-error"
        assert got.headers["x-compaction-id"] == first.headers["x-compaction-id"], "in the form last sent"
