"""The record: the committed, immutable result of one executed plan, and the rules by which one follows another.

A record is self-contained and made of the client's originals only. It governs the first ``covers`` items of one exact
chain. Before ``summarized_to`` everything is replaced by the synthetic message except the items in ``kept``; behind it
its ops stand; from ``covers`` on nothing is touched.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

import msgspec

FORMAT_VERSION = 1

OpKind: TypeAlias = Literal["shorten", "clear", "drop"]
STRENGTH: dict[str, int] = {"keep": 0, "shorten": 1, "clear": 2, "drop": 3}


@dataclass(frozen=True, slots=True)
class Op:
    """One edit: ``value`` replaces the bytes of ``part`` in ``item``; ``drop`` removes the whole item (part ``*``)."""

    item: int
    part: str
    kind: OpKind
    value: bytes = b""


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A media part of a carried user message: ``start:end`` in the bytes of item ``item`` of the current request."""

    item: int
    start: int
    end: int


Segment: TypeAlias = bytes | MediaRef


@dataclass(frozen=True, slots=True)
class Record:
    """See the module docstring. Sizes are tokens; ``chain`` is h_C as hex.

    Args:
        told: half-open ranges of the items that the last non-degraded summary stands for.
        summary: that summary's text, the anchor of the next one.
        body: the text that the synthetic message shows (a degraded pass shows its own).
        synthetic: the finished message as bytes and references to media; empty where there is none.
        tokens_before, tokens_after: the view at the event, head and tools included.
        fingerprints: the first 4 bytes of each covered item's fingerprint, as hex.
    """

    id: str
    policy: str
    revision: str
    epoch: int
    dialect: str
    parent: str
    generation: int
    chain: str
    covers: int
    summarized_to: int
    ops: tuple[Op, ...]
    kept: tuple[int, ...]
    told: tuple[tuple[int, int], ...]
    summary: str
    body: str
    ledger: str
    synthetic: tuple[Segment, ...]
    synthetic_tokens: int
    degraded: bool
    trust: Literal["trusted", "derived"]
    source: str
    strategy: str
    template: str
    carried: tuple[int, ...]
    pinned: tuple[str, ...]
    fingerprints: tuple[str, ...]
    tokens_before: int
    tokens_after: int
    summarizer_model: str = ""
    summarizer_tokens_in: int = 0
    summarizer_tokens_out: int = 0
    created_ms: int = 0

    def op_at(self, item: int, part: str) -> Op | None:
        return next((op for op in self.ops if op.item == item and op.part in (part, "*")), None)

    def key(self) -> tuple[int, int, str]:
        """The order of candidates: the best match has the greatest (covers, generation, id)."""
        return (self.covers, self.generation, self.id)


def record_id(
    policy: str,
    epoch: int,
    parent: str,
    chain: bytes,
    summarized_to: int,
    ops: tuple[Op, ...],
    kept: tuple[int, ...],
    *,
    degraded: bool,
) -> str:
    """The id of a record: equal plans have equal ids, whoever makes them, so that the first writer wins.

    What it keeps is part of the plan: two requests that share the covered items may differ in their last user message.
    """
    digest = hashlib.blake2b(digest_size=16)
    parts: list[object] = [policy, epoch, parent, chain.hex(), summarized_to, list(kept), degraded]
    parts.extend((op.item, op.part, op.kind) for op in ops)
    digest.update(msgspec.json.encode(parts))
    return digest.hexdigest()


class _Wire(msgspec.Struct):
    """A record as stored. Unknown fields are ignored and every field added later has a default."""

    v: int
    id: str
    policy: str
    revision: str
    epoch: int
    dialect: str
    parent: str
    generation: int
    chain: str
    covers: int
    summarized_to: int
    ops: list[tuple[int, str, str, str]]
    kept: list[int]
    told: list[tuple[int, int]]
    summary: str
    body: str
    ledger: str
    synthetic: list[str | list[int]]
    synthetic_tokens: int
    degraded: bool
    trust: str
    source: str
    strategy: str
    template: str
    carried: list[int]
    pinned: list[str]
    fingerprints: list[str]
    tokens_before: int
    tokens_after: int
    summarizer_model: str = ""
    summarizer_tokens_in: int = 0
    summarizer_tokens_out: int = 0
    created_ms: int = 0


def encode_record(record: Record) -> bytes:
    """The stored form: JSON; bytes that are not UTF-8 go as base64."""
    fields: dict[str, Any] = {name: getattr(record, name) for name in Record.__slots__}
    fields["ops"] = [(op.item, op.part, op.kind, _text(op.value)) for op in record.ops]
    fields["synthetic"] = [
        _text(segment) if isinstance(segment, bytes) else [segment.item, segment.start, segment.end]
        for segment in record.synthetic
    ]
    for name in ("summary", "body", "ledger"):
        fields[name] = _text(fields[name].encode("utf-8", "surrogatepass"))
    fields["pinned"] = [_text(line.encode("utf-8", "surrogatepass")) for line in record.pinned]
    return msgspec.json.encode({"v": FORMAT_VERSION, **fields})


def decode_record(data: bytes) -> Record | None:
    """A stored record, or ``None`` for whatever does not validate: a miss, never an error."""
    try:
        wire = msgspec.json.decode(data, type=_Wire)
        if wire.v > FORMAT_VERSION:
            return None
        ops = tuple(Op(item, part, _kind(kind), _bytes(value)) for item, part, kind, value in wire.ops)
        segments: list[Segment] = [
            _bytes(segment) if isinstance(segment, str) else MediaRef(*segment) for segment in wire.synthetic
        ]
        fields = {name: getattr(wire, name) for name in Record.__slots__}
        for name in ("summary", "body", "ledger"):
            fields[name] = _bytes(fields[name]).decode("utf-8", "surrogatepass")
        fields.update(
            ops=ops,
            synthetic=tuple(segments),
            kept=tuple(wire.kept),
            told=tuple(wire.told),
            carried=tuple(wire.carried),
            pinned=tuple(_bytes(line).decode("utf-8", "surrogatepass") for line in wire.pinned),
            fingerprints=tuple(wire.fingerprints),
        )
        return Record(**fields)
    except (msgspec.MsgspecError, ValueError, TypeError):
        return None


def _kind(kind: str) -> OpKind:
    for known in get_args(OpKind):
        if kind == known:
            return cast(OpKind, known)
    message = f"unknown op kind {kind!r}"
    raise ValueError(message)


def _text(value: bytes) -> str:
    """Readable where it can be: ``u`` and the text, else ``b`` and base64."""
    try:
        return "u" + value.decode("utf-8")
    except UnicodeDecodeError:
        return "b" + base64.b64encode(value).decode("ascii")


def _bytes(value: str) -> bytes:
    return base64.b64decode(value[1:]) if value.startswith("b") else value[1:].encode("utf-8")
