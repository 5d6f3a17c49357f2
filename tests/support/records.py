"""Records over made-up chains, and a repository for them: what the store's tests are about is where records go."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from compaction_policies.record import Record
from compaction_policies.succession import follows
from compaction_proxy.store import Committed, Conflict, Records, Scope, Store

SCOPE = Scope("tenant", "session", "p", 0)


def chain(items: int, branch_at: int = 10**9) -> tuple[bytes, ...]:
    """Hashes of a conversation; two with another ``branch_at`` share what comes before it."""
    out = [b"\0" * 16]
    for number in range(items):
        said = f"{number}{'b' if number >= branch_at else ''}".encode()
        out.append(hashlib.blake2b(out[-1] + said, digest_size=16).digest())
    return tuple(out)


def record(
    hashes: tuple[bytes, ...],
    covers: int,
    *,
    identity: str = "",
    generation: int = 1,
    cut: int | None = None,
    **more: Any,
) -> Record:
    known: dict[str, Any] = {
        "id": identity or f"r{covers}-{generation}", "policy": "p", "revision": "", "epoch": 0, "dialect": "d", "parent": "",
        "generation": generation, "chain": hashes[covers].hex(), "covers": covers, "summarized_to": covers if cut is None else cut,
        "ops": (), "kept": (), "told": (), "summary": "", "body": "", "ledger": "", "synthetic": (b"m",), "synthetic_tokens": 1,
        "degraded": False, "trust": "derived", "source": "auto-trigger", "strategy": "s", "template": "t", "carried": (),
        "pinned": (), "fingerprints": (), "tokens_before": 9, "tokens_after": 5,
    }  # fmt: skip
    return Record(**{**known, **more})


def repository(store: Store, clock: Callable[[], int] = lambda: 0, ttl: float = 3_600) -> Records:
    return Records(
        store, ttl_seconds=ttl, originals_ttl_seconds=60, keep_originals=True, clock_ms=clock, follows=follows
    )


async def best(records: Records, hashes: tuple[bytes, ...], scope: Scope = SCOPE) -> Record | None:
    found = await records.look_up(scope, hashes, range(1, len(hashes)))
    for entry in found.candidates:
        body = await records.record(scope, hashes, entry)
        if body is not None:
            return body
    return None


async def commit(records: Records, made: Record, hashes: tuple[bytes, ...], expected: str = "") -> Committed | Conflict:
    return await records.commit(SCOPE, made, hashes, range(1, len(hashes)), expected)
