"""The promises P2, P4 and P11, checked on what is about to be forwarded. A problem is a sentence without message text."""

from __future__ import annotations

import json
from collections.abc import Sequence

from compaction_policies import wire
from compaction_policies.policy import Policy
from compaction_policies.protect import excluded
from compaction_policies.record import Record
from compaction_policies.transcript import Item, Transcript
from compaction_policies.view import Piece, applies, apply, edited


def problem(transcript: Transcript, record: Record, base: Record | None, policy: Policy) -> str | None:
    """What is wrong with a new record on this request, or ``None``.

    Args:
        base: the record it follows; its ops were judged by the revision that made them.
        policy: the policy that made the new ops.
    """
    if not applies(transcript, record):
        return "the record does not apply to the request that made it"
    pieces = apply(transcript, record)
    found = order_problem(transcript, pieces)
    if found is not None:
        return found
    if sum(isinstance(piece, bytes) for piece in pieces) > bool(record.synthetic):
        return "more than one new message"
    if record.synthetic:
        found = _message_problem(pieces[0])
        if found is not None:
            return f"synthetic message: {found}"
    for op in record.ops:
        if op.kind == "drop":
            continue
        item = transcript.items[op.item]
        found = _edit_problem(item, record, op.part)
        if found is not None:
            return found
        made = base is None or base.op_at(op.item, op.part) is None
        if made and op.part == "content" and op.kind == "clear" and excluded(item, policy.exclude_tools):
            return "a result of an excluded tool was changed"
    return None


def order_problem(transcript: Transcript, pieces: Sequence[Piece]) -> str | None:
    """Kept messages in order, the last message and the last user message untouched and in place."""
    kept = [piece for piece in pieces if isinstance(piece, int)]
    placed = [piece if isinstance(piece, int) else piece[0] for piece in pieces if not isinstance(piece, bytes)]
    if placed != sorted(set(placed)):
        return "kept messages out of order"
    last = len(transcript.items) - 1
    if not pieces:
        return "nothing left"
    if not placed or placed[-1] != last or isinstance(pieces[-1], bytes):
        return "something stands behind the last message"
    last_user = transcript.last_user
    if last_user is not None and last_user not in kept:
        return "the last user message changed"
    return None


def _message_problem(piece: Piece) -> str | None:
    if not isinstance(piece, bytes):
        return "missing"
    try:
        message = wire.value_of(piece)
        wire.object_spans(piece)
    except wire.Unreadable:
        return "not a JSON object"
    if message.get("role") not in ("user", "assistant") or not message.get("content"):
        return "no role or no content"
    return None


def _edit_problem(item: Item, record: Record, key: str) -> str | None:
    part = item.part(key)
    if part is None:
        return "an edit of a part that is not there"
    raw = edited(item, [op for op in record.ops if op.item == item.index])
    try:
        before, after = wire.object_spans(item.raw), wire.object_spans(raw)
    except wire.Unreadable:
        return "an edited message is not a JSON object"
    if list(before) != list(after):
        return "an edited message has other keys"
    value = record.op_at(item.index, key)
    text = "" if value is None else str(wire.value_of(value.value))
    if not text.strip():
        return "an edit left an empty value"
    if key.startswith("call.") and _parses(part.text) and not _parses(text):
        return "edited arguments do not parse"
    return None


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
