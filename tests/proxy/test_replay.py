"""Whole conversations, request by request: validity, stability, how often, how much."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from compaction_policies.policy import ClearOldToolResults, Policy, SummarizeOldPreserveRecent, Thresholds
from support.bench import Bench, Message, Sent, loop, user
from support.corpus import conversations, oddities, requests_of

BALANCED = (ClearOldToolResults(), SummarizeOldPreserveRecent())


def policy(limit: int) -> Policy:
    return Policy("p", thresholds=Thresholds(threshold_tokens=limit, threshold_ratio=None), strategies=BALANCED)


def pairs_hold(messages: list[Message]) -> bool:
    """Each call is answered directly behind its message; no orphan, no id twice in one message."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message.get("tool_call_id") not in waiting:
                return False
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return False
        waiting = [call["id"] for call in message.get("tool_calls") or ()]
    return not waiting


class Replay:
    """Sends every request of a conversation and checks each against the one before."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.events = 0
        self.over = 0
        self.sent = 0
        self.forwarded = 0
        self.last: Sent | None = None

    async def request(self, messages: list[Message], *, session: str, **fields: Any) -> Sent:
        sent = await self.bench.send(messages, session=session, **fields)
        if pairs_hold(messages):
            assert pairs_hold(sent.messages)
        assert sent.messages[-1] == messages[-1]
        head = 0
        while head < len(messages) and messages[head]["role"] in ("system", "developer"):
            head += 1
        assert sent.messages[:head] == messages[:head]
        last_user = next((message for message in reversed(messages) if message["role"] == "user"), None)
        assert last_user is None or last_user in sent.messages
        if self.last is not None and not sent.event:
            assert sent.messages[: len(self.last.messages)] == self.last.messages, "the prefix changed without an event"
        self.events += sent.event
        self.sent += len(json.dumps(messages))
        self.forwarded += len(json.dumps(sent.messages))
        self.over += (sent.shaped.tokens_before or 0) > (sent.shaped.limit or 0)
        self.last = sent
        return sent


def test_two_hundred_tool_steps_cost_less_than_half() -> None:
    async def play() -> Replay:
        replay = Replay(Bench(policy(24_000)))
        chat = [{"role": "system", "content": "You are an agent."}, user(0, 60)]
        for number in range(200):
            await replay.request(chat, session="long")
            chat = [*chat, *loop(number + 1, 1, 600)]
        return replay

    replay = asyncio.run(play())
    assert replay.over > 100
    assert 1 <= replay.events <= replay.over / 10
    assert replay.forwarded < 0.45 * replay.sent


@pytest.mark.parametrize("conversation", conversations(), ids=lambda conversation: conversation["id"])
def test_recorded_conversations_stay_valid(conversation: dict[str, Any]) -> None:
    """At a low threshold, so that most of them compact."""

    async def play() -> Replay:
        replay = Replay(Bench(policy(12_000 if len(json.dumps(conversation)) > 100_000 else 1_500)))
        for _, body in requests_of(conversation):
            await replay.request(body["messages"], session=conversation["id"], tools=body.get("tools") or [])
        return replay

    replay = asyncio.run(play())
    assert replay.last is not None


def test_every_user_message_survives_all_events_of_a_long_session() -> None:
    found = [conversation for conversation in conversations() if conversation["id"] == "pi-large-session"]
    if not found:
        pytest.skip("needs the shared corpus: pi-large-session is not in the sample")

    async def play() -> int:
        replay = Replay(Bench(policy(30_000)))
        for _, body in requests_of(found[0]):
            sent = await replay.request(body["messages"], session="pi")
            if sent.event:
                everything = json.dumps(sent.messages, ensure_ascii=False)
                for message in body["messages"]:
                    if message["role"] == "user":
                        assert json.dumps(message["content"], ensure_ascii=False)[1:-1] in everything
        return replay.events

    assert asyncio.run(play()) >= 2


NO_ODDITIES = pytest.param(
    {"id": "none"}, marks=pytest.mark.skip(reason="needs the shared corpus: the sample has no odd arrays")
)


@pytest.mark.parametrize("odd", oddities() or [NO_ODDITIES], ids=lambda odd: odd["id"])
def test_odd_arrays_are_never_made_worse(odd: dict[str, Any]) -> None:
    """A group is kept as it was sent or goes whole; what was paired stays paired."""

    async def play() -> None:
        bench = Bench(policy(600))
        for end in range(2, len(odd["messages"]) + 1):
            messages = odd["messages"][:end]
            sent = await bench.send(messages, session=odd["id"])
            assert sent.messages[-1] == messages[-1] or sent.shaped.reason in ("degraded", "sticky")
            calls = {call["id"] for message in sent.messages for call in message.get("tool_calls") or ()}
            before = {call["id"] for message in messages for call in message.get("tool_calls") or ()}
            orphans = [
                m["tool_call_id"] for m in sent.messages if m["role"] == "tool" and m["tool_call_id"] not in calls
            ]
            assert all(orphan not in before for orphan in orphans), "a result lost its call"

    asyncio.run(play())
