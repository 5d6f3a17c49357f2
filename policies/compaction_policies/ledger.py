"""The ledger: exact names and values of what a summary stands for, found without a model.

Summaries by real models held 40 % of the entities that an agent used next; a list of the same size, made like this, 78 %
(the project's measures, 2026-11). Ranked by what agents use next: what the conversation itself repeats, late, outside of tool
output. Each entity stands as it was written, separated by spaces, so that it can be found by its exact text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

from compaction_policies.transcript import Item

_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("urls", re.compile(r"https?://[^\s\"'<>)\]}\\]{6,}")),
    (
        "paths",
        re.compile(
            r"(?:[\w.@~-]*/)+[\w.@-]+\.?\w*"
            r"|\b[\w-]+\.(?:py|ts|tsx|js|jsx|json|md|ex|exs|c|h|cc|cpp|go|rs|java|kt|rb|php|yaml|yml|toml|txt|html|css|csv|sql|sh)\b"
        ),
    ),
    (
        "names",
        re.compile(
            r"\b(?:[a-z]+_[a-z0-9_]+|[a-z]+[A-Z]\w+|[A-Z][a-z]+[A-Z]\w+|[A-Z]{2,}_[A-Z0-9_]+|[A-Z0-9]{6,}|[A-Z]{2,}-\d+)\b"
        ),
    ),
    ("numbers", re.compile(r"(?<![\w.])\$?\d[\d,]{2,}(?:\.\d+)?(?![\w])")),
    ("hashes", re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")),
)
_CREDENTIAL = re.compile(
    r"^(?:sk-|pk_|rk_|ghp_|gho_|github_pat_|xox[abp]-|AKIA|ASIA|AIza|eyJ|glpat-)|BEGIN [A-Z ]*PRIVATE KEY|://[^/\s]+:[^/\s]+@"
)
_MAX_ENTITY_CHARS = 160
_SCANNED_CHARS = 200_000


def ledger(items: Sequence[Item], max_tokens: int, count: Callable[[str], int]) -> str:
    """The most useful exact names and values of ``items`` within ``max_tokens`` tokens; a line a kind, in a stable order."""
    scores: dict[tuple[str, str], float] = {}
    total = max(1, len(items))
    for place, item in enumerate(items):
        recency = place / total
        for entity in entities(item.text):
            own = item.role != "tool"
            scores[entity] = scores.get(entity, 0.0) + (1.0 + 2.0 * recency if own else 0.6 + 0.4 * recency)
        for call in item.calls:
            for entity in entities(call.arguments):
                scores[entity] = scores.get(entity, 0.0) + 1.2 + 2.0 * recency
    ranked = sorted(scores, key=lambda entity: (-scores[entity], entity))
    low, high = 0, len(ranked)
    while low < high:
        middle = (low + high + 1) // 2
        if count(_shown(ranked[:middle])) <= max_tokens:
            low = middle
        else:
            high = middle - 1
        high = min(high, max(low, 4 * max_tokens))
    return _shown(ranked[:low])


@functools.lru_cache(maxsize=8_192)
def entities(text: str) -> tuple[tuple[str, str], ...]:
    """``(kind, exact text)`` of each name and value, once each, in order of kind. Nothing that looks like a credential."""
    text = text[:_SCANNED_CHARS]
    found: dict[tuple[str, str], None] = {}
    for kind, pattern in _PATTERNS:
        for match in pattern.findall(text):
            entity = match.strip(".,:;")
            if 3 <= len(entity) <= _MAX_ENTITY_CHARS and not _CREDENTIAL.search(entity):
                found[kind, entity] = None
    return tuple(found)


def _shown(chosen: Sequence[tuple[str, str]]) -> str:
    lines = []
    for kind, _ in _PATTERNS:
        listed = [entity for known, entity in chosen if known == kind]
        if listed:
            lines.append(f"{kind}: {' '.join(listed)}")
    return "\n".join(lines)
