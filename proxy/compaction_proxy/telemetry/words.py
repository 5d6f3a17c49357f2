"""What may be said in spans and metrics: a table of names with the type of each value, and the one function that applies it.

Counts, ids and words from closed lists. No header, no query string, no key, no message text. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

from compaction_policies.policy import Policy
from compaction_proxy.config.settings import ProviderSettings
from compaction_proxy.shaping import Shaped

Said: TypeAlias = dict[str, str | int | bool]

MAX_CHARS = 256
"""Of a value that a client or a provider chose: a model's name may be a megabyte."""
CONTENT_CHARS = 8_000
"""Of a summary, in a span, where ``telemetry.captureContent`` asks for it."""

GEN_AI = {
    "operation": "gen_ai.operation.name",
    "provider": "gen_ai.provider.name",
    "model": "gen_ai.request.model",
    "stream": "gen_ai.request.stream",
    "conversation": "gen_ai.conversation.id",
    "compacted": "gen_ai.conversation.compacted",
    "input": "gen_ai.usage.input_tokens",
    "output": "gen_ai.usage.output_tokens",
    "cached": "gen_ai.usage.cache_read.input_tokens",
    "token_type": "gen_ai.token.type",
}
"""Today's names of the GenAI semantic conventions (development status, 2026-11), in one place."""

ATTRIBUTES: dict[str, type[str] | type[int] | type[bool]] = {
    GEN_AI["operation"]: str,
    GEN_AI["provider"]: str,
    GEN_AI["model"]: str,
    GEN_AI["stream"]: bool,
    GEN_AI["conversation"]: str,
    GEN_AI["compacted"]: bool,
    GEN_AI["input"]: int,
    GEN_AI["output"]: int,
    GEN_AI["cached"]: int,
    GEN_AI["token_type"]: str,
    "http.request.method": str,
    "http.response.status_code": int,
    "url.path": str,
    "url.scheme": str,
    "server.address": str,
    "server.port": int,
    "error.type": str,
    "compaction.purpose": str,
    "compaction.would": str,
    "source": str,
    "strategy": str,
    "reason": str,
    "compaction.policy": str,
    "compaction.revision": str,
    "compaction.outcome": str,
    "compaction.reason": str,
    "compaction.source": str,
    "compaction.strategy": str,
    "compaction.tokens_before": int,
    "compaction.tokens_after": int,
    "compaction.tokens_limit": int,
    "compaction.tokens_estimated": bool,
    "compaction.messages_before": int,
    "compaction.messages_after": int,
    "compaction.covers": int,
    "compaction.summarized_to": int,
    "compaction.generation": int,
    "compaction.id": str,
    "compaction.trust": str,
    "compaction.degraded": bool,
}
"""Every attribute of spans and metrics. ``compaction.content`` alone stands outside: it is opt-in."""

METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
NAMED_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/models",
        "/v1/responses",
    }
)
"""Paths that name a span; in others there are ids, and a backend that groups by name would drown in them."""


@dataclass(frozen=True, slots=True)
class Instrument:
    """A metric. ``bounds`` are the edges of a histogram's buckets, in its unit; a counter has none."""

    unit: str
    description: str
    bounds: tuple[float, ...] = ()


_CALL_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = tuple(4**power for power in range(14))
_OWN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)

INSTRUMENTS = {
    "context.compaction.triggered.total": Instrument("{compaction}", "Compactions, by source and strategy."),
    "context.compaction.skipped.total": Instrument("{request}", "Requests for which no compaction was due, by reason."),
    "context.compaction.failed.total": Instrument("{request}", "Requests whose compaction failed, by reason."),
    "context.compaction.reclaimed.tokens": Instrument(
        "{token}", "Tokens that compactions took off the forwarded prompt."
    ),
    "context.compaction.sticky.hit.total": Instrument(
        "{request}", "Requests to which a stored compaction was re-applied."
    ),
    "context.compaction.duration": Instrument(
        "s", "Time from reading a conversation to its new form, for requests that compacted.", _OWN_SECONDS
    ),
    "compaction_proxy.overhead": Instrument(
        "s", "Time a request spent in the proxy before it was forwarded.", _OWN_SECONDS
    ),
    "gen_ai.client.token.usage": Instrument("{token}", "Tokens that providers billed, by type.", _TOKENS),
    "gen_ai.client.operation.duration": Instrument("s", "Duration of provider calls.", _CALL_SECONDS),
}
"""The bounds of ``gen_ai.*`` are those that the semantic conventions advise."""


def attributes(known: Mapping[str, object]) -> Said:
    """What of ``known`` may be recorded: names of the table with a value of their very type.

    All else is left out, a ``Secret`` too, which is a string."""
    said: Said = {}
    for name, value in known.items():
        if type(value) is not ATTRIBUTES.get(name):
            continue
        if isinstance(value, str):
            said[name] = plain(value)
        elif isinstance(value, int):
            said[name] = value
    return said


def plain(text: str, most: int = MAX_CHARS) -> str:
    """A text that every exporter can encode, cut: one lone surrogate in a span loses its whole batch."""
    return text[:most].encode("utf-8", "replace").decode()


def compaction_attributes(shaped: Shaped, policy: Policy) -> Said:
    """Everything that the ``compaction`` span says."""
    record = shaped.record
    known: dict[str, object] = {
        "compaction.policy": policy.name,
        "compaction.revision": policy.revision,
        "compaction.outcome": shaped.outcome,
        "compaction.reason": shaped.reason,
        "compaction.source": shaped.source,
        "compaction.tokens_before": shaped.tokens_before,
        "compaction.tokens_after": shaped.tokens_after,
        "compaction.tokens_limit": shaped.limit,
        "compaction.tokens_estimated": shaped.estimated or None,
        "compaction.messages_before": shaped.messages_before,
        "compaction.messages_after": shaped.messages_after,
    }
    if record is not None:
        known |= {
            "compaction.strategy": record.strategy,
            "compaction.covers": record.covers,
            "compaction.summarized_to": record.summarized_to,
            "compaction.generation": record.generation,
            "compaction.id": record.id,
            "compaction.trust": record.trust,
            "compaction.degraded": record.degraded,
        }
    return attributes(known)


def request_attributes(method: str, path: str) -> Said:
    """What a SERVER span says at its start; the path without its query."""
    return attributes(
        {
            "http.request.method": method if method in METHODS else "_OTHER",
            "url.path": path.partition("?")[0],
            "url.scheme": "http",
        }
    )


def request_name(method: str, path: str) -> str:
    """A SERVER span's name: few different ones, as the conventions ask."""
    known = method if method in METHODS else "HTTP"
    return f"{known} {path}" if path in NAMED_PATHS else known


def provider_attributes(provider: ProviderSettings, model: str) -> Said:
    """What every CLIENT span says; without a model the call is no model call, and the ``gen_ai.*`` names stay away."""
    url = urlsplit(provider.base_url)
    known: dict[str, object] = {
        "server.address": url.hostname,
        "server.port": url.port or {"http": 80, "https": 443}.get(url.scheme),
    }
    if model:
        known |= {GEN_AI["operation"]: "chat", GEN_AI["provider"]: provider.name, GEN_AI["model"]: model}
    return attributes(known)
