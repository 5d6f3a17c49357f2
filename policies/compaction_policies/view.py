"""Applying a record: which items it hides or edits in a request, what the result counts, and whether it applies at all.

``apply`` is total and pure: the same request and record give the same bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import TypeAlias

from compaction_policies.measure import Units
from compaction_policies.record import Op, Record, Segment
from compaction_policies.transcript import Item, Transcript

Piece: TypeAlias = int | tuple[int, bytes] | bytes
"""An item's index (its bytes as they came), an edited item (its index and new bytes), or a new message's bytes."""


def applies(transcript: Transcript, record: Record) -> bool:
    """Whether a record of this exact chain may be applied to this request.

    It is passed over where it would replace, clear or drop anything in the newest group (a last resort's shortening may
    stand there), hide the last user message, or leave a result whose call it replaced.
    """
    if record.covers > len(transcript.items) or transcript.chain[record.covers].hex() != record.chain:
        return False
    if not transcript.groups:
        return False
    gone = hidden(record)
    last_user = transcript.last_user
    if last_user is not None and last_user in gone:
        return False
    newest = transcript.groups[-1]
    if any(index in gone for index in range(newest.start, newest.end)):
        return False
    if any(op.item in newest and (op.kind, op.part) != ("shorten", "content") for op in record.ops):
        return False
    for group in transcript.groups:
        if group.start >= record.covers:
            break
        missing = sum(index in gone for index in range(group.start, group.end))
        if missing not in (0, group.end - group.start):
            return False
    return True


@functools.lru_cache(maxsize=256)
def hidden(record: Record) -> frozenset[int]:
    """Items that a record takes out of the request: replaced by the synthetic message, or dropped."""
    kept = frozenset(record.kept)
    replaced = (index for index in range(record.summarized_to) if index not in kept)
    return frozenset([*replaced, *(op.item for op in record.ops if op.kind == "drop")])


def apply(transcript: Transcript, record: Record | None) -> tuple[Piece, ...]:
    """The pieces behind the head: the synthetic message, then what stays, edited where an op says so."""
    if record is None:
        return tuple(range(len(transcript.items)))
    gone = hidden(record)
    edits = _edits(record)
    pieces: list[Piece] = []
    if record.synthetic:
        pieces.append(synthetic_bytes(transcript, record.synthetic))
    for item in transcript.items[: record.covers]:
        if item.index in gone:
            continue
        ops = edits.get(item.index)
        pieces.append(item.index if ops is None else (item.index, edited(item, ops)))
    pieces.extend(range(record.covers, len(transcript.items)))
    return tuple(pieces)


@functools.lru_cache(maxsize=256)
def _edits(record: Record) -> dict[int, tuple[Op, ...]]:
    edits: dict[int, tuple[Op, ...]] = {}
    for op in record.ops:
        if op.kind != "drop":
            edits[op.item] = (*edits.get(op.item, ()), op)
    return edits


def edited(item: Item, ops: Iterable[Op]) -> bytes:
    """An item's bytes with the values of its ops put in; an op whose part is not there changes nothing."""
    raw = item.raw
    placed = [(part.start, part.end, op.value) for op in ops if (part := item.part(op.part)) is not None]
    for start, end, value in sorted(placed, reverse=True):
        raw = raw[:start] + value + raw[end:]
    return raw


def synthetic_bytes(transcript: Transcript, segments: tuple[Segment, ...]) -> bytes:
    """The synthetic message: finished bytes, and media parts taken from the request's own items."""
    return b"".join(
        segment if isinstance(segment, bytes) else transcript.items[segment.item].raw[segment.start : segment.end]
        for segment in segments
    )


def view_tokens(transcript: Transcript, record: Record | None, units: Units) -> int:
    """What the request counts with a record applied, head and schemas included."""
    return both_tokens(transcript, record, units)[1]


def both_tokens(transcript: Transcript, record: Record | None, units: Units) -> tuple[int, int]:
    """What the request counts as the client sent it, and with a record applied."""
    fixed = units.fixed(transcript)
    sizes = [units.item(item) for item in transcript.items]
    sent = fixed + sum(sizes)
    if record is None:
        return sent, sent
    taken = sum(sizes[index] for index in hidden(record))
    edits = sum(saved(transcript.items[op.item], op, units) for op in record.ops if op.kind != "drop")
    return sent, sent - taken - edits + record.synthetic_tokens


def saved(item: Item, op: Op, units: Units) -> int:
    """Tokens that an op takes off its item."""
    part = item.part(op.part)
    return 0 if part is None else units.part(item, part) - units.count(value_text(op.value))


@functools.lru_cache(maxsize=16_384)
def value_text(value: bytes) -> str:
    """The text that an op's value puts in: a JSON string, or a list of one text part."""
    decoded = json.loads(value)
    if isinstance(decoded, list):
        return "\n".join(part["text"] for part in decoded)
    return str(decoded)
