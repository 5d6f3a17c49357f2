"""The record repository: which records exist for a chain, their bodies, and the compare-and-set that makes one active.

Only the exact chain decides: an index key holds the hash of the items that a record covers, and a body is used only where
it names that same hash. Bodies are immutable and kept in memory; the index is always asked.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from compaction_policies.record import Record, decode_record, encode_record
from compaction_proxy.store import keys
from compaction_proxy.store.base import Store
from compaction_proxy.store.failover import FailoverStore
from compaction_proxy.store.index import IndexEntry, best_active, decode_index
from compaction_proxy.store.keys import Scope, ScopeKeys
from compaction_proxy.store.locks import Lock
from compaction_proxy.store.lru import ByteLru

BATCH = 512
"""Boundaries asked in one look-up trip."""

COMMIT_BOUNDARIES = 1024
"""Newest boundaries that a commit compares against."""

BODIES_MAX_BYTES = 32 * 1024 * 1024
"""Of record bodies in their stored form."""

CHAINS_MAX = 65_536
"""Conversations of which this process remembers what was last applied."""

SECRET_BYTES = 32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up found. ``candidates``: the active entries on this chain, best first; ``attempt``: attempt state."""

    candidates: tuple[IndexEntry, ...]
    attempt: bytes | None


@dataclass(frozen=True, slots=True)
class Committed:
    """``record`` is in force. Its body may be another writer's of the same plan: use it, not one's own."""

    record: Record


@dataclass(frozen=True, slots=True)
class Conflict:
    """Another record is in force than the expected one: ``best``."""

    best: Record


@dataclass(slots=True)
class _Use:
    """A record in use: what to renew, and when that was last done."""

    record: Record
    record_keys: ScopeKeys
    root: bytes
    renewed_ms: int


class Records:
    """See the module docstring. Methods raise :exc:`~compaction_proxy.store.base.StoreUnavailable` where ``store`` does.

    Args:
        ttl_seconds: sliding lifetime of records, index entries and attempt state.
        originals_ttl_seconds: lifetime of originals, from the moment of writing.
        keep_originals: false: :meth:`put_originals` stores nothing.
        clock_ms: milliseconds that only grow.
        follows: may the first record be committed on top of the second? Asked when a record that was made while the
            shared store was away is offered to it.
    """

    def __init__(
        self,
        store: Store,
        *,
        ttl_seconds: float,
        originals_ttl_seconds: float,
        keep_originals: bool,
        clock_ms: Callable[[], int],
        follows: Callable[[Record, Record], bool],
    ) -> None:
        self.store = store
        self._failover = store if isinstance(store, FailoverStore) else None
        self._ttl = ttl_seconds
        self._originals_ttl = originals_ttl_seconds
        self._keep_originals = keep_originals
        self._clock_ms = clock_ms
        self._follows = follows
        self._bodies: ByteLru[Record] = ByteLru(BODIES_MAX_BYTES)
        self._applied: OrderedDict[str, int] = OrderedDict()
        self._uses: OrderedDict[str, _Use] = OrderedDict()
        self._due: dict[str, _Use] = {}
        self._made_secret: tuple[bytes, bool, int] | None = None

    async def look_up(self, scope: Scope, chain: Sequence[bytes], boundaries: Sequence[int]) -> Found:
        """The active records on this chain.

        Args:
            chain: ``chain[n]`` is the hash of the first n items.
            boundaries: group ends, ascending.
        """
        scoped = ScopeKeys(scope)
        root = root_of(chain)
        attempt_key, newest_key = scoped.attempt(root), scoped.newest(root)
        asked = {count: scoped.index(chain[count]) for count in boundaries[-BATCH:] if count}
        applied = self._applied.get(newest_key, 0)
        if 0 < applied < len(chain):
            asked[applied] = scoped.index(chain[applied])
        attempt, newest, *values = await self.store.mget([attempt_key, newest_key, *asked.values()])
        entries = _active(asked, values)

        pointed = _count(newest)
        if 0 < pointed < len(chain) and pointed not in asked:
            entries |= await self._ask(scoped, chain, [pointed])
        older = [count for count in boundaries[:-BATCH] if count]
        while older and not entries:
            entries |= await self._ask(scoped, chain, older[-BATCH:])
            older = older[:-BATCH]
        if self._failover is not None and not self._failover.degraded and scoped.tag in self._failover.offline_scopes:
            entries |= await self._offer(self._failover, scope, chain, boundaries, entries)
        return Found(tuple(sorted(entries, key=IndexEntry.key, reverse=True)), attempt)

    async def record(self, scope: Scope, chain: Sequence[bytes], entry: IndexEntry) -> Record | None:
        """A candidate's body; ``None`` where it is gone, unreadable, or not made from exactly this chain."""
        record = await self._body(ScopeKeys(scope), entry.id)
        return record if record is not None and _belongs(record, scope, chain) else None

    def applied(self, scope: Scope, chain: Sequence[bytes], record: Record) -> bool:
        """Note that ``record`` is what this chain is sent under; true if :meth:`renew_due` now has something to do."""
        scoped = ScopeKeys(scope)
        root = root_of(chain)
        _remember(self._applied, scoped.newest(root), record.covers)
        key = scoped.record(record.id)
        use = self._uses.get(key) or _Use(record, scoped, root, -int(self._ttl * 1000))
        _remember(self._uses, key, use)
        if self._clock_ms() - use.renewed_ms >= self._ttl * 1000 / 8:
            self._due[key] = use
        return bool(self._due)

    async def renew_due(self) -> None:
        """Renew the lifetimes of records in use, once an eighth of it has passed. Belongs off the request path."""
        while self._due:
            key, use = self._due.popitem()
            use.renewed_ms = self._clock_ms()
            scoped, record = use.record_keys, use.record
            await self.store.put_if_absent(key, encode_record(record), self._ttl)
            await self.store.put(scoped.newest(use.root), b"%d" % record.covers, self._ttl)
            await self.store.touch([scoped.index(bytes.fromhex(record.chain)), scoped.attempt(use.root)], self._ttl)

    async def commit(
        self,
        scope: Scope,
        record: Record,
        chain: Sequence[bytes],
        boundaries: Sequence[int],
        expected_id: str,
        ignore_ids: Collection[str] = (),
    ) -> Committed | Conflict:
        """Make ``record`` the active one of this chain, if ``expected_id`` (``""`` = none) still is.

        Args:
            ignore_ids: records that this request passed over; they are not compared against.
        """
        scoped = ScopeKeys(scope)
        record = await self._put_body(scoped, record)
        entry = IndexEntry(record.generation, record.covers, record.summarized_to, record.id)
        write_key = scoped.index(chain[record.covers])
        read_keys = [scoped.index(chain[count]) for count in boundaries[-COMMIT_BOUNDARIES:] if count]
        expected = self._bodies.get(scoped.record(expected_id)) if expected_id else None
        if expected is not None and expected.covers < len(chain):
            read_keys.append(scoped.index(chain[expected.covers]))

        ignored = set(ignore_ids)
        while True:
            reply = await self.store.commit_index(read_keys, write_key, expected_id, ignored, entry, self._ttl)
            if reply.committed:
                break
            if reply.best is None:
                # The expected entry is gone (expired, evicted): nothing is in force that could be contradicted.
                expected_id = ""
                continue
            best = await self.record(scope, chain, reply.best)
            if best is not None:
                return Conflict(best)
            ignored.add(reply.best.id)

        root = root_of(chain)
        await self.store.put(scoped.newest(root), b"%d" % record.covers, self._ttl)
        _remember(self._applied, scoped.newest(root), record.covers)
        _remember(self._uses, scoped.record(record.id), _Use(record, scoped, root, self._clock_ms()))
        return Committed(record)

    async def attempt(self, scope: Scope, chain: Sequence[bytes]) -> bytes | None:
        """The attempt state of this chain's root. It says itself for which chain it counts."""
        return (await self.store.mget([ScopeKeys(scope).attempt(root_of(chain))]))[0]

    async def put_attempt(self, scope: Scope, chain: Sequence[bytes], value: bytes) -> None:
        await self.store.put(ScopeKeys(scope).attempt(root_of(chain)), value, self._ttl)

    async def put_originals(self, originals: Mapping[str, bytes]) -> None:
        """Keep what was replaced, by handle; that it existed is known for as long as a record lives."""
        if self._keep_originals and originals:
            await self.store.put_many({keys.tombstone(handle): b"1" for handle in originals}, self._ttl)
            await self.store.put_many(
                {keys.original(handle): value for handle, value in originals.items()}, self._originals_ttl
            )

    async def read_original(self, handle: str) -> bytes | Literal["expired", "unknown"]:
        """The original behind a handle; ``expired`` where it was kept once."""
        tombstone = keys.tombstone(handle)
        value, known = await self.store.mget([keys.original(handle), tombstone])
        if value is None and known is None:
            return "unknown"
        await self.store.touch([tombstone], self._ttl)
        return "expired" if value is None else value

    async def secret(self) -> bytes:
        """The key of the tenants' hashes: made once per store, its lifetime renewed with use.

        One that was made while the shared store was away gives way to the shared one when that is back.
        """
        now = self._clock_ms()
        if self._made_secret is None:
            made = secrets.token_bytes(SECRET_BYTES)
        else:
            made, alone, renewed_ms = self._made_secret
            fresh = now - renewed_ms < self._ttl * 1000 / 8
            if self.store.degraded or (fresh and not alone):
                return made
        value = await self.store.put_if_absent(keys.TENANT_SECRET, made, self._ttl)
        self._made_secret = (value, self.store.degraded, now)
        return value

    def lock(self, scope: Scope, chain_hash: bytes) -> Lock:
        """The lock of a plan that covers the items with this chain hash."""
        return Lock(self.store, ScopeKeys(scope).lock(chain_hash))

    async def _ask(self, scoped: ScopeKeys, chain: Sequence[bytes], counts: Sequence[int]) -> set[IndexEntry]:
        asked = {count: scoped.index(chain[count]) for count in counts}
        return _active(asked, await self.store.mget(list(asked.values())))

    async def _body(self, scoped: ScopeKeys, record_id: str, store: Store | None = None) -> Record | None:
        key = scoped.record(record_id)
        record = self._bodies.get(key)
        if record is None:
            data = (await (store or self.store).mget([key]))[0]
            record = None if data is None else decode_record(data)
            if data is None or record is None or record.id != record_id:
                return None
            self._bodies.put(key, record, len(data))
        return record

    async def _put_body(self, scoped: ScopeKeys, record: Record) -> Record:
        """First writer wins, unless what it wrote is not readable as this record."""
        key, data = scoped.record(record.id), encode_record(record)
        held = await self.store.put_if_absent(key, data, self._ttl)
        winner = record if held == data else decode_record(held)
        if winner is None or (winner.id, winner.chain, winner.covers) != (record.id, record.chain, record.covers):
            await self.store.put(key, data, self._ttl)
            winner = record
        self._bodies.put(key, winner, len(held))
        return winner

    async def _offer(
        self,
        failover: FailoverStore,
        scope: Scope,
        chain: Sequence[bytes],
        boundaries: Sequence[int],
        shared: Collection[IndexEntry],
    ) -> set[IndexEntry]:
        """Offer what was committed on this chain while the shared store was away; returns what it took over.

        The best of these records is offered, by the same compare-and-set as any; the others precede it or lost to it.
        """
        scoped = ScopeKeys(scope)
        away = failover.offline_ids(scoped.tag)
        counts = {*boundaries, self._applied.get(scoped.newest(root_of(chain)), 0)}
        asked = {count: scoped.index(chain[count]) for count in counts if 0 < count < len(chain)}
        local = {entry for entry in _active(asked, await failover.local.mget(list(asked.values()))) if entry.id in away}
        offered = best_active(local)
        if offered is None:
            return set()
        taken: set[IndexEntry] = set()
        record = await self._body(scoped, offered.id, failover.local)
        best = best_active(shared)
        active = None if best is None else await self.record(scope, chain, best)
        if record is not None and _belongs(record, scope, chain) and (active is None or self._follows(record, active)):
            expected, unreadable = (active.id, ()) if active else ("", (best.id,) if best else ())
            reply = await self.commit(scope, record, chain, boundaries, expected, unreadable)
            if isinstance(reply, Committed):
                taken.add(offered)
        if not failover.degraded:
            failover.settle(scoped.tag, {entry.id for entry in local})
        return taken


def root_of(chain: Sequence[bytes]) -> bytes:
    """The chain hash after the second item, or of all there is: what the requests of one conversation share."""
    return chain[min(2, len(chain) - 1)]


def _active(asked: Mapping[int, str], values: Sequence[bytes | None]) -> set[IndexEntry]:
    """The active entries among index values, each under the key of the count that it covers."""
    return {
        entry
        for count, value in zip(asked, values, strict=True)
        if value is not None
        for entry in decode_index(value)
        if entry.covers == count and entry.state == "active"
    }


def _belongs(record: Record, scope: Scope, chain: Sequence[bytes]) -> bool:
    return (
        0 < record.covers < len(chain)
        and record.chain == chain[record.covers].hex()
        and (record.policy, record.epoch) == (scope.policy, scope.epoch)
    )


def _count(value: bytes | None) -> int:
    return int(value) if value is not None and value.isdigit() and len(value) < 10 else 0


def _remember(known: OrderedDict[str, T], key: str, value: T) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > CHAINS_MAX:
        known.popitem(last=False)
