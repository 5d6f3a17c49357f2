"""Which conversation a request may belong to: a bucket of records, never the truth; the chain decides. Pure.

Clients' own fields, as seen in real traffic (2026-11). ``user`` and ``safety_identifier`` name a person, not a conversation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

HEADER = "x-compaction-session"
_MAX_LENGTH = 256
_Header = Callable[[str], str | None]


def identify(
    header: _Header, body: Mapping[str, Any], own_headers: Sequence[str], own_fields: Sequence[str]
) -> str | None:
    """The session id that a client sent, or ``None``.

    Args:
        header: looks a header up.
        body: top-level fields of the request, decoded; only small ones are asked for.
        own_headers, own_fields: the policy's ``session.headers`` and ``session.bodyFields`` (dotted).
    """
    candidates = [
        header(HEADER),
        *(header(name) for name in own_headers),
        *(_dotted(body, name) for name in own_fields),
        _joined(header("x-claude-code-session-id"), header("x-claude-code-agent-id")),
        _joined(header("thread-id") or header("session-id"), header("x-codex-window-id")),
        header("x-session-id"),
        header("session_id"),
        header("x-affinity"),
        header("x-session-affinity"),
        body.get("prompt_cache_key"),
        body.get("promptCacheKey"),
        _dotted(body, "metadata.session_id"),
        _user_id(body),
    ]
    for candidate in candidates:
        if isinstance(candidate, str) and candidate.strip():
            return _bounded(candidate.strip())
    return None


BODY_FIELDS = ("prompt_cache_key", "promptCacheKey", "metadata")


def _joined(first: str | None, second: str | None) -> str | None:
    if first is None or not first.strip():
        return None
    return f"{first.strip()}/{second.strip()}" if second and second.strip() else first


def _dotted(body: Mapping[str, Any], path: str) -> Any:
    value: Any = body
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _user_id(body: Mapping[str, Any]) -> str | None:
    """``metadata.user_id`` counts only where it is JSON with a ``session_id``."""
    value = _dotted(body, "metadata.user_id")
    if not isinstance(value, str) or not value.startswith("{"):
        return None
    try:
        found = json.loads(value).get("session_id")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _bounded(session: str) -> str:
    if len(session) <= _MAX_LENGTH:
        return session
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
