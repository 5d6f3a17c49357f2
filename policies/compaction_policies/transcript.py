"""The neutral, read-only view of a request: head, items, groups, turns. Dialects build it; everything else reads it.

An item is what a dialect calls a message (chat) or an input item; its *parts* are the places that an edit may address,
each with the exact bytes of its value, so that an edit replaces those bytes and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["user", "assistant", "tool", "system", "other"]
"""``system`` stands for system and developer messages; ``other`` is opaque, only ever kept or summarized whole."""


@dataclass(frozen=True, slots=True)
class Part:
    """An addressable value inside an item.

    Args:
        key: the address inside the item: ``content``, or ``call.N`` for the arguments of its N-th tool call.
        start, end: where the value's bytes stand in the item's raw bytes.
        text: what the value says, decoded (content: its text parts joined by newlines; call: the arguments string).
        listed: the value is a list of content parts, not a string.
    """

    key: str
    start: int
    end: int
    text: str
    listed: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an assistant item; ``part`` addresses its arguments, ``result`` is the item that answers it."""

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
        parts: the addressable values.
        calls: its tool calls (assistant items).
        call_name: for a tool result: the *call's* tool name, looked up in its group; ``""`` for an orphan.
        media: images, sounds and files.
        hidden: reasoning text and the like: counted, never shown to a summarizer.
        error: a tool result that reports an error.
    """

    index: int
    raw: bytes
    role: Role
    wire_role: str
    fingerprint: bytes
    text: str
    parts: tuple[Part, ...] = ()
    calls: tuple[Call, ...] = ()
    call_name: str = ""
    media: tuple[Media, ...] = ()
    hidden: str = ""
    error: bool = False

    def part(self, key: str) -> Part | None:
        return next((part for part in self.parts if part.key == key), None)


@dataclass(frozen=True, slots=True)
class Group:
    """An atomic run of items ``[start, end)``: an assistant item with calls and all their results, or one other item.

    ``whole`` is false while a call is unanswered, where a result has no call, and where one came late: the run then
    reaches from the call to the late result.
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
        head: the leading run of system and developer items; not part of the chain.
        items: what follows the head.
        groups: a partition of the items, in order.
        chain: ``chain[n]`` is the hash of the first n items; ``len(items) + 1`` entries of 16 bytes.
        group_of: item index -> index of its group.
        schemas: texts that count beside the messages: tool and response schemas.
        tool_names: names of the tools that the request declares.
        max_tokens: the request's output limit, 0 where it names none.
    """

    dialect: str
    head: tuple[Item, ...]
    items: tuple[Item, ...]
    groups: tuple[Group, ...]
    chain: tuple[bytes, ...]
    group_of: tuple[int, ...]
    schemas: tuple[str, ...] = ()
    tool_names: frozenset[str] = frozenset()
    max_tokens: int = 0

    @property
    def last_user(self) -> int | None:
        """Index of the newest user item."""
        return next((item.index for item in reversed(self.items) if item.role == "user"), None)

    def group_at(self, index: int) -> Group:
        return self.groups[self.group_of[index]]

    def turns(self) -> Sequence[int]:
        """Indices at which a turn starts: the user items."""
        return [item.index for item in self.items if item.role == "user"]
