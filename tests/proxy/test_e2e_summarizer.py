"""The private call that writes a summary: what it holds, what is taken as a summary, and where it may not go."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_e2e_compaction import SUMMARIZE, body, is_synthetic

from support.bench import assistant, turns, user
from support.proxy import config, running_proxy, until
from support.upstream import Recorded, Reply, ScriptedUpstream, answer

LONG = [*turns(0, 40, 60), user(500)]
CUT_MARK = "cut at its length limit"


def stopped_by(reason: str, text: str) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return Reply.json({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


def summary_of(upstream: ScriptedUpstream) -> str:
    first = upstream.requests[-1].messages[0]
    return str(first["content"]) if is_synthetic(first) else ""


async def test_a_summary_that_hit_its_output_limit_is_asked_for_again_and_shorter() -> None:
    upstream = ScriptedUpstream()
    upstream.summary = lambda request: (
        stopped_by("length", "## State\nHALF A SEN") if len(upstream.summaries) == 1 else answer("## State\nWHOLE")
    )
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE)) as proxy:
        assert (await proxy.post(body(LONG))).said.startswith("compacted")
    assert "WHOLE" in summary_of(upstream)
    assert "HALF" not in summary_of(upstream)
    first, second = (request.messages[1]["content"] for request in upstream.summaries)
    assert "too long" not in first
    assert "The last attempt was too long" in second


async def test_a_summary_that_hits_its_limit_twice_is_taken_with_a_mark() -> None:
    upstream = ScriptedUpstream(summary=lambda request: stopped_by("length", "## State\na line\nHALF A SEN"))
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE)) as proxy:
        assert (await proxy.post(body(LONG))).said.startswith("compacted")
    assert len(upstream.summaries) == 2
    assert CUT_MARK in summary_of(upstream)


@pytest.mark.parametrize(
    ("model", "limit", "room"), [("m", "max_tokens", 250), ("gpt-5-mini", "max_completion_tokens", 250 + 8_000)]
)
async def test_the_output_limit_is_the_policys_whatever_the_client_asked_for(model: str, limit: str, room: int) -> None:
    upstream = ScriptedUpstream()
    policy = SUMMARIZE.replace("ledger: false", "ledger: false, summaryMaxTokens: 600")
    async with upstream.running(), running_proxy(config(upstream, policy=policy)) as proxy:
        given = body(LONG, max_tokens=100_000, max_completion_tokens=100_000, response_format={"type": "json_object"})
        assert (await proxy.post({**given, "model": model})).said.startswith("compacted")
    sent = upstream.summaries[0].json
    assert set(sent) == {"model", "messages", limit}
    assert sent[limit] == room, "the policy's 600, scaled to an eighth of the limit of 2000"
    assert upstream.requests[0].json["max_tokens"] == 100_000
    assert upstream.requests[0].json["response_format"] == {"type": "json_object"}


async def test_a_server_that_names_its_limit_otherwise_is_asked_once_more() -> None:
    refused = Reply.json(
        {"error": {"message": "Unsupported parameter: 'max_tokens', use 'max_completion_tokens'"}}, 400
    )
    upstream = ScriptedUpstream(
        summary=lambda request: refused if "max_tokens" in request.json else answer("## State\nFINE")
    )
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE)) as proxy:
        assert (await proxy.post(body(LONG))).said.startswith("compacted")
    assert len(upstream.summaries) == 2
    assert "FINE" in summary_of(upstream)


async def test_a_summarizer_with_a_small_window_gets_the_conversation_in_parts() -> None:
    upstream = ScriptedUpstream(summary=lambda request: answer("## State\nPART-OR-WHOLE"))
    policy = SUMMARIZE.replace("ledger: false", "ledger: false, summarizerModel: small")
    async with upstream.running():
        text = config(upstream, policy=policy).replace(
            "models:\n", "models:\n  - {match: small, provider: main, policy: tested, contextWindow: 4096}\n"
        )
        async with running_proxy(text) as proxy:
            assert (await proxy.post(body([*turns(0, 60, 100), user(500)]))).said.startswith("compacted")
    assert 2 <= len(upstream.summaries) <= 4
    for request in upstream.summaries:
        assert request.json["model"] == "small"
        told = request.messages[1]["content"]
        assert len(told) / 2.5 + request.json["max_tokens"] < 4_096 + 1_000
        assert request.header("authorization") == "Bearer sk-client", "the same provider"
    assert summary_of(upstream).count("PART-OR-WHOLE") == 1, "the parts are merged"


async def test_a_healed_summarizer_is_asked_again_once_the_conversation_has_grown() -> None:
    upstream = ScriptedUpstream(summary=lambda request: Reply.json({"error": {"message": "no"}}, 401))
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=SUMMARIZE, window=200_000)) as proxy,
    ):
        chat = list(LONG)
        said = []
        for number in range(10):
            said.append((await proxy.post(body(chat))).said)
            assert upstream.requests[-1].messages == chat
            chat += [assistant(600 + number, 2), user(700 + number, 2)]
        assert said[0] == "unchanged; reason=summarizer-failed"
        assert said[1:] == ["unchanged; reason=no-progress"] * 9
        assert len(upstream.summaries) == 1, "401 is final: no second try"
        upstream.summary = lambda request: answer("## State\nHEALED")
        chat += [assistant(800, 300), user(801, 300)]
        assert (await proxy.post(body(chat))).said == "compacted; reason=over-threshold"
        assert "HEALED" in summary_of(upstream)


async def test_a_summary_call_that_comes_back_is_forwarded_untouched_and_refused_the_second_time(tmp_path: Any) -> None:
    """The summarizer's ``baseUrl`` is this proxy itself: once through it is harmless, in a circle it ends with 508."""
    upstream = ScriptedUpstream()
    policy = SUMMARIZE.replace("ledger: false", "ledger: false, summarizerModel: small")

    def looped(address: str, small: str) -> str:
        return config(upstream, policy=policy, window=200_000).replace(
            "models:\n",
            f'  again: {{kind: openai, baseUrl: "{address}/v1"}}\n'
            f"models:\n  - {{match: small, provider: {small}, policy: tested}}\n",
        )

    async with upstream.running():
        file = tmp_path / "proxy.yaml"
        async with running_proxy(looped(upstream.address, "main"), file=file) as proxy:

            def routed_to(name: str) -> bool:
                providers = proxy.proxy.services().settings.providers
                routes = proxy.proxy.services().settings.routes
                return providers["again"].base_url.startswith(proxy.address) and routes[0].provider == name

            file.write_text(looped(proxy.address, "again"), encoding="utf-8")
            await until(lambda: routed_to("again"))
            got = await proxy.post(body(LONG))
            assert got.said == "unchanged; reason=summarizer-failed"
            assert [request.messages for request in upstream.requests] == [LONG], "the circle ended before any provider"
            assert upstream.summaries == []


async def test_a_proxy_in_front_of_another_has_its_summary_calls_forwarded_as_they_are() -> None:
    seen: list[Recorded] = []
    upstream = ScriptedUpstream(chat=lambda request: seen.append(request) or answer("## State\nFROM-AFAR"))  # type: ignore[func-returns-value]
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=SUMMARIZE, limit=1_000)) as inner,
    ):
        text = config(upstream, policy=SUMMARIZE).replace(upstream.address, inner.address)
        async with running_proxy(text) as outer:
            got = await outer.post(body(LONG))
    assert got.status == 200
    private = [request for request in seen if request.header("x-compaction-hop") == "2"]
    assert len(private) >= 1
    assert private[0].messages[0]["role"] == "system"
    assert b"[record of the earlier conversation]" not in private[0].body, "not compacted, although it is long"
    assert any("FROM-AFAR" in json.dumps(request.messages) for request in seen)


async def test_a_private_call_is_not_compacted_whatever_it_holds() -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, policy=SUMMARIZE)) as proxy:
        got = await proxy.post(body(LONG), {"x-compaction-hop": "1"})
    assert got.said == "unchanged; reason=disabled"
    assert upstream.requests[0].messages == LONG
    assert upstream.requests[0].header("x-compaction-hop") == "2"
    assert upstream.summaries == []
