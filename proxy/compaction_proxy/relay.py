"""From upstream to client, chunk by chunk as they come: nothing parsed, nothing joined, nothing invented.

Where the upstream breaks off, the client's connection is aborted, so that a cut answer never looks complete.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from starlette.types import Send

from compaction_proxy.errors import UpstreamError
from compaction_proxy.upstream import Response, response_headers

_TAIL = 16 * 1024
_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')


class BrokenOff(Exception):
    """The upstream broke off after the first byte went out; raised through the server so that it closes the connection."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the provider billed. Tokens; 0 where it said nothing."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


@dataclass(slots=True)
class Relayed:
    """How an answer went. ``first_byte`` is seconds on the monotonic clock."""

    status: int = 0
    bytes: int = 0
    chunks: int = 0
    first_byte: float | None = None
    ended: Literal["complete", "client-disconnect", "upstream-broke"] = "client-disconnect"
    usage: Usage | None = None


async def relay(response: Response, send: Send, more_headers: Iterable[tuple[bytes, bytes]], relayed: Relayed) -> None:
    """Send an answer on. ``relayed`` is filled as it goes, so that it is right on every way out. Raises :class:`BrokenOff`."""
    relayed.status = response.status
    headers = [*response_headers(response.headers), *more_headers]
    if response.status == 304:  # its content-length is that of the body that it does not have
        headers = [(name, value) for name, value in headers if name != b"content-length"]
    plain = not any(name == b"content-encoding" and value.lower() != b"identity" for name, value in headers)
    tail = b""
    try:
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        async for chunk in response.chunks():
            if relayed.first_byte is None:
                relayed.first_byte = time.monotonic()
            relayed.bytes += len(chunk)
            relayed.chunks += 1
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if plain:
                tail = chunk[-_TAIL:] if len(chunk) >= _TAIL else (tail + chunk)[-_TAIL:]
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        relayed.ended = "complete"
    except UpstreamError as error:
        relayed.ended = "upstream-broke"
        raise BrokenOff(error.message) from None
    finally:
        relayed.usage = find_usage(tail)
        response.close()


def find_usage(tail: bytes) -> Usage | None:
    """The last usage object near the end of a JSON or SSE body. Never raises."""
    matches = list(_USAGE.finditer(tail))
    if not matches:
        return None
    text = tail[matches[-1].end() :].decode("utf-8", "replace")
    try:
        found, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        _tokens(found.get("prompt_tokens", found.get("input_tokens"))),
        _tokens(found.get("completion_tokens", found.get("output_tokens"))),
        _tokens(cached),
    )


def _tokens(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
