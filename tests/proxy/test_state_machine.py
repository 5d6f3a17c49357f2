"""A state machine of a client and two replicas: hypothesis chooses what happens next, the rules of the record must hold.

``STATE_MACHINE_EXAMPLES`` and ``STATE_MACHINE_STEPS`` make it longer.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from compaction_policies.dialects import openai_chat
from compaction_policies.policy import ClearOldToolResults, SummarizeOldPreserveRecent, Truncate
from compaction_policies.record import Record
from compaction_policies.view import applies
from compaction_proxy.store import FailoverStore, MemoryStore, StoreUnavailable
from support.bench import MARK, Bench, Message, Sent, make_policy, step, user, words

EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "20"))
STEPS = int(os.environ.get("STATE_MACHINE_STEPS", "40"))
STRATEGIES = (
    ClearOldToolResults(clear_at_least=200, keep_tool_uses=2),
    SummarizeOldPreserveRecent(preserve_recent_tokens=500),
    Truncate(),
)


class Switched(MemoryStore):
    """A shared store that can go away."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: self.now)
        self.now = 0.0
        self.away = False

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in (
            "mget",
            "put",
            "put_many",
            "put_if_absent",
            "touch",
            "delete",
            "acquire",
            "renew",
            "release",
            "commit_index",
            "ping",
        ) and super().__getattribute__("away"):

            async def refuse(*_: Any, **__: Any) -> Any:
                message = "away"
                raise StoreUnavailable(message)

            return refuse
        return found


def transcript(messages: list[Message]) -> Any:
    return openai_chat.read(openai_chat.split(json.dumps({"messages": messages}).encode()), openai_chat.Memo())


class Conversation(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.shared = Switched()
        self.number = 0
        self.last: tuple[list[Message], Sent] | None = None
        self.policies = [
            make_policy(2_000, STRATEGIES, exclude_tools=("todo",), revision="1"),
            make_policy(
                2_000,
                (replace(STRATEGIES[0], keep_tool_uses=5), *STRATEGIES[1:]),
                exclude_tools=("todo", "grep"),
                revision="2",
            ),
        ]
        self.window: int | None = None
        self.unsettled: set[int] = set()
        """Replicas that have not yet offered the shared store what they made while it was away."""
        self.limit = 2_000
        self.turn = 0

    @initialize()
    def begin(self) -> None:
        self.benches = [self.replica(), self.replica()]
        self.messages: list[Message] = [{"role": "system", "content": "You are an agent."}, user(0)]

    def replica(self) -> Bench:
        store = FailoverStore(self.shared, MemoryStore(), mirror_ttl=3600, first_pause=0.001)
        return Bench(self.policies[0], store)

    def teardown(self) -> None:
        async def close() -> None:
            for bench in self.benches:
                await bench.store.close()

        if hasattr(self, "benches"):
            self.runner.run(close())
        self.runner.close()

    def next(self) -> int:
        self.number += 1
        return self.number

    # ------------------------------------------------------------ what a client does

    @rule(
        tool=st.sampled_from(["read", "read", "grep", "todo"]),
        tokens=st.integers(5, 260),
        count=st.sampled_from([1, 1, 1, 3]),
    )
    def tool_step(self, tool: str, tokens: int, count: int) -> None:
        self.messages = [*self.messages, *step(self.next(), tokens, tool=tool, count=count)]
        self.request()

    @rule(tokens=st.integers(5, 120))
    def user_turn(self, tokens: int) -> None:
        self.messages = [
            *self.messages,
            {"role": "assistant", "content": words(self.next(), tokens)},
            user(self.next(), tokens),
        ]
        self.request()

    @rule()
    def giant_result(self) -> None:
        self.messages = [*self.messages, *step(self.next(), 2_600)]
        self.request()

    @rule()
    def aborted_call(self) -> None:
        self.messages = [*self.messages, step(self.next(), 5, count=2)[0], user(self.next())]
        self.request()

    @rule()
    def later_instructions(self) -> None:
        self.messages = [*self.messages, {"role": "system", "content": words(self.next(), 40)}, user(self.next())]
        self.request()

    @precondition(lambda self: len(self.messages) > 14)
    @rule(place=st.floats(0.1, 0.95))
    def edit(self, place: float) -> None:
        at = int(place * len(self.messages))
        if self.messages[at]["role"] in ("user", "tool"):
            self.messages = [
                *self.messages[:at],
                {**self.messages[at], "content": words(self.next(), 40)},
                *self.messages[at + 1 :],
            ]
            self.last = None
            self.request()

    @precondition(lambda self: len(self.messages) > 20)
    @rule(place=st.floats(0.4, 0.98))
    def branch_or_regenerate(self, place: float) -> None:
        users = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        self.messages = self.messages[: users[int(place * len(users))] + 1]
        self.last = None
        self.request()

    @rule()
    def same_again(self) -> None:
        self.request()

    @rule()
    def rendered_otherwise(self) -> None:
        """New ids, parts for strings, marks, another key order: the same conversation."""
        changed = []
        for message in self.messages:
            message = dict(reversed(message.items()))
            if isinstance(message.get("content"), str) and message["role"] == "user":
                message["content"] = [
                    {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
                ]
            if "tool_call_id" in message:
                message["tool_call_id"] += "x"
            if message.get("tool_calls"):
                message["tool_calls"] = [{**call, "id": call["id"] + "x"} for call in message["tool_calls"]]
            changed.append(message)
        before = self.last
        kept, self.messages = self.messages, changed
        self.last = None
        sent = self.request()
        if (
            before is not None
            and before[0] == kept
            and not sent.event
            and before[1].shaped.record
            and sent.shaped.record
        ):
            assert sent.shaped.record.id == before[1].shaped.record.id
        self.messages = kept
        self.last = None

    @rule()
    def force(self) -> None:
        self.request(force=True)

    @precondition(lambda self: len(self.messages) > 4)
    @rule()
    def both_replicas_at_once(self) -> None:
        async def play() -> list[Sent]:
            return list(
                await asyncio.gather(
                    *(bench.send(self.messages, policy=self.policy(at)) for at, bench in enumerate(self.benches))
                )
            )

        for sent in self.runner.run(play()):
            self.check(sent)
        self.last = None

    # ------------------------------------------------------------ what the world does

    @rule(limit=st.sampled_from([1_500, 2_000, 4_000]), window=st.sampled_from([None, 2_400, 4_096, 8_192]))
    def other_limits(self, limit: int, window: int | None) -> None:
        self.limit, self.window = limit, window

    @rule(fails=st.booleans())
    def summarizer(self, fails: bool) -> None:
        for bench in self.benches:
            bench.scribe.fails = fails

    @rule()
    def store_goes(self) -> None:
        """Each replica then has what it has seen itself."""
        self.shared.away = True
        self.last = None

    @rule()
    def store_comes_back(self) -> None:
        async def settled() -> None:
            async with asyncio.timeout(5):
                while any(bench.store.degraded for bench in self.benches):
                    await asyncio.sleep(0.001)

        self.shared.away = False
        self.runner.run(settled())
        self.unsettled = {0, 1}

    @rule()
    def everything_expires(self) -> None:
        self.shared.now += 1_000_000
        self.last = None

    # ------------------------------------------------------------ what must hold

    def policy(self, at: int) -> Any:
        base = self.policies[at % 2]
        return replace(base, thresholds=replace(base.thresholds, threshold_tokens=self.limit))

    def request(self, *, force: bool = False) -> Sent:
        self.turn += 1
        turn = 0 if self.shared.away else self.turn
        bench = self.benches[turn % 2]
        sent = self.runner.run(
            bench.send(self.messages, policy=self.policy(self.turn), window=self.window, force=force)
        )
        self.check(sent)
        settled, self.unsettled = not self.unsettled, self.unsettled - {turn % 2}
        if settled and self.last is not None and not sent.event and self.last[0] == self.messages[: len(self.last[0])]:
            steady = sent.messages[: len(self.last[1].messages)] == self.last[1].messages
            assert steady or self.came_back(sent.shaped.record, self.last[0]), "the prefix changed without an event"
        self.last = None if self.shared.away and turn != self.turn else (self.messages, sent)
        return sent

    def came_back(self, record: Record | None, earlier: list[Message]) -> bool:
        """A record that could not be applied to the request before is in force again by rule."""
        return record is not None and not applies(transcript(earlier), record)

    def check(self, sent: Sent) -> None:
        messages, forwarded = self.messages, sent.messages
        assert forwarded[0] == messages[0]
        record = sent.shaped.record
        last_resort = record is not None and record.op_at(len(messages) - 2, "content") is not None
        assert forwarded[-1] == messages[-1] or last_resort
        last_user = next(message for message in reversed(messages) if message["role"] == "user")
        assert last_user in forwarded
        assert set(MARK.findall(json.dumps(forwarded))) <= set(MARK.findall(json.dumps(messages))), "a stranger's words"
        calls = [call["id"] for message in forwarded for call in message.get("tool_calls") or ()]
        answered = [message["tool_call_id"] for message in forwarded if message["role"] == "tool"]
        assert set(answered) <= set(calls), "a result without its call"
        theirs = {call["id"] for message in messages for call in message.get("tool_calls") or ()}
        open_calls = theirs - {message["tool_call_id"] for message in messages if message["role"] == "tool"}
        assert set(calls) - set(answered) <= open_calls, "a call without its result"
        assert json.dumps(forwarded).count("[record of the earlier conversation]") <= 1
        assert "Old result of todo" not in json.dumps(forwarded)
        for message in forwarded:
            for call in message.get("tool_calls") or ():
                json.loads(call["function"]["arguments"])
        if sent.event:
            record = sent.record
            assert record.tokens_after < record.tokens_before or record.parent
            assert record.covers >= record.summarized_to
            assert all(index < record.summarized_to for index in record.kept)


Conversation.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    phases=[Phase.generate] if os.environ.get("STATE_MACHINE_EXAMPLES") else [Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    derandomize=not os.environ.get("STATE_MACHINE_EXAMPLES"),
    suppress_health_check=list(HealthCheck),
)
TestConversation = Conversation.TestCase
