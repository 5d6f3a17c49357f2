"""Requests that no client should send: whatever comes, something goes upstream, and no fault of ours is behind it."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from typing import Any

import pytest

from compaction_policies.policy import ClearOldToolResults, SummarizeOldPreserveRecent
from compaction_proxy.shaping import Conversation
from support.bench import Bench, assistant, loop, make_policy, user

JUNK: list[Any] = [
    None, True, 1, -1, 1.5, "", [], {}, "x", "\ud83c", [1], {"a": 1}, "tool", "user", "system", {"type": "text"},
    {"type": "text", "text": 3}, [{"type": "image_url"}], [{"type": "image_url", "image_url": "data:x"}], [None], [[]],
    {"function": {}}, [{"id": 1, "function": {"name": 1, "arguments": 1}}], [{"function": {"name": "f", "arguments": {"a": 1}}}],
    [{"type": "custom", "custom": {"name": "x", "input": "y"}}], 10**30, 1e300, {"name": "f", "arguments": "{}"},
]  # fmt: skip
KEYS = [
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "name",
    "refusal",
    "function_call",
    "audio",
    "is_error",
    "reasoning_content",
    "zz",
]


def mutated(rng: random.Random, messages: list[Any]) -> list[Any]:
    for _ in range(rng.randint(1, 4)):
        at, what = rng.randrange(len(messages)), rng.random()
        message = messages[at]
        if what < 0.5 and isinstance(message, dict):
            message[rng.choice(KEYS)] = copy.deepcopy(rng.choice(JUNK))
        elif what < 0.6 and isinstance(message, dict) and message:
            message.pop(rng.choice(list(message)))
        elif what < 0.7:
            messages[at] = copy.deepcopy(rng.choice(JUNK))
        elif what < 0.8:
            messages.insert(at, json.loads(json.dumps(rng.choice(messages))))
        elif what < 0.9:
            rng.shuffle(messages)
        elif len(messages) > 1:
            messages.pop(at)
    return messages


@pytest.mark.parametrize("seed", range(3))
def test_garbage_causes_no_fault(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(
        make_policy(
            1_000, (ClearOldToolResults(clear_at_least=10), SummarizeOldPreserveRecent(preserve_recent_tokens=200))
        )
    )
    seen: Counter[str] = Counter()

    async def play() -> None:
        for _ in range(800):
            messages = [user(0), *loop(1, 6, 120, count=rng.choice([1, 2])), assistant(3), user(4)]
            body: dict[str, Any] = {
                "model": "m",
                "messages": mutated(rng, json.loads(json.dumps(messages))),
                "pad": "x" * 1_100,
            }
            for name in ("tools", "max_tokens", "response_format"):
                if rng.random() < 0.2:
                    body[name] = rng.choice(JUNK)
            raw = json.dumps(body).encode("utf-8", "surrogatepass")
            if rng.random() < 0.1:
                at = rng.randrange(len(raw))
                raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
            shaped = await bench.shaper.shape(
                Conversation(raw, "m", bench.policy, rng.random() < 0.3, "t", None, None, b"k", bench.scribe)
            )
            seen[shaped.reason] += 1
            assert shaped.reason not in ("internal-error", "invariant-failed"), (shaped.detail, raw)
            if shaped.body is not None:
                assert json.loads(shaped.body)["pad"] == json.loads(raw)["pad"]

    asyncio.run(play())
    assert seen["unreadable"] > 100
    assert seen["over-threshold"] > 20
    assert seen["sticky"] > 20


@pytest.mark.parametrize("depth", [500, 5_000, 100_000])
async def test_deep_nesting_is_forwarded_as_it_is(depth: int) -> None:
    bench = Bench()
    nested = "[" * depth + "]" * depth
    raw = (
        '{"model":"m","pad":"' + "x" * 1_100 + '","messages":[{"role":"user","content":"a","deep":' + nested + "}]}"
    ).encode()
    shaped = await bench.shaper.shape(Conversation(raw, "m", bench.policy, False, "t", "s", None, b"k", bench.scribe))
    assert shaped.body is None
    assert shaped.reason in ("unreadable", "under-threshold", "irreducible")
