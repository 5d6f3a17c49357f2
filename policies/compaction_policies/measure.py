"""What things count: items, parts, the head, a view; and the limits that a policy and a window give. Pure arithmetic.

One counter serves trigger, cut and report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from compaction_policies.policy import Policy
from compaction_policies.transcript import Item, Part, Transcript

Count: TypeAlias = Callable[[str], int]
"""Tokens of a text. Memoised by whoever makes it; the same text always counts the same."""


@dataclass(frozen=True, slots=True)
class Units:
    """How a text is counted and what everything that is not text costs, in tokens.

    Args:
        message: overhead of a message (OpenAI's cookbook counts 3 + the role, 2024).
        call: overhead of a tool call beside its name and arguments.
        image, media: a fixed cost each; base64 is never counted as text.
    """

    count: Count
    message: int = 4
    call: int = 4
    image: int = 1_200
    media: int = 2_048

    def item(self, item: Item) -> int:
        total = self.message + sum(self.part(item, part) for part in item.parts)
        for call in item.calls:
            total += self.call + self.count(call.name)
        if item.hidden:
            total += self.count(item.hidden)
        return total

    def part(self, item: Item, part: Part) -> int:
        total = self.count(part.text) if part.text else 0
        for media in item.media:
            if part.start <= media.start < part.end:
                total += self.image if media.kind == "image" else self.media
        return total

    def fixed(self, transcript: Transcript) -> int:
        """The head and the schemas: what no compaction can change."""
        schemas = sum(self.count(text) + self.message for text in transcript.schemas)
        return schemas + sum(self.item(item) for item in transcript.head)


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of one request under one policy, scaled to its limit so that a 4k window works as a 1M one.

    Args:
        limit: above it a compaction is due; ``None`` where no limit is known.
        hard: above it the provider must refuse; ``None`` while the window is unknown.
    """

    limit: int | None
    hard: int | None
    target: int = 0
    rearm: int = 0
    min_reclaim: int = 0
    clear_at_least: int = 0
    summary: int = 0
    ledger: int = 0
    carried: int = 0
    protected: int | None = None


def limits(policy: Policy, window: int | None, max_tokens: int, *, summary: int, ledger: int, clear: int) -> Limits:
    """The limits of design section 7.

    Args:
        window: the model's context window in tokens, where known.
        max_tokens: the request's output limit, 0 where it names none.
        summary, ledger, clear: the policy's caps before scaling: summaryMaxTokens, ledgerMaxTokens, clearAtLeast.
    """
    thresholds = policy.thresholds
    known: list[int] = []
    hard: int | None = None
    if window is not None:
        hard = window - min(max_tokens, window // 2)
    if not thresholds.never:
        if thresholds.threshold_tokens is not None:
            known.append(thresholds.threshold_tokens)
        if window is not None:
            if thresholds.threshold_ratio is not None:
                known.append(int(window * thresholds.threshold_ratio))
            reserve = min(max_tokens + min(thresholds.reserve_tokens, window // 10), window // 2)
            known.append(window - reserve)
    if not known:
        return Limits(limit=None, hard=hard)
    limit = max(1, min(known))
    return scaled(policy, limit, hard, summary=summary, ledger=ledger, clear=clear)


def scaled(policy: Policy, limit: int, hard: int | None, *, summary: int, ledger: int, clear: int) -> Limits:
    """All sizes that follow from a limit; absolute sizes are caps."""
    thresholds = policy.thresholds
    target = int(limit * thresholds.target_ratio)
    min_reclaim = min(thresholds.min_reclaim_tokens, limit // 16)
    protected = policy.protected_max_tokens
    return Limits(
        limit=limit,
        hard=hard,
        target=target,
        rearm=max(min_reclaim, int(limit * (1 - thresholds.target_ratio)) // 4),
        min_reclaim=min_reclaim,
        clear_at_least=min(clear, limit // 4),
        summary=min(summary, limit // 8),
        ledger=min(ledger, limit // 12),
        carried=min(policy.preserve_user_tokens, limit // 4),
        protected=target // 4 if protected == "auto" else protected,
    )
