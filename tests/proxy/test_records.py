"""The record repository: found by chain, committed by compare-and-set, renewed with use; in memory and on a real server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from compaction_policies.record import Record
from compaction_policies.succession import follows
from compaction_proxy.store import (
    Committed,
    Conflict,
    FailoverStore,
    MemoryStore,
    Records,
    RedisStore,
    Scope,
    Store,
    StoreUnavailable,
)
from compaction_proxy.store.keys import ScopeKeys
from compaction_proxy.store.records import root_of

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


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(clock=lambda: clock.now)
        return
    made = RedisStore(request.getfixturevalue("redis_url"))
    yield made
    await made.close()


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


async def commit(records: Records, made: Record, hashes: tuple[bytes, ...], expected: str = "") -> Any:
    return await records.commit(SCOPE, made, hashes, range(1, len(hashes)), expected)


async def test_a_record_is_found_by_every_longer_request_of_its_chain_and_by_no_other(store: Store) -> None:
    records, other = repository(store), repository(store)
    made = record(chain(10), 6)
    assert isinstance(await commit(records, made, chain(10)), Committed)
    assert await best(other, chain(10)) == made
    assert await best(other, chain(50)) == made
    assert await best(other, chain(5)) is None
    assert await best(other, chain(50, branch_at=5)) is None
    assert await best(other, chain(50, branch_at=6)) == made
    for scope in (
        replace(SCOPE, tenant="x"),
        replace(SCOPE, session="x"),
        replace(SCOPE, policy="x"),
        replace(SCOPE, epoch=1),
    ):
        assert await best(other, chain(50), scope) is None


async def test_a_branch_adds_records_inside_the_common_prefix_only(store: Store) -> None:
    records = repository(store)
    main = record(chain(40), 29, generation=2)
    await commit(records, main, chain(40))
    inside = record(chain(40), 25, generation=3)
    branch = chain(40, branch_at=27)
    assert isinstance(await commit(records, inside, branch), Committed)
    assert await best(records, chain(40)) == main
    assert await best(records, branch) == inside


async def test_one_of_many_racing_commits_wins_and_the_others_learn_which(store: Store) -> None:
    replicas = [repository(store) for _ in range(4)]
    made = [record(chain(20), 5 + number, identity=f"id{number}") for number in range(8)]
    replies = await asyncio.gather(*(commit(replicas[at % 4], each, chain(20)) for at, each in enumerate(made)))
    winners = [reply.record for reply in replies if isinstance(reply, Committed)]
    assert len(winners) == 1
    assert all(reply.best == winners[0] for reply in replies if isinstance(reply, Conflict))


async def test_the_first_writer_of_one_plan_wins_and_the_others_use_its_text(store: Store) -> None:
    one, two = repository(store), repository(store)
    first = await commit(one, record(chain(9), 4, body="first"), chain(9))
    second = await commit(two, record(chain(9), 4, body="second"), chain(9))
    assert isinstance(second, Committed)
    assert second.record == first.record
    assert second.record.body == "first"


async def test_a_record_follows_only_the_one_it_was_made_on(store: Store) -> None:
    records = repository(store)
    await commit(records, record(chain(20), 4), chain(20))
    late = await commit(records, record(chain(20), 8, generation=2), chain(20), expected="somebody-else")
    assert isinstance(late, Conflict)
    assert late.best.id == "r4-1"
    assert isinstance(await commit(records, record(chain(20), 8, generation=2), chain(20), expected="r4-1"), Committed)


async def test_a_conversation_of_a_thousand_groups_finds_its_oldest_record(store: Store) -> None:
    made = record(chain(1_500), 3)
    await commit(repository(store), made, chain(10))
    assert await best(repository(store), chain(1_500)) == made


async def test_junk_in_the_store_is_a_miss_and_is_overwritten(store: Store) -> None:
    keys = ScopeKeys(SCOPE)
    made = record(chain(10), 6)
    await store.put(keys.index(chain(10)[6]), b'{"v":0,"junk":true}', 60)
    await store.put(keys.record(made.id), b"\xffjunk", 60)
    await store.put(keys.newest(root_of(chain(10))), b"not a number", 60)
    records = repository(store)
    assert await best(records, chain(10)) is None
    assert isinstance(await commit(records, made, chain(10)), Committed)
    assert await best(repository(store), chain(10)) == made


async def test_a_body_of_another_chain_under_the_same_id_is_never_used(store: Store) -> None:
    made = record(chain(10), 6)
    await commit(repository(store), made, chain(10))
    foreign = replace(made, chain=chain(10, branch_at=2)[6].hex())
    from compaction_policies.record import encode_record

    await store.put(ScopeKeys(SCOPE).record(made.id), encode_record(foreign), 60)
    assert await best(repository(store), chain(10)) is None


async def test_use_renews_the_lifetime_once_an_eighth_has_passed(clock: Clock) -> None:
    store = MemoryStore(clock=lambda: clock.now)
    records = repository(store, lambda: int(clock.now * 1000), ttl=80)
    made = record(chain(10), 6)
    await commit(records, made, chain(10))
    assert not records.applied(SCOPE, chain(10), made)
    for _ in range(10):
        clock.now += 40
        assert await best(records, chain(10)) == made, "still a hit long after the first lifetime"
        assert records.applied(SCOPE, chain(10), made)
        await records.renew_due()
    clock.now += 81
    assert await best(repository(store), chain(10)) is None


async def test_originals_expire_apart_from_what_is_known_of_them(clock: Clock) -> None:
    store = MemoryStore(clock=lambda: clock.now)
    records = repository(store)
    await records.put_originals({"handle": b"original"})
    assert await records.read_original("handle") == b"original"
    assert await records.read_original("other") == "unknown"
    clock.now += 61
    assert await records.read_original("handle") == "expired"
    none = Records(
        store, ttl_seconds=60, originals_ttl_seconds=60, keep_originals=False, clock_ms=lambda: 0, follows=follows
    )
    await none.put_originals({"secret": b"x"})
    assert await records.read_original("secret") == "unknown"


async def test_one_tenant_secret_for_all_replicas(store: Store) -> None:
    found = {await repository(store).secret() for _ in range(3)}
    assert len(found) == 1
    assert len(found.pop()) == 32


async def test_attempts_are_remembered_per_root(store: Store) -> None:
    records = repository(store)
    await records.put_attempt(SCOPE, chain(9), b"state")
    assert (await repository(store).look_up(SCOPE, chain(30), [5])).attempt == b"state"
    assert (await repository(store).look_up(SCOPE, chain(30, branch_at=1), [5])).attempt is None


async def test_what_was_made_while_the_store_was_away_is_offered_when_it_is_back() -> None:
    class Away(MemoryStore):
        away = False

        async def mget(self, keys: Any) -> Any:
            if self.away:
                raise StoreUnavailable
            return await super().mget(keys)

        async def ping(self) -> None:
            if self.away:
                raise StoreUnavailable

        async def put_if_absent(self, key: str, value: bytes, ttl: float) -> bytes:
            if self.away:
                raise StoreUnavailable
            return await super().put_if_absent(key, value, ttl)

        async def commit_index(self, *given: Any) -> Any:
            if self.away:
                raise StoreUnavailable
            return await super().commit_index(*given)

    shared = Away()
    failover = FailoverStore(shared, MemoryStore(), mirror_ttl=60, first_pause=0.001)
    records = repository(failover)
    six = record(chain(40), 6)
    await commit(records, six, chain(40))
    shared.away = True
    twelve = record(chain(40), 12, generation=2)
    assert await best(records, chain(40)) == six, "in the form last sent"
    assert isinstance(await commit(records, twelve, chain(40), expected=six.id), Committed)
    shared.away = False
    async with asyncio.timeout(5):
        while failover.degraded:
            await asyncio.sleep(0.001)
    assert await best(repository(shared), chain(40)) == six
    assert await best(records, chain(40)) == twelve
    assert await best(repository(shared), chain(40)) == twelve, "taken over by the shared store"
    await failover.close()
