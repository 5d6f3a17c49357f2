"""The record repository: found by chain, committed by compare-and-set, renewed with use; in memory and on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from compaction_policies.record import encode_record
from compaction_policies.succession import follows
from compaction_proxy.store import (
    Committed,
    Conflict,
    FailoverStore,
    MemoryStore,
    Records,
    RedisStore,
    Store,
    StoreUnavailable,
)
from compaction_proxy.store.index import IndexEntry, encode_index
from compaction_proxy.store.keys import ScopeKeys
from compaction_proxy.store.records import BATCH, root_of
from support.records import SCOPE, best, chain, commit, record, repository


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


class Counted(MemoryStore):
    """Counts the trips that a shared store would cost."""

    trips = 0
    largest = 0

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        self.trips += 1
        self.largest = max(self.largest, len(keys))
        return await super().mget(keys)


async def test_a_conversation_in_its_stride_costs_one_trip() -> None:
    store = Counted()
    records = repository(store)
    await commit(records, record(chain(40), 6), chain(40))
    for items in range(41, 61):
        store.trips = 0
        assert await best(records, chain(items)) is not None
        assert store.trips == 1, "the index; the body is in memory"


async def test_older_boundaries_are_asked_in_batches_and_only_without_a_hit() -> None:
    store = Counted()
    hashes = chain(3 * BATCH)
    made = record(hashes, 3)
    await commit(repository(store), made, chain(10))
    await store.delete([ScopeKeys(SCOPE).newest(root_of(hashes))])
    store.trips = 0
    records = repository(store)
    assert await best(records, hashes) == made
    assert store.trips == 4, "three batches and the body"
    assert store.largest <= BATCH + 3
    records.applied(SCOPE, hashes, made)
    store.trips = 0
    assert await best(records, hashes) == made
    assert store.trips == 1, "this process knows what was last applied"


async def test_a_record_whose_end_is_no_boundary_any_more_is_found(store: Store) -> None:
    """A late result joined its group: the group's end moved behind what the record covers."""
    made = record(chain(10), 6)
    await repository(store).commit(SCOPE, made, chain(10), [2, 6, 9], "")
    found = await repository(store).look_up(SCOPE, chain(12), [2, 9, 12])
    assert [entry.id for entry in found.candidates] == [made.id]


async def test_the_further_record_is_found_beside_an_older_one_on_a_boundary(store: Store) -> None:
    records = repository(store)
    old, late = record(chain(10), 2), record(chain(10), 6, generation=2)
    await records.commit(SCOPE, old, chain(10), [2, 6, 9], "")
    await records.commit(SCOPE, late, chain(10), [2, 6, 9], old.id)
    found = await repository(store).look_up(SCOPE, chain(12), [2, 9, 12])
    assert [entry.id for entry in found.candidates] == [late.id, old.id]


async def test_a_commit_compares_with_the_expected_record_wherever_its_end_is(store: Store) -> None:
    """Its end is no boundary of this request; without looking there it would seem to be gone."""
    records = repository(store)
    old, other = record(chain(10), 2), record(chain(10), 6, generation=2)
    await records.commit(SCOPE, old, chain(10), [2, 6, 9], "")
    await records.commit(SCOPE, other, chain(10), [2, 6, 9], old.id)
    late = await records.commit(SCOPE, record(chain(12), 9, generation=3), chain(12), [2, 9, 12], other.id)
    assert isinstance(late, Committed)


async def test_candidates_come_best_first_and_only_active_ones(store: Store) -> None:
    hashes = chain(20)
    keys = ScopeKeys(SCOPE)
    entries = [
        IndexEntry(1, 8, 8, "a"),
        IndexEntry(3, 8, 8, "b"),
        IndexEntry(2, 8, 8, "c"),
        IndexEntry(9, 8, 8, "kick", "ready"),
    ]
    await store.put(keys.index(hashes[8]), encode_index([*entries, IndexEntry(9, 9, 9, "elsewhere")]), 60)
    await store.put(keys.index(hashes[12]), encode_index([IndexEntry(1, 12, 0, "d")]), 60)
    found = await repository(store).look_up(SCOPE, hashes, [4, 8, 12])
    assert [entry.id for entry in found.candidates] == ["d", "b", "c", "a"]


async def test_a_passed_over_record_is_not_compared_against_and_comes_back_by_rule(store: Store) -> None:
    records = repository(store)
    further = record(chain(20), 12, generation=2)
    await commit(records, further, chain(20))
    reply = await records.commit(SCOPE, record(chain(14), 6), chain(14), range(1, 15), "", [further.id])
    assert isinstance(reply, Committed)
    found = await records.look_up(SCOPE, chain(30), range(1, 31))
    assert [entry.covers for entry in found.candidates] == [12, 6]


async def test_an_entry_whose_record_is_gone_is_no_obstacle(store: Store) -> None:
    lost = record(chain(20), 8)
    await commit(repository(store), lost, chain(20))
    await store.delete([ScopeKeys(SCOPE).record(lost.id)])
    assert await best(repository(store), chain(20)) is None
    made = record(chain(20), 6, identity="made")
    assert isinstance(await commit(repository(store), made, chain(20)), Committed)
    assert await best(repository(store), chain(20)) == made


async def test_an_expected_record_that_expired_is_no_obstacle(store: Store) -> None:
    records = repository(store)
    old = record(chain(20), 6)
    await commit(records, old, chain(20))
    await store.delete([ScopeKeys(SCOPE).index(chain(20)[6])])
    made = record(chain(20), 9, generation=2)
    assert isinstance(await commit(records, made, chain(20), expected=old.id), Committed)


async def test_renewal_brings_a_lost_body_back(clock: Clock) -> None:
    store = MemoryStore(clock=lambda: clock.now)
    records = repository(store, lambda: int(clock.now * 1000), ttl=80)
    made = record(chain(10), 6)
    await commit(records, made, chain(10))
    await store.delete([ScopeKeys(SCOPE).record(made.id)])
    clock.now += 10
    assert records.applied(SCOPE, chain(10), made)
    await records.renew_due()
    assert await best(repository(store), chain(10)) == made
    assert not records.applied(SCOPE, chain(10), made)


async def test_no_tenant_or_session_reads_anothers_body_by_its_id(store: Store) -> None:
    records = repository(store)
    made = record(chain(10), 6)
    await commit(records, made, chain(10))
    entry = IndexEntry(1, 6, 6, made.id)
    assert await records.record(SCOPE, chain(10), entry) == made
    for scope in (
        replace(SCOPE, tenant="x"),
        replace(SCOPE, session="x"),
        replace(SCOPE, policy="x"),
        replace(SCOPE, epoch=1),
    ):
        assert await records.record(scope, chain(10), entry) is None


async def test_names_with_odd_characters_stay_apart(store: Store) -> None:
    records = repository(store)
    odd = ["a:b", "a", "}{", "*", "a%3Ab", ""]
    scopes = [replace(SCOPE, policy=name) for name in odd]
    scopes += [replace(SCOPE, **{part: name}) for part in ("tenant", "session") for name in [*odd, "\udc80"]]
    for number, scope in enumerate(scopes):
        made = record(chain(10), 6, identity=f"id{number}", policy=scope.policy, body=f"{scope!r}")
        assert isinstance(await records.commit(scope, made, chain(10), [6], ""), Committed)
    for scope in scopes:
        found = await best(repository(store), chain(10), scope)
        assert found is not None
        assert found.body == f"{scope!r}"


@pytest.mark.parametrize("items", [0, 1, 2])
async def test_conversations_shorter_than_a_root_are_looked_up_too(store: Store, items: int) -> None:
    found = await repository(store).look_up(SCOPE, chain(items), range(1, items + 1))
    assert (found.candidates, found.attempt) == ((), None)


async def test_one_replica_at_a_time_holds_the_lock_of_a_plan(store: Store) -> None:
    hashes = chain(10)
    async with repository(store).lock(SCOPE, hashes[6]) as first:
        assert first.held
        async with (
            repository(store).lock(SCOPE, hashes[6]) as second,
            repository(store).lock(SCOPE, hashes[7]) as other,
        ):
            assert (second.held, other.held) == (False, True)
    async with repository(store).lock(SCOPE, hashes[6]) as third:
        assert third.held
