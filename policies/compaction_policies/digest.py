"""A span of a conversation as plain text for a summarizer, within a budget of characters.

Roles are labelled, tool calls are text, media are notes, reasoning is left out, and nothing inside can end the transcript.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compaction_policies.marks import label, media_note, neutralise, safe_name
from compaction_policies.shorten import head_tail
from compaction_policies.transcript import Item

MAX_CHUNKS = 3
"""Texts for separate calls; with the call that merges their summaries, four calls in all."""
RESULT_CHARS = 2_000
SHORT_RESULT_CHARS = 500
DROPPED = "[older messages left out here]"
"""Stands at the beginning where the oldest messages found no room."""

_SEPARATOR = "\n\n"
_LABELS = {"user": "user", "assistant": "assistant", "tool": "tool result", "system": "system", "other": "other"}


@dataclass(frozen=True, slots=True)
class Digest:
    """``chunks``: one text for each call, oldest first; none where there is nothing to tell. ``omitted``: messages left out."""

    chunks: tuple[str, ...]
    omitted: int = 0

    @property
    def chars(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)


def digest(items: Sequence[Item], char_budget: int, max_chunks: int = MAX_CHUNKS) -> Digest:
    """The first rung that fits: full; the oldest results at 500 characters; several chunks; the oldest left out.

    Args:
        items: what is to be told, in order.
        char_budget: characters of one chunk; at least 1,000 are taken.
    """
    budget = max(char_budget, 1_000)
    bound = budget // 2
    entries = [text for item in items if (text := entry(item, RESULT_CHARS, bound))]
    if _size(entries) <= budget:
        return Digest((_SEPARATOR.join(entries),) if entries else ())
    told = [item for item in items if entry(item, RESULT_CHARS, bound)]
    size = _size(entries)
    for place, item in enumerate(told):
        short = entry(item, SHORT_RESULT_CHARS, bound)
        size += len(short) - len(entries[place])
        entries[place] = short
        if size <= budget:
            return Digest((_SEPARATOR.join(entries),))
    return _chunked(entries, budget, max_chunks)


def entry(item: Item, result_chars: int, other_chars: int) -> str:
    """One message as text under its label; empty where it says nothing.

    Args:
        result_chars: bound of a tool result and of one call's arguments, head and tail.
        other_chars: bound of any other text.
    """
    role = _LABELS[item.role]
    detail = safe_name(item.call_name) if item.call_name else ""
    if item.error:
        detail = f"{detail} (error)".strip()
    lines = [neutralise(head_tail(item.text, min(result_chars, other_chars) if item.role == "tool" else other_chars))]
    lines += (media_note(media.kind) for media in item.media)
    for call in item.calls:
        arguments = neutralise(head_tail(call.arguments, min(result_chars, other_chars)))
        lines.append(f"[call {safe_name(call.name)}] {arguments}")
    text = "\n".join(line for line in lines if line.strip())
    if not text and item.role != "tool":
        return ""
    return f"{label(role, detail)}\n{text or '[empty]'}"


def _size(entries: Sequence[str]) -> int:
    return sum(len(text) + len(_SEPARATOR) for text in entries)


def _chunked(entries: Sequence[str], budget: int, max_chunks: int) -> Digest:
    """Filled from the newest entry back, so that what finds no room is the oldest."""
    chunks: list[list[str]] = [[]]
    room = budget - len(DROPPED) - len(_SEPARATOR)
    left = room
    taken = 0
    for text in reversed(entries):
        size = len(text) + len(_SEPARATOR)
        if size > left and chunks[-1]:
            if len(chunks) == max_chunks:
                break
            chunks.append([])
            left = room
        chunks[-1].append(head_tail(text, room))
        left -= size
        taken += 1
    omitted = len(entries) - taken
    if omitted:
        chunks[-1].append(DROPPED)
    return Digest(tuple(_SEPARATOR.join(reversed(chunk)) for chunk in reversed(chunks)), omitted)
