"""A summary without a model: what was asked, what was answered, which files, commands and errors there were, and the plan.

Deterministic, in any language: it quotes and never writes. Limits are halved in a fixed order until it fits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compaction_policies.shorten import head_tail
from compaction_policies.transcript import Item

_PATH_KEYS = ("path", "file_path", "file", "filename", "notebook_path", "target_file")
_COMMAND_KEYS = ("command", "cmd", "query", "pattern", "url")
_PLAN_TOOLS = re.compile(r"todo|plan", re.IGNORECASE)
_CUT = " [...] "


@dataclass(frozen=True, slots=True)
class _Limits:
    """How much of each kind is shown: characters of a text, and how many of them."""

    prompt_chars: int = 1_200
    prompts: int = 12
    reply_chars: int = 900
    replies: int = 12
    lines: int = 40
    line_chars: int = 200
    plan_chars: int = 1_200


def extractive(items: Sequence[Item], max_tokens: int, count: Callable[[str], int]) -> str:
    """What stands out in ``items``, within ``max_tokens`` tokens."""
    limits = _Limits()
    text = _written(items, limits)
    for step in range(24):
        if count(text) <= max_tokens:
            return text
        limits = _halved(limits, step)
        text = _written(items, limits)
    while count(text) > max_tokens and len(text) > 16:
        text = text[: len(text) * 3 // 4]
    return text


def _halved(limits: _Limits, step: int) -> _Limits:
    """Lists of files and commands first, then replies, then prompts."""
    which = step % 3
    return _Limits(
        prompt_chars=limits.prompt_chars if which < 2 else max(80, limits.prompt_chars // 2),
        prompts=limits.prompts if which < 2 else max(2, limits.prompts // 2),
        reply_chars=limits.reply_chars if which != 1 else max(60, limits.reply_chars // 2),
        replies=limits.replies if which != 1 else max(1, limits.replies // 2),
        lines=limits.lines if which != 0 else max(2, limits.lines // 2),
        line_chars=limits.line_chars if which != 0 else max(40, limits.line_chars // 2),
        plan_chars=limits.plan_chars if which != 0 else max(80, limits.plan_chars // 2),
    )


def _written(items: Sequence[Item], limits: _Limits) -> str:
    users = [item.text.strip() for item in items if item.role == "user" and item.text.strip()]
    sections = [
        ("Goal", [_one(text, limits.prompt_chars) for text in _ends(users, limits.prompts)]),
        ("State", [_one(text, limits.reply_chars) for text in _closing(items)[-limits.replies :]]),
        ("Artifacts", _arguments(items, _PATH_KEYS)[-limits.lines :]),
        (
            "Facts and identifiers",
            [_one(line, limits.line_chars) for line in _arguments(items, _COMMAND_KEYS)[-limits.lines :]],
        ),
        ("Errors", [_one(line, limits.line_chars) for line in _errors(items)[-limits.lines // 2 :]]),
        ("Next steps", [_one(text, limits.plan_chars) for text in _plan(items)]),
    ]
    return "\n\n".join(f"## {title}\n" + "\n".join(f"- {line}" for line in lines) for title, lines in sections if lines)


def _ends(texts: Sequence[str], most: int) -> list[str]:
    """The first, and the newest."""
    return list(texts) if len(texts) <= most else [texts[0], *texts[1 - most :]]


def _closing(items: Sequence[Item]) -> list[str]:
    """Replies that ended a turn, and the newest words beside tool calls."""
    closing = [item.text.strip() for item in items if item.role == "assistant" and item.text.strip() and not item.calls]
    beside = [item.text.strip() for item in items if item.role == "assistant" and item.text.strip() and item.calls]
    return [*closing, *beside[-3:]]


def _arguments(items: Sequence[Item], keys: Sequence[str]) -> list[str]:
    """Values of well-known argument names, with the tools that used them; the newest mention counts."""
    found: dict[str, dict[str, None]] = {}
    for item in items:
        for call in item.calls:
            for value in _values(call.arguments, keys):
                tools = found.pop(value, {})
                tools[call.name] = None
                found[value] = tools
    return [f"{value} ({', '.join(tools)})" for value, tools in found.items()]


def _values(arguments: str, keys: Sequence[str]) -> list[str]:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return []
    if not isinstance(given, dict):
        return []
    return [" ".join(value.split()) for key in keys if isinstance(value := given.get(key), str) and value.strip()]


def _errors(items: Sequence[Item]) -> list[str]:
    return [f"{item.call_name}: {' '.join(item.text.split())}" for item in items if item.role == "tool" and item.error]


def _plan(items: Sequence[Item]) -> list[str]:
    """The newest call of a plan or todo tool."""
    for item in reversed(items):
        for call in item.calls:
            if _PLAN_TOOLS.search(call.name):
                return [call.arguments]
    return []


def _one(text: str, chars: int) -> str:
    return head_tail(" ".join(text.split()), chars, _CUT)
