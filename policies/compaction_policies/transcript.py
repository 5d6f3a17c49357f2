"""The neutral, read-only view of a request: head, items, groups, turns. Dialects build it; everything else reads it.

An item is what a dialect calls a message (chat) or an input item; its *parts* are the places that an edit may address,
each with the exact bytes of its value, so that an edit replaces those bytes and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["user", "assistant", "tool", "system", "other"]
"""``system`` stands for later system and developer messages; ``other`` is opaque and only ever kept or summarized whole."""


@dataclass(frozen=True, slots=True)
class Part:
    """An addressable value inside an item.

    Args:
        key: the address inside the item: ``content``, or ``call.N`` for the arguments of its N-th tool call.
        start, end: where the value's bytes stand in the item's raw bytes.
        text: what the value says, decoded (content: its text parts joined by newlines; call: the arguments string).
        tokens: what the value counts.
        listed: the value is a list of content parts, not a string.
    """

    key: str
    start: int
    end: int
    text: str
    tokens: int
    listed: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an assistant item. ``result`` is the index of the item that answers it, ``None`` while nobody did."""

    id: str
    name: str
    arguments: str
    part: str
    result: int | None = None


@dataclass(frozen=True, slots=True)
class Media:
    """An image, sound or file inside an item: counted at a fixed cost, named in transcripts, never read as text."""

    kind: str
    start: int
    end: int
    by_url: bool


@dataclass(frozen=True, slots=True)
class Item:
    """One message behind the head.

    Args:
        index: position behind the head, from 0.
        raw: the client's bytes of it, untouched.
        role: what it is, by content and not by the wire's word alone.
        wire_role: the word on the wire.
        fingerprint: 16 bytes; equal for two items that mean the same (design: canonical form).
        text: its readable text without tool call arguments; media and reasoning left out.
        tokens: what it counts in a prompt, overhead included.
        parts: the addressable values.
        calls: its tool calls (assistant items).
        call_name: for a tool result: the *call's* tool name, looked up in its group; ``""`` for an orphan.
        media: images, sounds and files.
        error: a tool result that reports an error.
    """

    index: int
    raw: bytes
    role: Role
    wire_role: str
    fingerprint: bytes
    text: str
    tokens: int
    parts: tuple[Part, ...] = ()
    calls: tuple[Call, ...] = ()
    call_name: str = ""
    media: tuple[Media, ...] = ()
    error: bool = False

    def part(self, key: str) -> Part | None:
        return next((part for part in self.parts if part.key == key), None)


@dataclass(frozen=True, slots=True)
class Group:
    """An atomic run of items ``[start, end)``: an assistant item with its calls and all their results, or one other item.

    ``whole`` is false while a call is unanswered, a result has no call, or a result came too late (the run then reaches to it).
    """

    start: int
    end: int
    whole: bool = True

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.end


@dataclass(frozen=True, slots=True)
class Transcript:
    """A request as the policies see it.

    Args:
        dialect: which adapter read it; seeds the chain.
        head_tokens: tokens of the leading system/developer run, tool schemas, response schema and the request's own overhead.
        items: what follows the head.
        groups: a partition of the items, in order.
        chain: ``chain[n]`` is the hash of the first n items; ``len(items) + 1`` entries of 16 bytes.
        tool_names: names of the tools that the request declares.
        max_tokens: the request's output limit, 0 where it names none.
    """

    dialect: str
    head_tokens: int
    items: tuple[Item, ...]
    groups: tuple[Group, ...]
    chain: tuple[bytes, ...]
    tool_names: frozenset[str] = frozenset()
    max_tokens: int = 0
    group_of: tuple[int, ...] = field(default=())

    @property
    def last_user(self) -> int | None:
        """Index of the newest user item."""
        return next((item.index for item in reversed(self.items) if item.role == "user"), None)

    @property
    def tokens(self) -> int:
        """What the request counts as the client sent it."""
        return self.head_tokens + sum(item.tokens for item in self.items)

    def group_at(self, index: int) -> Group:
        return self.groups[self.group_of[index]]

    def turns(self) -> Sequence[int]:
        """Indices at which a turn starts: the user items."""
        return [item.index for item in self.items if item.role == "user"]
