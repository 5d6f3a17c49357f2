"""``summarize-old-preserve-recent``: where to cut, so that one summary stands for the old part and the recent part stays.

The tail is the newest whole groups that fit the room; a larger turn is cut inside, between groups.
"""

from __future__ import annotations

from compaction_policies.draft import Draft
from compaction_policies.policy import SummarizeOldPreserveRecent
from compaction_policies.protect import excluded_group

FRAME_TOKENS = 180
"""An upper bound of the fixed words of the synthetic message."""


def summarize(draft: Draft, strategy: SummarizeOldPreserveRecent, *, forced: bool) -> bool:
    """Move the cut. Returns whether it moved; says in ``draft.refused`` why not.

    Args:
        forced: ignores the limit: the cut only has to shrink the view.
    """
    if strategy.preserve_user_messages is not None:
        draft.preserve = strategy.preserve_user_messages
    cut = _cut(draft, strategy, forced=forced)
    if cut is None:
        return False
    shield = draft.protected(cut, strategy.exclude_tools)
    base = draft.base
    told = set() if base is None else {at for start, end in base.told for at in range(start, end)}
    if all(index in shield.kept or index in told for index in range(cut)):
        return False
    draft.summarize = strategy
    draft.move_cut(cut, shield.kept, synthetic_estimate(draft, strategy, cut))
    draft.used.append(strategy.kind)
    return True


def synthetic_estimate(draft: Draft, strategy: SummarizeOldPreserveRecent, cut: int) -> int:
    """The most that the synthetic message can count with a cut there."""
    limits, units = draft.limits, draft.units
    shield = draft.protected(cut, strategy.exclude_tools)
    dropped = {op.item for op in draft.ops.values() if op.kind == "drop"}
    gone = sorted({index for index in range(cut) if index not in shield.kept} | dropped)
    carried, _ = draft.carried(gone)
    constraints = sum(draft.original[index] for index in shield.constraints)
    pins = sum(units.count(line) + 2 for line in draft.policy.pins.constraints)
    ledger = limits.ledger if strategy.ledger else 0
    return FRAME_TOKENS + limits.summary + ledger + pins + constraints + sum(entry.tokens for entry in carried)


def _cut(draft: Draft, strategy: SummarizeOldPreserveRecent, *, forced: bool) -> int | None:
    limits = draft.limits
    room_max = (limits.limit or 0) - limits.rearm
    floor = _least_cut(draft)
    groups = draft.transcript.groups
    before = _Before(draft, strategy)
    recent = _recent_turns(draft, strategy)
    best: int | None = None
    tail = 0
    for number in range(len(groups) - 1, -1, -1):
        group = groups[number]
        if group.start < floor:
            break
        tail += sum(draft.sizes[at] for at in range(group.start, group.end) if at not in draft.gone)
        total = draft.fixed + before.tokens(number) + tail
        if best is None:
            if total > room_max and not forced:
                draft.refused = "irreducible"
                return None
            best = group.start
            continue
        fits = tail <= strategy.preserve_recent_tokens
        inside_turns = recent is not None and group.start >= recent[0] and recent[1] <= strategy.preserve_recent_tokens
        if (fits and total <= limits.target) or (inside_turns and total <= room_max):
            best = group.start
            continue
        break
    return best


def _least_cut(draft: Draft) -> int:
    """A cut must be strictly further than the active one; a degraded record may be healed in place."""
    if draft.base is None:
        return 1
    return draft.base.summarized_to + (0 if draft.base.degraded else 1)


def _recent_turns(draft: Draft, strategy: SummarizeOldPreserveRecent) -> tuple[int, int] | None:
    """``(start, tokens)`` of the newest ``preserveRecentTurns`` turns."""
    users = [item.index for item in draft.transcript.items if item.role == "user"]
    if not strategy.preserve_recent_turns or len(users) < strategy.preserve_recent_turns:
        return None
    start = draft.transcript.group_at(users[-strategy.preserve_recent_turns]).start
    return start, sum(size for at, size in enumerate(draft.sizes) if at >= start and at not in draft.gone)


class _Before:
    """An upper bound of what a cut before group ``n`` leaves of everything before it, in one pass over the groups."""

    def __init__(self, draft: Draft, strategy: SummarizeOldPreserveRecent) -> None:
        limits = draft.limits
        ledger = limits.ledger if strategy.ledger else 0
        pins = sum(draft.units.count(line) + 2 for line in draft.policy.pins.constraints)
        self._constant = FRAME_TOKENS + limits.summary + ledger + pins
        self._bounds: list[int] = []
        shielded = users = 0
        last_user = draft.transcript.last_user
        last_user_tokens = 0
        transcript = draft.transcript
        for group in transcript.groups:
            bounded = shielded if limits.protected is None else min(shielded, 2 * limits.protected)
            self._bounds.append(bounded + min(users, limits.carried) + last_user_tokens)
            size = sum(draft.sizes[group.start : group.end])
            roles = {item.role for item in transcript.items[group.start : group.end]}
            if last_user is not None and last_user in group:
                last_user_tokens = size
            elif "user" in roles:
                users += size
            elif "system" in roles or excluded_group(
                transcript, group, (*draft.policy.exclude_tools, *strategy.exclude_tools)
            ):
                shielded += size

    def tokens(self, number: int) -> int:
        return self._constant + self._bounds[number]
