"""Who may be touched: one answer for all strategies.

Protected are the last user message, later system and developer messages, and whole groups of excluded tools: originals,
newest first, up to a bound. Beyond it excluded groups go to the summarizer and system messages move verbatim into the
constraints of the synthetic message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compaction_policies.policy import matches_tool
from compaction_policies.record import Record
from compaction_policies.transcript import Group, Item, Transcript


@dataclass(frozen=True, slots=True)
class Protected:
    """What stays if everything before ``before`` is replaced.

    Args:
        kept: items that stay as originals.
        constraints: items (system messages beyond the bound) whose words move into the constraints, oldest first.
        uncounted: how many more system messages found no room even there.
        tokens: what ``kept`` counts.
    """

    kept: frozenset[int]
    constraints: tuple[int, ...]
    uncounted: int
    tokens: int


def excluded(item: Item, patterns: tuple[str, ...]) -> bool:
    """A call or a result of a tool that no strategy may change; judged by the call's name."""
    if item.role == "tool":
        return matches_tool(item.call_name, patterns)
    return any(matches_tool(call.name, patterns) for call in item.calls)


def excluded_group(transcript: Transcript, group: Group, patterns: tuple[str, ...]) -> bool:
    return any(excluded(item, patterns) for item in transcript.items[group.start : group.end])


def protected(
    transcript: Transcript,
    patterns: tuple[str, ...],
    base: Record | None,
    before: int,
    sizes: Sequence[int],
    bound: int | None,
) -> Protected:
    """What must stay of the items before ``before``.

    Args:
        patterns: excluded tools.
        base: the active record: what it has swallowed is not brought back.
        before: a group boundary.
        sizes: tokens of each item as the view shows it now.
        bound: tokens that protected originals may take; ``None`` = no bound. The last user message is outside it.
    """
    kept: set[int] = set()
    total = 0
    last_user = transcript.last_user
    room = bound
    told: list[int] = []
    for group in reversed(transcript.groups):
        if group.start >= before or not _visible(group, base):
            continue
        size = sum(sizes[group.start : group.end])
        if last_user is not None and last_user in group:
            kept.update(range(group.start, group.end))
            total += size
            continue
        system = [item.index for item in transcript.items[group.start : group.end] if item.role == "system"]
        if not system and not excluded_group(transcript, group, patterns):
            continue
        if room is None or size <= room:
            kept.update(range(group.start, group.end))
            total += size
            room = None if room is None else room - size
        else:
            told += system
    told += [
        index
        for index in _swallowed_system(transcript, base)
        if index < before and index not in kept and index not in told
    ]
    constraints, uncounted = _constraints(transcript, sorted(told, reverse=True), sizes, bound)
    return Protected(frozenset(kept), constraints, uncounted, total)


def _visible(group: Group, base: Record | None) -> bool:
    if base is None or group.start >= base.summarized_to:
        return True
    return group.start in base.kept


def _swallowed_system(transcript: Transcript, base: Record | None) -> list[int]:
    """System messages that an earlier event moved into the constraints: they are chosen anew each time."""
    if base is None:
        return []
    return [
        item.index
        for item in transcript.items[: base.summarized_to]
        if item.role == "system" and item.index not in base.kept
    ]


def _constraints(
    transcript: Transcript, newest_first: Sequence[int], sizes: Sequence[int], bound: int | None
) -> tuple[tuple[int, ...], int]:
    """Identical ones once, newest first, at most ``bound`` tokens again; the rest is only counted."""
    chosen: list[int] = []
    seen: set[bytes] = set()
    room = bound
    uncounted = 0
    for index in newest_first:
        item = transcript.items[index]
        if item.fingerprint in seen:
            continue
        seen.add(item.fingerprint)
        if room is None or sizes[index] <= room:
            chosen.append(index)
            room = None if room is None else room - sizes[index]
        else:
            uncounted += 1
    return tuple(sorted(chosen)), uncounted
