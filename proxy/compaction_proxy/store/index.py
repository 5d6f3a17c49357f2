"""The index value: which records exist for one chain hash, and which of them is in force. Pure.

Stored as JSON, a list of ``[generation, covers, summarized_to, id, state]``; what does not read as such is not there.
The Lua script of :mod:`compaction_proxy.store.shared` does to these values what :func:`commit` does; both change together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

MAX_ENTRIES = 16
"""Entries kept under one key, best first."""

MAX_NUMBER = 2**31
"""Generations and item counts are below this; JSON numbers in Lua are floats."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One record of a chain hash. ``state`` is ``in-flight``, ``ready`` or ``active``; only active ones apply."""

    generation: int
    covers: int
    summarized_to: int
    id: str
    state: str = "active"

    def key(self) -> tuple[int, int, str]:
        """The order of candidates: the best match has the greatest (covers, generation, id)."""
        return (self.covers, self.generation, self.id)


@dataclass(frozen=True, slots=True)
class CommitReply:
    """What a commit found: ``committed``, with the entry itself as ``best``; else the best active entry, or ``None``."""

    committed: bool
    best: IndexEntry | None


def encode_entry(entry: IndexEntry) -> bytes:
    return msgspec.json.encode(_row(entry))


def encode_index(entries: Iterable[IndexEntry]) -> bytes:
    return msgspec.json.encode([_row(entry) for entry in entries])


def decode_entry(data: bytes) -> IndexEntry | None:
    """One stored entry, or ``None`` for junk."""
    try:
        return _entry(msgspec.json.decode(data))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def decode_index(data: bytes | None) -> tuple[IndexEntry, ...]:
    """The entries of a stored value; junk reads as no entry."""
    if data is None:
        return ()
    try:
        rows = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return ()
    if not isinstance(rows, list):
        return ()
    return tuple(entry for entry in map(_entry, rows) if entry is not None)


def add(entries: Iterable[IndexEntry], entry: IndexEntry) -> tuple[IndexEntry, ...]:
    """The set with ``entry`` in it: one entry per id, active ones first, then by :meth:`IndexEntry.key`, bounded."""
    others = [other for other in entries if other.id != entry.id]
    ranked = sorted([*others, entry], key=lambda other: (other.state == "active", other.key()), reverse=True)
    return tuple(ranked[:MAX_ENTRIES])


def best_active(entries: Iterable[IndexEntry], ignore_ids: Collection[str] = ()) -> IndexEntry | None:
    """The active entry with the greatest key that is not in ``ignore_ids``."""
    active = (entry for entry in entries if entry.state == "active" and entry.id not in ignore_ids)
    return max(active, key=IndexEntry.key, default=None)


def commit(read: Iterable[IndexEntry], expected_id: str, ignore_ids: Collection[str], entry: IndexEntry) -> CommitReply:
    """The compare half of the compare-and-set: may ``entry`` follow, if ``expected_id`` (``""`` = none) is in force?

    An entry that is already the best one counts as committed: the same commit may be sent twice.
    """
    best = best_active(read, ignore_ids)
    if (best.id if best else "") in (expected_id, entry.id):
        return CommitReply(True, entry)
    return CommitReply(False, best)


def _row(entry: IndexEntry) -> list[int | str]:
    return [entry.generation, entry.covers, entry.summarized_to, entry.id, entry.state]


def _entry(row: object) -> IndexEntry | None:
    if not isinstance(row, list) or len(row) < 5:
        return None
    generation, covers, summarized_to, identity, state = row[:5]
    numbers = (generation, covers, summarized_to)
    if not all(type(number) is int and 0 <= number < MAX_NUMBER for number in numbers):
        return None
    if not isinstance(identity, str) or not isinstance(state, str) or not identity:
        return None
    return IndexEntry(generation, covers, summarized_to, identity, state)
