"""A fault at any one step inside the proxy: the user's request is answered, in the form last sent where that is known."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import pytest
from test_e2e_compaction import CLEAR, SUMMARIZE, body

from compaction_policies.dialects import openai_chat
from compaction_proxy import compaction, shaping
from compaction_proxy.store import MemoryStore, Records
from compaction_proxy.summaries import ModelSummarizer
from compaction_proxy.telemetry import Telemetry
from compaction_proxy.tokens import Counter, Counters
from support.bench import Message, assistant, loop, turns, user
from support.proxy import config, running_proxy
from support.upstream import ScriptedUpstream

Left = Literal["own bytes", "form last sent", "new form"]
"""What is sent when the step fails at a request that is due for the second compaction of its conversation."""

STEPS: list[tuple[Any, str, Left]] = [
    (Records, "secret", "new form"),
    (Records, "look_up", "own bytes"),
    (Records, "record", "own bytes"),
    (Records, "applied", "new form"),
    (Records, "commit", "form last sent"),
    (Records, "put_originals", "form last sent"),
    (Records, "renew_due", "new form"),
    (MemoryStore, "mget", "own bytes"),
    (MemoryStore, "put", "form last sent"),
    (MemoryStore, "put_many", "form last sent"),
    (MemoryStore, "put_if_absent", "form last sent"),
    (MemoryStore, "commit_index", "form last sent"),
    (MemoryStore, "touch", "new form"),
    (openai_chat, "split", "own bytes"),
    (openai_chat, "read", "own bytes"),
    (openai_chat, "assemble", "own bytes"),
    (shaping, "apply", "own bytes"),
    (shaping, "order_problem", "new form"),
    (shaping, "decide", "form last sent"),
    (compaction, "plan", "form last sent"),
    (compaction, "finish", "form last sent"),
    (compaction, "problem", "form last sent"),
    (Counters, "get", "form last sent"),
    (Counters, "off_loop", "form last sent"),
    (Counter, "count", "form last sent"),
    (Telemetry, "count", "new form"),
]
WITH_A_MODEL: list[tuple[Any, str, Left]] = [
    (Records, "lock", "form last sent"),
    (MemoryStore, "acquire", "form last sent"),
    (MemoryStore, "release", "form last sent"),
    (ModelSummarizer, "write", "form last sent"),
    (compaction, "finish", "form last sent"),
    (Telemetry, "book_call", "form last sent"),
]


def fail(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    async def later(*_: Any, **__: Any) -> Any:
        raise RuntimeError

    def now(*_: Any, **__: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(owner, name, later if inspect.iscoroutinefunction(getattr(owner, name)) else now)


async def _play(
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    chat: list[Message],
    more: list[Message],
    owner: Any,
    name: str,
    left: Left,
) -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, policy=policy)) as proxy:
        fail(monkeypatch, owner, name)
        assert (await proxy.post(body(chat))).status == 200
        assert upstream.requests[-1].messages[-1] == chat[-1]
        monkeypatch.undo()
        before = await proxy.post(body(chat))
        assert before.said.split(";")[0] in ("compacted", "sticky"), "it recovers"
        sent = upstream.requests[-1].messages
        fail(monkeypatch, owner, name)
        got = await proxy.post(body([*chat, *more]))
        monkeypatch.undo()
        assert got.status == 200
        now = upstream.requests[-1].messages
        if left == "own bytes":
            assert got.said == "unchanged; reason=internal-error"
            assert now == [*chat, *more]
        elif left == "form last sent":
            assert now == [*sent, *more]
            assert got.headers["x-compaction-id"] == before.headers["x-compaction-id"]
        else:
            assert got.headers["x-compaction-id"] != before.headers["x-compaction-id"]
            assert now[-1] == more[-1]
        assert (await proxy.post(body([*chat, *more]))).said.split(";")[0] in ("compacted", "sticky")


def _named(steps: list[tuple[Any, str, Left]]) -> Any:
    return pytest.mark.parametrize(
        ("owner", "name", "left"),
        steps,
        ids=[f"{owner.__name__.rpartition('.')[2]}.{name}" for owner, name, _ in steps],
    )


@_named(STEPS)
async def test_a_step_that_fails_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, left: Left
) -> None:
    chat = [user(0), *loop(1, 20, 150), assistant(2), user(3)]
    await _play(monkeypatch, CLEAR, chat, [*loop(100, 20, 150), assistant(7), user(9)], owner, name, left)


@_named(WITH_A_MODEL)
async def test_a_step_of_a_summary_that_fails_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, left: Left
) -> None:
    chat = [*turns(0, 40, 60), user(99)]
    await _play(monkeypatch, SUMMARIZE, chat, [*turns(200, 40, 60), user(199)], owner, name, left)


async def test_without_a_key_from_the_store_tenants_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = ScriptedUpstream()
    text_of = {"tenant": "credential", "policy": SUMMARIZE}
    async with upstream.running(), running_proxy(config(upstream, **text_of)) as proxy:
        fail(monkeypatch, Records, "secret")
        chat = [*turns(0, 40, 60), user(99)]
        for key in ("sk-one", "sk-two"):
            got = await proxy.post(body(chat), {"authorization": f"Bearer {key}"})
            assert got.said == "compacted; reason=over-threshold"
        assert len(upstream.summaries) == 2
