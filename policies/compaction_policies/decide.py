"""Due or not, and why. Pure: the caller brings the view's size and what is remembered of earlier attempts."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from compaction_policies.measure import Limits
from compaction_policies.outcomes import Reason, Source
from compaction_policies.policy import Policy
from compaction_policies.record import Record
from compaction_policies.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Attempt:
    """A compaction that was tried and failed. It counts only for a chain that contains the one it was made on.

    Args:
        items, chain: where it arose: the hash (hex) of the first ``items`` items.
        base: id of the record that was active then, or empty.
        left: the view's tokens at that time.
        hard: the hard limit that the whole ladder could not get below; ``None`` if it was not about that.
    """

    items: int
    chain: str
    base: str
    left: int
    hard: int | None = None


def encode_attempt(attempt: Attempt) -> bytes:
    return msgspec.json.encode(attempt)


def decode_attempt(data: bytes | None) -> Attempt | None:
    """A stored attempt; ``None`` for whatever does not validate."""
    try:
        return None if data is None else msgspec.json.decode(data, type=Attempt)
    except msgspec.MsgspecError:
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    """``due`` with its source, or not due with the reason."""

    due: bool
    reason: Reason
    source: Source = "auto-trigger"
    above_hard: bool = False


def concerns(attempt: Attempt | None, transcript: Transcript, base: Record | None) -> bool:
    """Whether an attempt was made on this chain and on the record that is active now."""
    if attempt is None or attempt.items > len(transcript.items):
        return False
    same_base = attempt.base == ("" if base is None else base.id)
    return same_base and transcript.chain[attempt.items].hex() == attempt.chain


def decide(
    policy: Policy,
    limits: Limits,
    tokens: int,
    transcript: Transcript,
    base: Record | None,
    attempt: Attempt | None,
    *,
    force: bool = False,
    passed_over: bool = False,
) -> Decision:
    """Whether a compaction is due for a view of ``tokens`` tokens.

    Args:
        base: the record that the view has applied.
        force: ``x-compaction: force`` ignores thresholds and re-arming.
        passed_over: a record of this chain could not be applied to this request; it starts no compaction of its own
            unless it is above the hard limit.
    """
    in_loop = bool(transcript.items) and transcript.items[-1].role == "tool"
    above_hard = limits.hard is not None and tokens > limits.hard
    if force:
        return Decision(due=True, reason="manual", source="manual", above_hard=above_hard)
    source: Source = "pre-step" if in_loop else "auto-trigger"
    if limits.limit is None:
        return Decision(due=False, reason="no-limit")
    if tokens <= limits.limit:
        return Decision(due=False, reason="under-threshold")
    tried = attempt if concerns(attempt, transcript, base) else None
    armed = tokens >= max(limits.limit, _left(base, tried) + limits.rearm) if base or tried else True
    if above_hard:
        waived = tried is None or tried.hard is None or (limits.hard or 0) > tried.hard
        if waived or armed:
            return Decision(due=True, reason=_applied(source), source=source, above_hard=True)
        return Decision(due=False, reason="no-progress", above_hard=True)
    if passed_over or not armed:
        return Decision(due=False, reason="no-progress")
    if in_loop and not policy.pre_step:
        return Decision(due=False, reason="throttled")
    return Decision(due=True, reason=_applied(source), source=source)


def _left(base: Record | None, tried: Attempt | None) -> int:
    return max(0 if base is None else base.tokens_after, 0 if tried is None else tried.left)


def _applied(source: Source) -> Reason:
    return "pre-step" if source == "pre-step" else "over-threshold"
