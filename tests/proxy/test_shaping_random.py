"""Random clients against the real shaper: whatever they do, no array is invalid and no summary is a stranger's."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from typing import Any

import pytest

from compaction_policies.dialects import openai_chat
from compaction_policies.measure import Units
from compaction_policies.plan import Need, Summary
from compaction_policies.policy import ClearOldToolResults, Policy, SummarizeOldPreserveRecent, Thresholds, Truncate
from compaction_policies.record import Record
from compaction_policies.succession import follows
from compaction_policies.view import applies
from compaction_proxy.compaction import Compactor, Failed, Result
from compaction_proxy.jobs import Jobs
from compaction_proxy.shaping import Conversation, Shaped, Shaper
from compaction_proxy.store import MemoryStore, Records
from compaction_proxy.tokens import Counters

MARK = re.compile(r"mark-\d+")


class Scribe:
    """A summarizer that says exactly which messages it was told of; it can be made to fail."""

    def __init__(self) -> None:
        self.fails = False
        self.calls = 0

    async def write(self, need: Need) -> Summary | Failed:
        self.calls += 1
        if self.fails:
            return Failed("status 500")
        marks = MARK.findall(" ".join([need.anchor, *(item.text for item in need.items)]))
        return Summary("## State\n" + " ".join([*dict.fromkeys(marks)][: need.max_tokens // 3]), "scribe")


class Client:
    """A chat client: keeps its whole history and sends it with every request."""

    def __init__(self, rng: random.Random, names: itertools.count[int]) -> None:
        self.rng = rng
        self.names = names
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent. " * 3}]
        self.user()

    def text(self, least: int, most: int) -> str:
        words = self.rng.randint(least, most)
        return f"mark-{next(self.names)} " + " ".join(
            self.rng.choice(("alpha", "beta", "gamma", "delta")) for _ in range(words)
        )

    def user(self) -> None:
        self.messages.append({"role": "user", "content": self.text(3, 40)})

    def answer(self) -> None:
        self.messages.append({"role": "assistant", "content": self.text(3, 60)})

    def tools(self, *, aborted: bool = False) -> None:
        calls = [
            {
                "id": f"call_{self.rng.randint(0, 5)}_{at}",
                "type": "function",
                "function": {
                    "name": self.rng.choice(("read", "todo_write", "grep")),
                    "arguments": json.dumps({"path": self.text(1, 60)}),
                },
            }
            for at in range(self.rng.choice((1, 1, 1, 2, 4)))
        ]
        self.messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        answered = calls[: self.rng.randint(0, len(calls))] if aborted else calls
        order = list(answered)
        self.rng.shuffle(order)
        for call in order:
            size = 900 if self.rng.random() < 0.05 else 150
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.text(5, size)})

    def grow(self) -> None:
        what = self.rng.random()
        if what < 0.62:
            self.tools()
        elif what < 0.66:
            self.tools(aborted=True)
            self.user()
        elif what < 0.7:
            self.messages.append({"role": "system", "content": self.text(3, 20)})
            self.user()
        else:
            self.answer()
            self.user()

    def rendered(self) -> list[dict[str, Any]]:
        """As sent: some clients flip strings to parts, add marks, rename ids, and put keys in another order."""
        style = self.rng.random()
        if style < 0.6:
            return self.messages
        out = []
        for message in self.messages:
            message = dict(reversed(message.items())) if style < 0.8 else dict(message)
            if style > 0.9 and isinstance(message.get("content"), str):
                message["content"] = [
                    {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
                ]
            for key in ("tool_call_id",):
                if key in message:
                    message[key] = "r" + message[key]
            if message.get("tool_calls"):
                message["tool_calls"] = [{**call, "id": "r" + call["id"]} for call in message["tool_calls"]]
            out.append(message)
        return out


def valid(messages: list[dict[str, Any]]) -> bool:
    """Each call answered right behind its message, no orphan."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return False
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return False
        waiting = [call["id"] for call in message.get("tool_calls") or ()]
    return not waiting


def passed_over(record: Record | None, messages: list[dict[str, Any]]) -> bool:
    """Whether a record could not be applied to an earlier request of its chain: then it comes back by rule."""
    if record is None:
        return False
    body = json.dumps({"messages": messages}).encode()
    return not applies(openai_chat.read(openai_chat.split(body), openai_chat.Memo()), record)


def marks_of(messages: list[dict[str, Any]]) -> set[str]:
    return set(MARK.findall(json.dumps(messages)))


def policy(revision: str) -> Policy:
    return Policy(
        "p",
        revision=revision,
        thresholds=Thresholds(threshold_tokens=2_000, threshold_ratio=None),
        exclude_tools=("todo_*",),
        strategies=(
            ClearOldToolResults(clear_at_least=400, keep_tool_uses=2 if revision == "a" else 4),
            SummarizeOldPreserveRecent(preserve_recent_tokens=600),
            Truncate(),
        ),
    )


class World:
    """Two replicas on one store, clients that do what clients do, and the checks after every request."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = itertools.count()
        self.store = MemoryStore()
        self.scribe = Scribe()
        self.replicas = [self.replica() for _ in range(2)]
        self.clients = [Client(self.rng, self.names) for _ in range(2)]
        self.last: dict[int, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}
        self.events = 0
        self.requests = 0

    def replica(self) -> Shaper:
        counters = Counters(by_characters=True)
        self.counters = counters
        records = Records(
            self.store,
            ttl_seconds=3600,
            originals_ttl_seconds=600,
            keep_originals=True,
            clock_ms=lambda: 0,
            follows=follows,
        )
        jobs: Jobs[Result] = Jobs(lambda error: None)

        async def threads(work: Any) -> Any:
            return work()

        return Shaper(records, counters, Compactor(records, jobs, threads), jobs, lambda count: Units(count, call=0))

    async def request(self, number: int, *, window: int | None = None, force: bool = False) -> Shaped:
        client = self.clients[number]
        sent = json.loads(json.dumps(client.rendered()))
        body = json.dumps(
            {"model": "m", "messages": sent, "tools": [{"type": "function", "function": {"name": "read"}}]}
        ).encode()
        shaped = await self.rng.choice(self.replicas).shape(
            Conversation(
                body=body,
                model="m",
                policy=policy(self.rng.choice("ab")),
                force=force,
                tenant="t",
                session="s",
                window=window,
                tenant_secret=b"k",
                summarizer=self.scribe,
            )
        )
        forwarded = json.loads(shaped.body)["messages"] if shaped.body is not None else sent
        self.requests += 1
        self.events += shaped.event
        self.check(number, sent, forwarded, shaped)
        return shaped

    def check(self, number: int, sent: list[dict[str, Any]], forwarded: list[dict[str, Any]], shaped: Shaped) -> None:
        assert shaped.reason not in ("internal-error", "invariant-failed"), shaped
        if valid(sent):
            assert valid(forwarded)
        assert forwarded[0] == sent[0]
        assert forwarded[-1] == sent[-1] or shaped.reason == "degraded" or (shaped.record and shaped.record.degraded)
        last_user = next(message for message in reversed(sent) if message["role"] == "user")
        assert last_user in forwarded
        assert marks_of(forwarded) <= marks_of(sent), "words of another conversation"
        strangers = [message for message in forwarded if message not in sent]
        assert sum("[record of the earlier conversation]" in json.dumps(message) for message in strangers) <= 1
        assert "Old result of todo_write" not in json.dumps(forwarded), "a result of an excluded tool was cleared"
        before = self.last.get(number)
        if before is not None and not shaped.event and before[0] == sent[: len(before[0])]:
            steady = forwarded[: len(before[1])] == before[1]
            assert steady or passed_over(shaped.record, before[0]), "the prefix changed without an event"
        self.last[number] = (sent, forwarded)

    async def step(self) -> None:
        number = self.rng.randrange(len(self.clients))
        client = self.clients[number]
        act = self.rng.random()
        if act < 0.8:
            client.grow()
        elif act < 0.84 and len(client.messages) > 12:
            at = self.rng.randrange(2, len(client.messages) - 1)
            if client.messages[at]["role"] in ("user", "tool"):
                client.messages[at] = {**client.messages[at], "content": client.text(3, 30)}
                self.last.pop(number, None)
        elif act < 0.9 and len(client.messages) > 20:
            users = [at for at, message in enumerate(client.messages) if message["role"] == "user"]
            client.messages = client.messages[: self.rng.choice(users[len(users) // 2 :]) + 1]
            self.last.pop(number, None)
        elif act < 0.93:
            self.scribe.fails = not self.scribe.fails
        window = self.rng.choice((None, None, 2_600, 4_096))
        await self.request(number, window=window, force=self.rng.random() < 0.01)


@pytest.mark.parametrize("seed", range(12))
def test_no_random_client_gets_an_invalid_array_or_foreign_words(seed: int) -> None:
    world = World(seed)

    async def play() -> None:
        for _ in range(160):
            await world.step()

    asyncio.run(play())
    assert world.events >= 3
