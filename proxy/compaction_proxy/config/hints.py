"""What may have been meant: old spellings, keys of other places, keys of later versions, and values in the wrong form."""

from __future__ import annotations

import re
from typing import Any, get_args

from pydantic.alias_generators import to_camel

from compaction_proxy.config.report import closest
from compaction_proxy.config.schema import Section, children, sections

LATER_KEYS = frozenset(
    [
        "kickRatio",
        "hooks",
        "at",
        "digest",
        "recall",
        "readResultToolName",
        "usage",
        "rollout",
        "summaryBudget",
        "encryptionKey",
        "observationPatterns",
        "patterns",
        "neverSummarize",
        "taskMap",
        "qualityGuard",
        "consolidation",
        "native",
        "thinking",
        "prices",
        "upstreamModel",
        "fallbacks",
        "strictAlternation",
        "retries",
        "gateKeepaliveMs",
        "cacheTtlSeconds",
        "minIntervalMs",
        "summarizerMode",
        "summarizerFallbackModel",
        "compact",
        "provider",
    ]
)
LATER_VALUES = frozenset({"custom", "anthropic", "litellm", "levels", "in-place"})
NOT_AVAILABLE = "not available in this version"

_SPELLINGS = {
    "trigger": "thresholds",
    "threshold": "thresholds",
    "triggertokens": "thresholdTokens",
    "attokens": "thresholdTokens",
    "tokens": "thresholdTokens",
    "triggerratio": "thresholdRatio",
    "atratio": "thresholdRatio",
    "ratio": "thresholdRatio",
    "type": "kind",
    "extends": "preset",
    "base": "preset",
    "enabled": "mode",
    "strategy": "strategies",
    "keeprecentmessages": "preserveRecentTurns",
    "keeprecentturns": "preserveRecentTurns",
    "keeprecenttokens": "preserveRecentTokens",
    "keeprecenttoolresults": "keepToolUses",
    "preservemessages": "preserveUserMessages",
    "upstream": "providers",
    "upstreams": "providers",
    "routes": "models",
    "listen": "server",
    "cache": "store",
    "redis": "store",
}
"""Other names of a key, without case, ``_`` and ``-``."""

_KINDS = {
    kind.replace("-", ""): kind for kind in ("clear-old-tool-results", "summarize-old-preserve-recent", "truncate")
}

_COUNT = re.compile(r"^([0-9][0-9_,]{0,30})\s*([kKmM]?)$")
_PERCENT = re.compile(r"^([0-9]+(?:\.[0-9]+)?)\s*%$")


def section_at(root: type[Section], loc: tuple[str | int, ...]) -> type[Section]:
    """The section that holds the last part of ``loc``, an error's place as pydantic gives it."""
    section = root
    candidates: tuple[type[Section], ...] = (root,)
    for part in loc[:-1]:
        chosen = [c for c in candidates if part in (c.__name__, _kind(c))]
        if len(candidates) > 1 and chosen:
            section, candidates = chosen[0], (chosen[0],)
            continue
        for name, field in section.model_fields.items():
            if part == (field.alias or name):
                candidates = children(field.annotation)
                section = candidates[0] if candidates else section
    return section


def known_keys(section: type[Section]) -> list[str]:
    """The section's keys, as YAML spells them."""
    return [field.alias or name for name, field in section.model_fields.items()]


def unknown_key(word: str, section: type[Section]) -> str:
    """The whole message for a key that the section does not have."""
    known = known_keys(section)
    if word in LATER_KEYS or to_camel(word) in LATER_KEYS:
        return f"unknown key: {NOT_AVAILABLE}"
    if word == "<<":
        return "unknown key; YAML 1.2 has no merge keys: name a policy as 'preset', or use an alias for a whole value"
    squeezed = word.lower().replace("_", "").replace("-", "")
    if squeezed in _KINDS:
        return f"unknown key; did you mean 'strategies: [{{kind: {_KINDS[squeezed]}}}]'?"
    meant = next((k for k in known if k.lower() == squeezed), None) or _SPELLINGS.get(squeezed)
    if meant in known:
        return f"unknown key; did you mean '{meant}'?"
    belongs = _places(meant or word, section)
    if belongs:
        where = " or ".join(belongs)
        return f"unknown key; did you mean '{meant}' in {where}?" if meant else f"unknown key; it belongs to {where}"
    near = closest(word, known)
    return f"unknown key; did you mean '{near}'?" if near else f"unknown key; known here: {', '.join(known)}"


def number_hint(key: str, seen: Any) -> str:
    """``; did you mean 1000?`` for a number in a form that YAML does not read as one, else ``""``."""
    if isinstance(seen, float) and not isinstance(seen, bool):
        if key == "thresholdTokens" and 0 < seen < 1:
            return f"; did you mean 'thresholdRatio: {seen}'?"
        return f"; did you mean {int(seen)}?" if seen.is_integer() else ""
    if not isinstance(seen, str):
        return ""
    if percent := _PERCENT.match(seen):
        return f"; did you mean {float(percent[1]) / 100:g}?" if key.endswith("Ratio") else ""
    if count := _COUNT.match(seen):
        digits = int(re.sub("[_,]", "", count[1])) * {"": 1, "k": 1_000, "m": 1_000_000}[count[2].lower()]
        return f"; did you mean {digits}?" if str(digits) != seen else "; write it without quotes"
    return "; write it without quotes" if re.fullmatch(r"[0-9]*\.[0-9]+", seen) else ""


def ratio_hint(seen: Any) -> str:
    """``; did you mean 0.8?`` where a percentage stands for a ratio."""
    return f"; did you mean {seen / 100:g}?" if isinstance(seen, (int, float)) and 1 < seen <= 100 else ""


def switch_hint(seen: Any) -> str:
    """``; did you mean true?`` for the words that older YAML read as a switch."""
    word = seen.lower() if isinstance(seen, str) else seen
    if word in ("yes", "on", "y", "true", 1):
        return "; did you mean true?"
    return "; did you mean false?" if word in ("no", "off", "n", "false", 0) else ""


def _kind(section: type[Section]) -> str | None:
    field = section.model_fields.get("kind")
    return str(get_args(field.annotation)[0]) if field else None


def _places(word: str, section: type[Section]) -> list[str]:
    return [s.place for s in sections() if s.family == section.family and s is not section and word in known_keys(s)]
