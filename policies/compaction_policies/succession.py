"""By which rules one record follows another (design section 6): monotone, strictly further, never bringing anything back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from compaction_policies.record import STRENGTH, Op, Record, record_id
from compaction_policies.transcript import Transcript


def follows(new: Record, old: Record) -> bool:
    """Whether ``new`` may become active where ``old`` is, both of one chain.

    Its ``covers`` and ``summarized_to`` never fall; it is strictly further in one of them or in the strength of its ops;
    it repeats the old ops behind its own cut, as strong or stronger; before the old cut it keeps nothing that the old one
    did not keep. A full summary heals a degraded record even at the same cut.
    """
    if new.covers < old.covers or new.summarized_to < old.summarized_to:
        return False
    if any(index < old.summarized_to and index not in old.kept for index in new.kept):
        return False
    stronger = False
    kept = set(new.kept)
    for op in old.ops:
        if op.item < new.summarized_to and op.item not in kept:
            continue
        mine = new.op_at(op.item, op.part)
        if mine is None or STRENGTH[mine.kind] < STRENGTH[op.kind]:
            return False
        stronger = stronger or STRENGTH[mine.kind] > STRENGTH[op.kind]
    if new.covers > old.covers or new.summarized_to > old.summarized_to or stronger or heals(new, old):
        return True
    return any(old.op_at(op.item, op.part) is None for op in new.ops)


def heals(new: Record, old: Record) -> bool:
    """A full summary over a degraded record: allowed at the same cut and without the shrink floor."""
    return old.degraded and not new.degraded and bool(new.body) and new.summarized_to >= old.summarized_to


def rebase(new: Record, active: Record, transcript: Transcript) -> Record | None:
    """``new`` made to follow ``active``, which came into force meanwhile: its synthetic message, and behind its cut the
    stronger of both ops. ``None`` where that cannot be. The caller checks the shrink floor against ``active``."""
    if new.summarized_to < active.summarized_to:
        return None
    kept = set(new.kept)
    if any(index < active.summarized_to and index not in active.kept for index in kept):
        return None
    ops = {(op.item, op.part): op for op in new.ops}
    for op in active.ops:
        if op.item < new.summarized_to and op.item not in kept:
            continue
        mine = ops.get((op.item, op.part))
        if mine is None or STRENGTH[mine.kind] < STRENGTH[op.kind]:
            ops[(op.item, op.part)] = op
    dropped = {op.item for op in ops.values() if op.kind == "drop"}
    merged = sort_ops(op for op in ops.values() if op.kind == "drop" or op.item not in dropped)
    covers = max(new.covers, active.covers)
    if covers > len(transcript.items):
        return None
    rebased = replace(
        new,
        id=record_id(
            new.policy,
            new.epoch,
            active.id,
            transcript.chain[covers],
            new.summarized_to,
            merged,
            new.kept,
            degraded=new.degraded,
        ),
        parent=active.id,
        generation=active.generation + 1,
        chain=transcript.chain[covers].hex(),
        covers=covers,
        ops=merged,
        fingerprints=short_fingerprints(transcript, covers),
    )
    return rebased if follows(rebased, active) else None


def sort_ops(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Ops in the one order that records and ids use: by item, then part."""
    return tuple(sorted(ops, key=lambda op: (op.item, op.part)))


def short_fingerprints(transcript: Transcript, covers: int) -> tuple[str, ...]:
    """The first 4 bytes of each covered item's fingerprint, as hex."""
    return tuple(item.fingerprint[:4].hex() for item in transcript.items[:covers])
