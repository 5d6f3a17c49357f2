"""What counts, and the limits that follow from a policy and a window."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from compaction_policies.decide import Attempt, decide, decode_attempt, encode_attempt
from compaction_policies.dialects import openai_chat
from compaction_policies.measure import Limits, Units, limits
from compaction_policies.policy import Policy, Thresholds
from compaction_policies.transcript import Transcript
from support.bench import Message, step, turns, user

UNITS = Units(lambda text: len(text) // 4)


def read(messages: list[Message], **more: Any) -> Transcript:
    body = json.dumps({"messages": messages, **more}).encode()
    return openai_chat.read(openai_chat.split(body), openai_chat.Memo())


def size(message: Message) -> int:
    return UNITS.item(read([message]).items[0])


def test_images_cost_a_fixed_price_and_base64_is_never_text() -> None:
    def image(url: str) -> Message:
        return {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}],
        }

    small, large = image("data:image/png;base64,AAAA"), image("data:image/png;base64," + "A" * 400_000)
    assert size(small) == size(large)
    assert 1_200 <= size(small) <= 1_300
    assert size({"role": "user", "content": [{"type": "file", "file": {"file_data": "A" * 99_999}}]}) < 2_200


def test_arguments_names_reasoning_and_schemas_count() -> None:
    bare, armed = step(1)[0], step(1, arguments=json.dumps({"text": "x" * 4_000}))[0]
    assert size(armed) > size(bare) + 900
    assert size({**bare, "reasoning_content": "y" * 4_000}) > size(bare) + 900
    tools = [{"type": "function", "function": {"name": "f", "description": "z" * 6_000}}]
    assert UNITS.fixed(read([user(0)], tools=tools)) > 1_400
    assert UNITS.fixed(read([{"role": "system", "content": "s" * 4_000}, user(0)])) > 900


def sizes(window: int | None, max_tokens: int = 0, **thresholds: Any) -> Limits:
    policy = Policy("p", thresholds=replace(Thresholds(), **thresholds))
    return limits(policy, window, max_tokens, summary=2_000, ledger=2_000, clear=8_000)


@pytest.mark.parametrize(
    ("window", "max_tokens", "thresholds", "limit", "hard"),
    [
        (None, 0, {}, 120_000, None),
        (None, 0, {"threshold_tokens": None}, None, None),
        (200_000, 0, {}, 120_000, 200_000),
        (100_000, 0, {}, 75_000, 100_000),
        (100_000, 30_000, {}, 61_808, 70_000),
        (1_000_000, 0, {"threshold_tokens": 60_000, "threshold_ratio": 0.5}, 60_000, 1_000_000),
        (4_096, 4_096, {}, 2_048, 2_048),
        (8_192, 8_192, {}, 4_096, 4_096),
        (4_096, 0, {}, 3_072, 4_096),
        (128_000, 0, {"never": True}, None, 128_000),
    ],
)
def test_the_limit_is_the_smallest_that_is_known(
    window: int | None, max_tokens: int, thresholds: dict[str, Any], limit: int | None, hard: int | None
) -> None:
    made = sizes(window, max_tokens, **thresholds)
    assert (made.limit, made.hard) == (limit, hard)


def test_absolute_sizes_are_caps_scaled_to_the_limit() -> None:
    large, small = sizes(None), sizes(4_096, 4_096)
    assert (large.min_reclaim, large.clear_at_least, large.summary, large.ledger, large.carried) == (
        2_000,
        8_000,
        2_000,
        2_000,
        8_000,
    )
    assert (small.min_reclaim, small.clear_at_least, small.summary, small.ledger, small.carried) == (
        128,
        512,
        256,
        170,
        512,
    )
    assert (large.target, large.rearm, large.protected) == (60_000, 15_000, 15_000)
    assert (small.target, small.rearm, small.protected) == (1_024, 256, 256)


LIMITS = Limits(limit=1_000, hard=1_500, target=500, rearm=125, min_reclaim=60)
CHAT = read([*turns(0, 3), user(9)])
LOOPED = read([user(0), *step(1)])


def attempt(**given: Any) -> Attempt:
    return Attempt(**{"items": 2, "chain": CHAT.chain[2].hex(), "base": "", "left": 1_100, **given})


@pytest.mark.parametrize(
    ("tokens", "transcript", "tried", "more", "due", "reason"),
    [
        (1_000, CHAT, None, {}, False, "under-threshold"),
        (1_001, CHAT, None, {}, True, "over-threshold"),
        (1_001, LOOPED, None, {}, True, "pre-step"),
        (1_001, LOOPED, None, {"policy": Policy("p", pre_step=False)}, False, "throttled"),
        (1_501, LOOPED, None, {"policy": Policy("p", pre_step=False)}, True, "pre-step"),
        (1_200, CHAT, attempt(), {}, False, "no-progress"),
        (1_225, CHAT, attempt(), {}, True, "over-threshold"),
        (1_200, CHAT, attempt(chain="00"), {}, True, "over-threshold"),
        (1_200, CHAT, attempt(base="other"), {}, True, "over-threshold"),
        (1_200, CHAT, attempt(items=99), {}, True, "over-threshold"),
        (1_501, CHAT, attempt(left=1_500), {}, True, "over-threshold"),
        (1_501, CHAT, attempt(left=1_501, hard=1_500), {}, False, "no-progress"),
        (1_501, CHAT, attempt(left=1_501, hard=1_400), {}, True, "over-threshold"),
        (1_200, CHAT, None, {"passed_over": True}, False, "no-progress"),
        (1_501, CHAT, None, {"passed_over": True}, True, "over-threshold"),
        (10, CHAT, None, {"force": True}, True, "manual"),
    ],
)
def test_what_is_due_and_why(
    tokens: int, transcript: Transcript, tried: Attempt | None, more: dict[str, Any], due: bool, reason: str
) -> None:
    given = {"policy": Policy("p"), **more}
    decision = decide(given.pop("policy"), LIMITS, tokens, transcript, None, tried, **given)
    assert (decision.due, decision.reason) == (due, reason)


def test_no_limit_is_never_due() -> None:
    assert decide(Policy("p"), Limits(None, None), 10**9, CHAT, None, None).reason == "no-limit"


def test_attempts_survive_the_store_and_junk_is_none() -> None:
    assert decode_attempt(encode_attempt(attempt(hard=7))) == attempt(hard=7)
    assert decode_attempt(None) is None
    assert decode_attempt(b'{"items": "x"}') is None
