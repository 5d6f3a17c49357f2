"""What counts as a summary: a model's answer is taken only if it is one, and never silently cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compaction_policies.shorten import head_only

CUT_NOTE = "\n[the summary was cut at its length limit]"
_THINKING = re.compile(r"<(think|thinking|reasoning|thought)>.*?</\1>\s*", re.DOTALL | re.IGNORECASE)
_OPEN_THINKING = re.compile(r"^\s*<(?:think|thinking|reasoning|thought)>.*\Z", re.DOTALL | re.IGNORECASE)
_LEFT_THINKING = re.compile(r"\A.*?</(?:think|thinking|reasoning|thought)>\s*", re.DOTALL | re.IGNORECASE)
_MARKUP = re.compile(
    r"^\s*(?:<\|?(?:tool_call|function_call|tool_calls|function=|invoke\b)|\[TOOL_CALLS\]|<function|<｜tool"
    r"|\{\s*\"(?:name|tool|function)\"\s*:\s*\"[^\"]+\"\s*,\s*\"(?:arguments|parameters|input)\")",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"^\s*(?:i(?:'m| am) (?:sorry|unable|not able)|i (?:can(?:'|no)t|cannot|won't)|sorry[,.]|as an ai"
    r"|(?:please|could you|can you) (?:provide|share|paste|send)|there is (?:no|nothing)|no (?:conversation|events|transcript)"
    r"|lo siento|je (?:suis désolé|ne peux pas)|es tut mir leid|ich kann (?:das |dies )?(?:leider )?nicht|desculpe|mi dispiace"
    r"|抱歉|对不起|申し訳|죄송|извините|к сожалению)",
    re.IGNORECASE,
)
_SHORT_CHARS = 400
"""A refusal is short; a summary that opens with such words goes on."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A summary. ``cut`` where it was too long and ends in a visible mark."""

    text: str
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """No summary, and why, without any text of it. ``retry``: asking for a shorter one may help."""

    why: str
    retry: bool = False


def accept(reply: Any, count: Callable[[str], int], max_tokens: int, *, last: bool = False) -> Accepted | Rejected:
    """Judge a chat completions answer.

    Args:
        reply: the decoded body, whatever it is.
        max_tokens: what the summary may count; a quarter more is let pass.
        last: no further call will be made: a text that is too long is cut at a line end, with a mark.
    """
    message, finish = _message(reply)
    if message is None:
        return Rejected("no answer in the body")
    if message.get("tool_calls") or message.get("function_call"):
        return Rejected("a tool call instead of a summary")
    if message.get("refusal"):
        return Rejected("refused")
    text = _text(message.get("content"))
    if not text:
        return Rejected("empty", retry=finish == "length")
    if _MARKUP.match(text):
        return Rejected("tool call markup instead of a summary")
    if len(text) < _SHORT_CHARS and _REFUSAL.match(text):
        return Rejected("refused")
    too_long = count(text) > max_tokens * 5 // 4
    if finish != "length" and not too_long:
        return Accepted(text)
    if not last:
        return Rejected("longer than its limit", retry=True)
    return Accepted(_cut(text, count, max_tokens) + CUT_NOTE, cut=True)


def _message(reply: Any) -> tuple[dict[str, Any] | None, str]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict) or not isinstance(choice, dict):
        return None, ""
    return message, str(choice.get("finish_reason") or "")


def _text(content: Any) -> str:
    if isinstance(content, list):
        content = "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        return ""
    text = _THINKING.sub("", content)
    text = _OPEN_THINKING.sub("", text)
    return _LEFT_THINKING.sub("", text).strip()


def _cut(text: str, count: Callable[[str], int], max_tokens: int) -> str:
    """The longest run of whole lines within the limit, at least one piece of the first."""
    lines = text.splitlines()
    while len(lines) > 1 and count("\n".join(lines)) > max_tokens:
        lines.pop()
    shown = "\n".join(lines)
    while count(shown) > max_tokens and len(shown) > 16:
        shown = head_only(shown, len(shown) * 3 // 4)
    return shown.rstrip()
