"""Policy + messages -> what becomes of each message: one table of golden outlines in tests/golden, one reader."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from compaction_policies.dialects import openai_chat
from compaction_policies.draft import Situation
from compaction_policies.measure import Units, limits
from compaction_policies.plan import NoPlan, Summary, finish, last_plan, plan
from compaction_policies.policy import (
    ClearOldToolResults,
    Pins,
    Policy,
    SummarizeOldPreserveRecent,
    Thresholds,
    Truncate,
)
from compaction_policies.validate import problem
from compaction_policies.view import apply
from support.bench import Message, step, turns, user, words

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
UNITS = Units(lambda text: len(text) // 4, call=0)
SYSTEM = {"role": "system", "content": "You are an agent."}


def big(number: int, **more: Any) -> list[Message]:
    return step(number, 200, **more)


LOOP = [SYSTEM, user(0), *(message for number in range(1, 11) for message in big(number))]
CHAT = [SYSTEM, *turns(0, 20, 60), user(99)]
LONG_ARGUMENTS = json.dumps({"path": "a.py", "content": "x" * 900})
CLEAR, SUMMARIZE, TRUNCATE = ClearOldToolResults, SummarizeOldPreserveRecent, Truncate
BRIEF = SummarizeOldPreserveRecent(preserve_recent_tokens=300, preserve_recent_turns=0, ledger=False)

CASES: dict[str, tuple[list[Message], dict[str, Any]]] = {
    "clear: oldest first, down to the target": (LOOP, {"strategies": (CLEAR(clear_at_least=100),)}),
    "clear: keepToolUses": (LOOP, {"strategies": (CLEAR(clear_at_least=100, keep_tool_uses=8),)}),
    "clear: keepTokens": (LOOP, {"strategies": (CLEAR(clear_at_least=100, keep_tokens=1500),)}),
    "clear: clearAtLeast not reached": (LOOP, {"strategies": (CLEAR(keep_tool_uses=9),)}),
    "clear: excludeTools by glob": (
        [SYSTEM, user(0), *big(1, tool="todo_write"), *(m for n in range(2, 11) for m in big(n))],
        {"strategies": (CLEAR(clear_at_least=100),), "exclude_tools": ("todo_*",)},
    ),
    "clear: excludeTools of the strategy": (
        LOOP,
        {"strategies": (CLEAR(clear_at_least=100, exclude_tools=("read",)),)},
    ),
    "clear: parallel calls": (
        [SYSTEM, user(0), *big(1, count=4), *big(2, count=4), *big(3)],
        {"strategies": (CLEAR(clear_at_least=100),)},
    ),
    "clear: errors stay": (
        [
            SYSTEM,
            user(0),
            *(
                m if m["role"] != "tool" or i > 4 else {**m, "content": "Error: " + m["content"]}
                for i, m in enumerate(LOOP[2:])
            ),
        ],
        {"strategies": (CLEAR(clear_at_least=100),)},
    ),
    "clear: errors too": (
        [
            SYSTEM,
            user(0),
            *(
                m if m["role"] != "tool" or i > 4 else {**m, "content": "Error: " + m["content"]}
                for i, m in enumerate(LOOP[2:])
            ),
        ],
        {"strategies": (CLEAR(clear_at_least=100, keep_errors=False),)},
    ),
    "clear: inputs": (
        [SYSTEM, user(0), *(m for n in range(1, 9) for m in step(n, 60, arguments=LONG_ARGUMENTS))],
        {"strategies": (CLEAR(clear_at_least=100),)},
    ),
    "clear: inputs off": (
        [SYSTEM, user(0), *(m for n in range(1, 9) for m in step(n, 60, arguments=LONG_ARGUMENTS))],
        {"strategies": (CLEAR(clear_at_least=100, clear_tool_inputs=False),)},
    ),
    "clear: inputs of one tool": (
        [
            SYSTEM,
            user(0),
            *(m for n in range(1, 9) for m in step(n, 60, tool="edit" if n % 2 else "read", arguments=LONG_ARGUMENTS)),
        ],
        {"strategies": (CLEAR(clear_at_least=100, clear_tool_inputs=("edit",)),)},
    ),
    "clear: no handle, a preview": (
        LOOP,
        {"strategies": (CLEAR(clear_at_least=100, externalize=False, preview_chars=12),)},
    ),
    "clear: lists stay lists": (
        [
            SYSTEM,
            user(0),
            *(
                {**m, "content": [{"type": "text", "text": m["content"]}]} if m["role"] == "tool" else m
                for m in LOOP[2:]
            ),
        ],
        {"strategies": (CLEAR(clear_at_least=100),)},
    ),
    "clear: a half answered group stays": (
        [SYSTEM, user(0), *big(1, count=2)[:2], user(2), *(m for n in range(3, 12) for m in big(n))],
        {"strategies": (CLEAR(clear_at_least=100),)},
    ),
    "summarize: recent tokens stay": (CHAT, {"strategies": (BRIEF,)}),
    "summarize: recent turns stay": (
        CHAT,
        {"strategies": (SUMMARIZE(preserve_recent_tokens=600, preserve_recent_turns=3, ledger=False),)},
    ),
    "summarize: the task of a tool loop stays an original": (LOOP, {"strategies": (BRIEF,)}),
    "summarize: newest 2 user messages": (CHAT, {"strategies": (BRIEF,), "preserve_user_messages": 2}),
    "summarize: no user messages": (CHAT, {"strategies": (BRIEF,), "preserve_user_messages": 0}),
    "summarize: the strategy's own preserveUserMessages": (
        CHAT,
        {
            "strategies": (
                SUMMARIZE(preserve_recent_tokens=300, preserve_recent_turns=0, ledger=False, preserve_user_messages=1),
            )
        },
    ),
    "summarize: a hard budget of user words": (CHAT, {"strategies": (BRIEF,), "preserve_user_tokens": 150}),
    "summarize: excluded groups stay": (
        [SYSTEM, user(0), *step(1, 30, tool="todo"), *turns(2, 18, 60), user(99)],
        {"strategies": (BRIEF,), "exclude_tools": ("todo",)},
    ),
    "summarize: excluded groups beyond the bound": (
        [SYSTEM, user(0), *step(1, 90, tool="todo"), *step(2, 90, tool="todo"), *turns(4, 18, 60), user(99)],
        {"strategies": (BRIEF,), "exclude_tools": ("todo",), "protected_max_tokens": 120},
    ),
    "summarize: later system messages stay": (
        [SYSTEM, *turns(0, 3, 60), {"role": "system", "content": words(77, 20)}, *turns(10, 16, 60), user(99)],
        {"strategies": (BRIEF,)},
    ),
    "summarize: later system messages beyond the bound are constraints": (
        [
            SYSTEM,
            *turns(0, 3, 60),
            {"role": "developer", "content": words(77, 60)},
            {"role": "developer", "content": words(77, 60)},
            *turns(10, 16, 60),
            user(99),
        ],
        {"strategies": (BRIEF,), "protected_max_tokens": 65},
    ),
    "summarize: pins": (CHAT, {"strategies": (BRIEF,), "pins": Pins(("Never touch migrations/.",))}),
    "summarize: as the assistant": (CHAT, {"strategies": (BRIEF,), "summary_role": "assistant"}),
    "summarize: nothing can help": ([SYSTEM, *turns(0, 2, 40), user(9, 1200)], {"strategies": (BRIEF,)}),
    "clear, then summarize": (LOOP, {"limit": 700, "strategies": (CLEAR(clear_at_least=100), BRIEF)}),
    "extractive": (
        CHAT,
        {"strategies": (SUMMARIZE(preserve_recent_tokens=300, preserve_recent_turns=0, summarizer="extractive"),)},
    ),
    "truncate: whole groups, oldest first": (LOOP, {"strategies": (TRUNCATE(),)}),
    "truncate: users are carried": (CHAT, {"strategies": (TRUNCATE(),)}),
    "truncate: excluded groups stay": (
        [SYSTEM, user(0), *step(1, 30, tool="todo"), *LOOP[2:]],
        {"strategies": (TRUNCATE(),), "exclude_tools": ("todo",)},
    ),
    "below the reclaim floor": ([SYSTEM, *turns(0, 9, 60), user(99)], {"limit": 600, "strategies": (CLEAR(),)}),
    "ladder: clear harder, then extract": (LOOP, {"strategies": (BRIEF,), "window": 1_300, "ladder": True}),
    "ladder: the newest results are shortened": (
        [SYSTEM, user(0), *step(1, 500, count=4)],
        {"strategies": (BRIEF,), "window": 1_300, "ladder": True},
    ),
    "ladder: lastResort forward": (
        [SYSTEM, user(0), *step(1, 500, count=4)],
        {"strategies": (BRIEF,), "window": 1_300, "ladder": True, "last_resort": "forward"},
    ),
}


def outline(messages: list[Message], settings: dict[str, Any]) -> str:
    """What becomes of each message, a line each; or the reason why nothing does."""
    known = dict(settings)
    limit, window, ladder = known.pop("limit", 1_000), known.pop("window", None), known.pop("ladder", False)
    policy = Policy("p", thresholds=Thresholds(threshold_tokens=limit, threshold_ratio=None), **known)
    request = openai_chat.split(json.dumps({"messages": messages}).encode())
    transcript = openai_chat.read(request, openai_chat.Memo())
    size = limits(
        policy,
        window,
        0,
        summary=2000,
        ledger=2000,
        clear=next((s.clear_at_least for s in policy.strategies if isinstance(s, CLEAR)), 8000),
    )
    make = last_plan if ladder else plan
    planned = make(
        Situation(transcript, policy, UNITS, size, None, "auto-trigger", lambda original: f"handle{len(original)}")
    )
    if isinstance(planned, NoPlan):
        return f"no plan: {planned.reason}\n"
    record = finish(planned, Summary("SUMMARY", "model") if planned.need else None, created_ms=0)
    assert record is not None
    assert problem(transcript, record, None, policy) is None
    forwarded = json.loads(openai_chat.assemble(request, len(transcript.head), apply(transcript, record)))["messages"]
    told = [item.index for item in planned.need.items] if planned.need else []
    lines = [
        f"{planned.strategy}: {record.tokens_before} -> {record.tokens_after} tokens, C {record.covers}, S {record.summarized_to}"
        + (f", told {told[0]}-{told[-1]} ({len(told)})" if told else "")
        + (", degraded" if record.degraded else "")
    ]
    lines += [_line(message, messages) for message in forwarded]
    return "\n".join(lines) + "\n"


def _line(message: Message, messages: list[Message]) -> str:
    if message in messages:
        return f"= {messages.index(message):>3} {message['role']}"
    content = message["content"]
    text = content if isinstance(content, str) or content is None else json.dumps(content)
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    said = " ".join((text or " ".join(calls)).split())
    return f"+     {message['role']}: {said if len(said) < 1500 else said[:700] + ' (...) ' + said[-700:]}"


def golden(name: str) -> Path:
    return GOLDEN / ("".join(char if char.isalnum() else "-" for char in name.lower()).replace("--", "-") + ".txt")


@pytest.mark.parametrize("name", CASES)
def test_plans_are_those_of_the_golden_files(name: str) -> None:
    """``UPDATE_GOLDEN=1`` writes them anew; read the difference before you keep it."""
    made = f"{name}\n----------\n{outline(*CASES[name])}"
    file = golden(name)
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(made, encoding="utf-8")
    assert made == file.read_text(encoding="utf-8")


def test_every_golden_file_has_a_case() -> None:
    assert {golden(name) for name in CASES} == set(GOLDEN.glob("*.txt"))
    assert len(CASES) == len({golden(name) for name in CASES})


def test_planning_changes_nothing_and_is_repeatable() -> None:
    before = json.dumps(LOOP)
    assert outline(*CASES["clear, then summarize"]) == outline(*CASES["clear, then summarize"])
    assert json.dumps(LOOP) == before
