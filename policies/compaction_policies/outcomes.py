"""The closed lists of words that say what happened to a request: spans, counters, headers and tests use no others."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Outcome: TypeAlias = Literal["unchanged", "sticky", "compacted"]
"""What went upstream: the client's own bytes, the active record re-applied, or the form of a new record."""

Applied: TypeAlias = Literal["over-threshold", "background", "overflow", "manual", "pre-step", "sticky", "degraded"]
NotDue: TypeAlias = Literal[
    "disabled",
    "shadow",
    "side-call",
    "no-limit",
    "under-threshold",
    "below-reclaim-floor",
    "no-progress",
    "throttled",
    "budget-exhausted",
    "irreducible",
    "unstable-history",
    "unreadable",
    "native",
]
Failed: TypeAlias = Literal[
    "summarizer-failed",
    "breaker-open",
    "gate-timeout",
    "store-unavailable",
    "invariant-failed",
    "internal-error",
]
Reason: TypeAlias = Applied | NotDue | Failed

Source: TypeAlias = Literal["auto-trigger", "pre-step", "background", "overflow", "manual"]
"""What started a compaction; ``pre-step`` is inside a tool loop (the last item is a tool result)."""

OUTCOMES: tuple[str, ...] = get_args(Outcome)
APPLIED: frozenset[str] = frozenset(get_args(Applied))
NOT_DUE: frozenset[str] = frozenset(get_args(NotDue))
FAILED: frozenset[str] = frozenset(get_args(Failed))
SOURCES: tuple[str, ...] = get_args(Source)
