"""Carried user messages: the user's words that stand in the synthetic message, within a hard budget of tokens.

The first message whole if it takes at most half of the budget, else quoted head and tail; then the others newest first:
whole, else quoted; then only counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compaction_policies.measure import Count, Units
from compaction_policies.shorten import head_tail
from compaction_policies.transcript import Item, Transcript

_QUOTE_NOTE = " [...] "
_LEAST_QUOTE = 24
"""Tokens under which a quotation says nothing."""


@dataclass(frozen=True, slots=True)
class Carried:
    """One carried message. ``text`` is the exact words where ``whole``, else head and tail."""

    index: int
    text: str
    whole: bool
    tokens: int


def carried_candidates(transcript: Transcript, gone: Sequence[int], keep: int | Literal["all"]) -> list[int]:
    """User items among ``gone`` whose words must survive: all, or those among the newest N of the conversation."""
    users = [item.index for item in transcript.items if item.role == "user"]
    wanted = set(users if keep == "all" else users[max(0, len(users) - keep) :] if keep else ())
    return [index for index in gone if index in wanted]


def carry(transcript: Transcript, indices: Sequence[int], budget: int, units: Units) -> tuple[tuple[Carried, ...], int]:
    """``(carried messages, oldest first; how many are only counted)``. Their tokens stay within ``budget``."""
    chosen: dict[int, Carried] = {}
    room = budget
    order = [*indices[:1], *reversed(indices[1:])]
    for place, index in enumerate(order):
        item = transcript.items[index]
        allowed = budget // 2 if place == 0 else room
        size = _size(item, units)
        if size <= min(allowed, room):
            carried = Carried(index, item.text, whole=True, tokens=size)
        else:
            limit = min(room, allowed if place == 0 else max(_LEAST_QUOTE, budget // 8))
            quoted = _quoted(item, limit, units)
            if quoted is None:
                continue
            carried = quoted
        chosen[index] = carried
        room -= carried.tokens
    return tuple(chosen[index] for index in sorted(chosen)), len(indices) - len(chosen)


def _size(item: Item, units: Units) -> int:
    """An item in the synthetic message: its words and media, and the mark around it."""
    media = sum(units.image if media.kind == "image" else units.media for media in item.media)
    return units.count(item.text) + media + _MARK


_MARK = 8
"""Tokens of the fence and label around a carried message."""


def _quoted(item: Item, limit: int, units: Units) -> Carried | None:
    """Head and tail within ``limit`` tokens, without media; ``None`` where that would say nothing."""
    if limit < _LEAST_QUOTE:
        return None
    chars = min(len(item.text), limit * 4)
    while chars >= 16:
        text = head_tail(item.text, chars, _QUOTE_NOTE)
        if (tokens := _text_size(text, units.count)) <= limit:
            return Carried(item.index, text, whole=False, tokens=tokens)
        chars = chars * 2 // 3
    return None


def _text_size(text: str, count: Count) -> int:
    return count(text) + _MARK
