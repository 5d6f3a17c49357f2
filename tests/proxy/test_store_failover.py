"""The breaker around a real server that is killed, frozen and back: no operation fails, an outage costs one time-out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from compaction_proxy.store import FailoverStore, MemoryStore, Records, RedisStore, StoreUnavailable, open_store
from compaction_proxy.store.failover import MAX_AWAY, hash_tag
from compaction_proxy.store.index import IndexEntry, decode_index
from compaction_proxy.store.keys import ScopeKeys, original
from support.records import SCOPE, best, chain, commit, record, repository
from support.valkey import ValkeyServer

pytestmark = pytest.mark.skipif("://" in os.environ.get("TEST_REDIS_SERVER", ""), reason="another server is named")

TTL = 60.0


class Watched(RedisStore):
    """Counts the operations that reached for the server, probes left out."""

    asked = 0

    async def mget(self, keys):
        self.asked += 1
        return await super().mget(keys)

    async def put(self, key, value, ttl):
        self.asked += 1
        await super().put(key, value, ttl)


class Outage:
    """A store on a server of its own, what it told of its changes, and waiting for the next one."""

    def __init__(self, server: ValkeyServer) -> None:
        self.server = server
        self.changes: list[tuple[bool, str]] = []
        self.shared = Watched(server.url, label="test server")
        self.store = FailoverStore(
            self.shared,
            MemoryStore(),
            mirror_ttl=TTL,
            on_change=lambda degraded, why: self.changes.append((degraded, why)),
            first_pause=0.05,
        )

    def begin(self, how: str) -> None:
        if how == "killed":
            self.server.kill()
        else:
            self.server.freeze()

    async def end(self, how: str) -> None:
        if how == "killed":
            await asyncio.to_thread(self.server.start)
        else:
            self.server.thaw()
        await self.until(degraded=False)

    async def until(self, *, degraded: bool) -> None:
        async with asyncio.timeout(20):
            while self.store.degraded != degraded:
                await asyncio.sleep(0.005)


@pytest.fixture
async def outage(own_server: ValkeyServer) -> AsyncIterator[Outage]:
    made = Outage(own_server)
    yield made
    await made.store.close()


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_an_outage_is_told_once_and_ends_by_itself(outage: Outage, how: str) -> None:
    await outage.store.put("t:a", b"1", TTL)
    outage.begin(how)
    for _ in range(5):
        assert await outage.store.mget(["t:a"]) == [b"1"], "what was written before is mirrored"
    assert outage.store.degraded
    asked = outage.shared.asked
    await outage.store.put("t:b", b"2", TTL)
    assert outage.shared.asked == asked, "an open breaker asks nobody"
    await outage.end(how)
    assert await outage.store.mget(["t:a", "t:b"]) == [b"1", b"2"], "what was written while away is not forgotten"
    assert [degraded for degraded, _ in outage.changes] == [True, False]
    assert outage.changes[0][1].startswith("test server: ")


async def test_a_frozen_server_is_asked_once_by_each_operation_that_was_under_way(outage: Outage) -> None:
    await outage.store.put("t:a", b"1", TTL)
    outage.begin("frozen")
    asked = outage.shared.asked

    async def request() -> list[list[bytes | None]]:
        return [await outage.store.mget(["t:a"]) for _ in range(10)]

    answers = await asyncio.gather(*(request() for _ in range(4)))
    assert answers == [[[b"1"]] * 10] * 4
    assert outage.shared.asked == asked + 4, "a request waits for one time-out at most"
    await outage.end("frozen")


async def test_what_another_replica_wrote_is_mirrored_when_read(outage: Outage) -> None:
    other = RedisStore(outage.server.url)
    await other.put("t:a", b"theirs", TTL)
    assert await outage.store.mget(["t:a", "t:none"]) == [b"theirs", None]
    await other.put("t:first", b"theirs", TTL)
    assert await outage.store.put_if_absent("t:first", b"ours", TTL) == b"theirs"
    await outage.store.put("t:gone", b"1", TTL)
    await other.delete(["t:gone"])
    assert await outage.store.mget(["t:gone"]) == [None]
    await other.close()
    outage.begin("killed")
    assert await outage.store.mget(["t:a", "t:none", "t:gone", "t:first"]) == [b"theirs", None, None, b"theirs"]


async def test_every_primitive_answers_from_memory_while_away(outage: Outage) -> None:
    outage.begin("killed")
    store = outage.store
    assert await store.put_if_absent("t:a", b"1", TTL) == b"1"
    assert await store.put_if_absent("t:a", b"2", TTL) == b"1"
    await store.put_many({"t:b": b"2"}, TTL)
    await store.touch(["t:a"], TTL)
    await store.delete(["t:a"])
    assert await store.mget(["t:a", "t:b"]) == [None, b"2"]
    assert await store.acquire("t:lock", "me", 1000)
    assert await store.renew("t:lock", "me", 1000)
    assert await store.release("t:lock", "me")
    await store.ping()
    entry = IndexEntry(1, 8, 8, "a")
    assert (await store.commit_index([], "t:{s}:8", "", (), entry, TTL)).committed
    assert decode_index((await store.mget(["t:{s}:8"]))[0]) == (entry,)
    assert list(store.offline_scopes) == ["s"]


async def test_a_lock_taken_in_memory_is_given_back_after_the_return(outage: Outage) -> None:
    outage.begin("killed")
    assert await outage.store.acquire("t:lock", "me", 60_000)
    await outage.end("killed")
    assert await outage.store.release("t:lock", "me")
    assert await outage.store.local.acquire("t:lock", "other", 60_000)


async def test_an_outage_in_the_middle_of_a_commit_loses_nothing(outage: Outage) -> None:
    records = repository(outage.store)
    made = record(chain(10), 6)
    outage.begin("frozen")
    assert (await commit(records, made, chain(10))).record == made
    assert await best(records, chain(10)) == made
    await outage.end("frozen")
    assert await best(records, chain(10)) == made
    assert await best(repository(outage.shared), chain(10)) == made
    assert list(outage.store.offline_scopes) == []


async def test_a_record_made_while_away_gives_way_to_a_better_one(outage: Outage) -> None:
    """Both sides went on: what does not follow the record in force is not taken over."""
    records, other = repository(outage.store), repository(outage.shared)
    base = record(chain(30), 6)
    await commit(records, base, chain(30))
    outage.begin("killed")
    mine = record(chain(30), 14, identity="mine", generation=2, cut=4)
    await commit(records, mine, chain(30), expected=base.id)
    assert await best(records, chain(30)) == mine
    await outage.end("killed")
    theirs = record(chain(30), 12, identity="theirs", generation=2)  # its cut is further
    await commit(other, theirs, chain(30), expected=base.id)
    assert await best(records, chain(30)) == theirs
    assert list(outage.store.offline_scopes) == []
    assert await best(records, chain(30)) == theirs


async def test_records_of_several_branches_are_each_offered_with_their_own_chain(outage: Outage) -> None:
    records = repository(outage.store)
    main, branch = chain(30), chain(30, branch_at=4)
    outage.begin("killed")
    on_main, on_branch = record(main, 6, identity="main"), record(branch, 8, identity="branch")
    await commit(records, on_main, main)
    await commit(records, on_branch, branch)
    await outage.end("killed")
    assert await best(records, branch) == on_branch
    assert len(outage.store.offline_scopes) == 1
    assert await best(records, main) == on_main
    assert len(outage.store.offline_scopes) == 0
    fresh = repository(outage.shared)
    assert [await best(fresh, main), await best(fresh, branch)] == [on_main, on_branch]


async def test_originals_written_while_away_can_be_read_afterwards(outage: Outage) -> None:
    records = repository(outage.store)
    outage.begin("killed")
    await records.put_originals({"abcdef": b"original"})
    await outage.end("killed")
    assert await records.read_original("abcdef") == b"original"
    assert await outage.store.local.mget([original("abcdef")]) == [b"original"]


async def test_originals_take_no_room_in_memory_while_the_store_is_there(outage: Outage) -> None:
    await repository(outage.store).put_originals({"abcdef": b"x" * 10_000})
    assert outage.store.local.size == 0


async def test_a_tenant_secret_made_while_away_gives_way_to_the_shared_one(outage: Outage) -> None:
    shared = await repository(outage.shared).secret()
    outage.begin("killed")
    records = repository(outage.store)
    alone = await records.secret()
    assert alone != shared
    assert await records.secret() == alone
    await outage.end("killed")
    assert await records.secret() == shared


async def test_a_known_tenant_secret_outlives_an_outage(outage: Outage) -> None:
    records = repository(outage.store)
    shared = await records.secret()
    outage.begin("killed")
    await outage.store.ping()
    assert outage.store.degraded
    assert await records.secret() == shared


async def test_it_starts_without_a_server_and_finds_it_later(short_path: Path) -> None:
    server = ValkeyServer(short_path)
    changes: list[bool] = []
    store = await open_store(
        server.url, state_dir=short_path, ttl_seconds=TTL, on_change=lambda degraded, why: changes.append(degraded)
    )
    assert store.degraded
    await store.put("t:a", b"1", TTL)
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(20):
        while store.degraded:
            await asyncio.sleep(0.005)
    assert changes == [True, False]
    await store.close()
    server.kill()


async def test_pauses_between_probes_double_and_no_request_waits_for_them() -> None:
    class Refusing(MemoryStore):
        probes = 0

        async def mget(self, keys):
            raise StoreUnavailable

        async def ping(self) -> None:
            self.probes += 1
            if self.probes < 5:
                raise StoreUnavailable

    shared = Refusing()
    store = FailoverStore(shared, MemoryStore(), mirror_ttl=TTL, first_pause=0.001)
    assert await store.mget(["t:a"]) == [None]
    async with asyncio.timeout(10):
        while store.degraded:
            assert await store.mget(["t:a"]) == [None]
            await asyncio.sleep(0)
    assert shared.probes == 5
    await store.close()


async def test_what_is_remembered_of_an_outage_is_bounded() -> None:
    class Gone(MemoryStore):
        async def put(self, key, value, ttl):
            raise StoreUnavailable

        async def ping(self) -> None:
            raise StoreUnavailable

    store = FailoverStore(Gone(), MemoryStore(max_bytes=1_000_000), mirror_ttl=TTL, first_pause=60)
    for number in range(MAX_AWAY + 10):
        await store.put(f"t:{number}", b"", TTL)
        await store.commit_index([], f"t:{{{number}}}", "", (), IndexEntry(1, 8, 8, "a"), TTL)
    assert len(store.offline_scopes) == MAX_AWAY
    assert "0" not in store.offline_scopes
    assert store.local.size <= 1_000_000
    await store.close()


async def test_closing_ends_the_probe(outage: Outage) -> None:
    outage.begin("killed")
    await outage.store.ping()
    await outage.store.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "store-probe"]


def test_keys_of_one_conversation_share_a_hash_tag() -> None:
    keys = ScopeKeys(SCOPE)
    hashes = chain(3)
    named = [
        keys.index(hashes[1]),
        keys.record("id"),
        keys.newest(hashes[2]),
        keys.attempt(hashes[2]),
        keys.lock(hashes[1]),
    ]
    assert {hash_tag(key) for key in named} == {keys.tag}
    assert not [key for key in named if SCOPE.tenant in key or SCOPE.session in key]
    assert isinstance(repository(MemoryStore()), Records)
