"""The primitives: one suite for the memory store and for a real server."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import redis

from compaction_proxy.store import Lock, MemoryStore, RedisStore, Store, StoreUnavailable, open_store
from compaction_proxy.store.index import MAX_ENTRIES, IndexEntry, decode_index, encode_index
from compaction_proxy.store.shared import public_url

TTL = 60.0


async def eventually(check: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not await check():
            await asyncio.sleep(0.005)


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    opened: Store = (
        MemoryStore() if request.param == "memory" else RedisStore(request.getfixturevalue("redis_url"), "test server")
    )
    yield opened
    await opened.close()


async def set_text(store: Store, key: str, text: bytes) -> None:
    await store.put(key, text, TTL)


def entry(identity: str, generation: int = 1, covers: int = 8, state: str = "active") -> IndexEntry:
    return IndexEntry(generation, covers, 0, identity, state)


async def test_values_come_back_in_the_order_of_their_keys(store: Store) -> None:
    await store.put("t:a", b"\x00\xff", TTL)
    await store.put_many({"t:b": b"2", "t:c": b""}, TTL)
    assert await store.mget(["t:c", "t:none", "t:a", "t:b"]) == [b"", None, b"\x00\xff", b"2"]
    assert await store.mget([]) == []


async def test_put_replaces(store: Store) -> None:
    await store.put("t:a", b"1", TTL)
    await store.put("t:a", b"2", TTL)
    assert await store.mget(["t:a"]) == [b"2"]


async def test_a_value_expires(store: Store) -> None:
    await store.put("t:a", b"1", 0.05)
    await store.put_many({"t:b": b"1"}, 0.05)
    await store.put_if_absent("t:c", b"1", 0.05)
    await store.put("t:stays", b"1", TTL)
    await eventually(lambda: _equals(store, ["t:a", "t:b", "t:c", "t:stays"], [None, None, None, b"1"]))


async def _equals(store: Store, keys: list[str], values: list[bytes | None]) -> bool:
    return await store.mget(keys) == values


async def test_the_first_writer_wins(store: Store) -> None:
    writers = [store.put_if_absent("t:a", b"%d" % number, TTL) for number in range(8)]
    winners = set(await asyncio.gather(*writers))
    assert len(winners) == 1
    assert await store.mget(["t:a"]) == list(winners)


async def test_touch_renews_what_exists_and_makes_nothing(store: Store) -> None:
    await store.put("t:a", b"1", 0.15)
    await store.put("t:b", b"1", 0.15)
    await store.touch(["t:a", "t:none"], TTL)
    await store.touch([], TTL)
    await eventually(lambda: _equals(store, ["t:b"], [None]))
    assert await store.mget(["t:a", "t:none"]) == [b"1", None]


async def test_put_if_absent_renews_the_lifetime(store: Store) -> None:
    await store.put("t:a", b"1", 0.15)
    await store.put("t:b", b"1", 0.15)
    assert await store.put_if_absent("t:a", b"2", TTL) == b"1"
    await eventually(lambda: _equals(store, ["t:b"], [None]))
    assert await store.mget(["t:a"]) == [b"1"]


async def test_delete(store: Store) -> None:
    await store.put_many({"t:a": b"1", "t:b": b"2"}, TTL)
    await store.delete(["t:a", "t:none"])
    await store.delete([])
    assert await store.mget(["t:a", "t:b"]) == [None, b"2"]


async def test_a_lock_has_one_holder_and_only_the_holder_gives_it_back(store: Store) -> None:
    tokens = [f"token-{number}" for number in range(8)]
    taken = await asyncio.gather(*(store.acquire("t:lock", token, 60_000) for token in tokens))
    assert taken.count(True) == 1
    holder = tokens[taken.index(True)]
    other = tokens[taken.index(False)]
    assert not await store.renew("t:lock", other, 60_000)
    assert not await store.release("t:lock", other)
    assert await store.renew("t:lock", holder, 60_000)
    assert not await store.acquire("t:lock", other, 60_000)
    assert await store.release("t:lock", holder)
    assert not await store.release("t:lock", holder)
    assert await store.acquire("t:lock", other, 60_000)


async def test_a_dead_holders_lock_expires(store: Store) -> None:
    assert await store.acquire("t:lock", "dead", 50)
    await eventually(lambda: store.acquire("t:lock", "next", 60_000))
    assert not await store.release("t:lock", "dead")


async def test_a_live_holder_keeps_its_lock(store: Store) -> None:
    async with Lock(store, "t:lock", ttl_ms=1_000, renew_seconds=0.05) as lock:
        assert lock.held
        await store.put("t:clock", b"1", 2.0)  # twice the lock's lifetime
        await eventually(lambda: _equals(store, ["t:clock"], [None]))
        assert lock.held
        async with Lock(store, "t:lock") as second:
            assert not second.held
    assert not lock.held
    async with Lock(store, "t:lock") as third:
        assert third.held


async def test_a_lost_lock_is_noticed_and_left_to_its_new_holder(store: Store) -> None:
    async with Lock(store, "t:lock", renew_seconds=0.01) as lock:
        await store.put("t:lock", b"someone else", TTL)
        async with asyncio.timeout(5):
            while lock.held:
                await asyncio.sleep(0.005)
    assert await store.mget(["t:lock"]) == [b"someone else"]


async def test_a_lock_is_given_back_when_its_work_fails(store: Store) -> None:
    with pytest.raises(RuntimeError, match="work failed"):
        async with Lock(store, "t:lock"):
            message = "work failed"
            raise RuntimeError(message)
    assert await store.acquire("t:lock", "next", 1000)


async def test_commit_on_nothing_then_on_the_expected_record(store: Store) -> None:
    first, second = entry("a"), entry("b", generation=2, covers=12)
    reply = await store.commit_index(["t:8"], "t:8", "", (), first, TTL)
    assert (reply.committed, reply.best) == (True, first)
    reply = await store.commit_index(["t:8"], "t:12", "", (), second, TTL)
    assert (reply.committed, reply.best) == (False, first)
    assert await store.mget(["t:12"]) == [None]
    reply = await store.commit_index(["t:8"], "t:12", "a", (), second, TTL)
    assert (reply.committed, reply.best) == (True, second)
    assert [decode_index(value) for value in await store.mget(["t:8", "t:12"])] == [(first,), (second,)]


async def test_a_commit_sent_twice_counts_once(store: Store) -> None:
    for _ in range(2):
        assert (await store.commit_index([], "t:8", "", (), entry("a"), TTL)).committed
    assert decode_index((await store.mget(["t:8"]))[0]) == (entry("a"),)


async def test_a_superseded_commit_learns_what_is_in_force(store: Store) -> None:
    await store.commit_index([], "t:8", "", (), entry("a"), TTL)
    await store.commit_index([], "t:8", "a", (), entry("b", generation=2), TTL)
    reply = await store.commit_index([], "t:8", "", (), entry("a"), TTL)
    assert (reply.committed, reply.best) == (False, entry("b", generation=2))


async def test_an_expected_record_that_is_gone_is_a_conflict_with_nothing(store: Store) -> None:
    reply = await store.commit_index(["t:8"], "t:8", "gone", (), entry("a"), TTL)
    assert (reply.committed, reply.best) == (False, None)


async def test_one_entry_never_replaces_another(store: Store) -> None:
    await set_text(store, "t:8", encode_index([entry("going", 3, state="in-flight"), entry("kick", 4, state="ready")]))
    assert (await store.commit_index([], "t:8", "", (), entry("a"), TTL)).committed
    assert {(found.id, found.state) for found in decode_index((await store.mget(["t:8"]))[0])} == {
        ("going", "in-flight"),
        ("kick", "ready"),
        ("a", "active"),
    }


async def test_ignored_records_are_not_compared_against(store: Store) -> None:
    await set_text(store, "t:8", encode_index([entry("passed", 5), entry("below", 2)]))
    reply = await store.commit_index(["t:8"], "t:6", "below", ["passed"], entry("new", 3, 6), TTL)
    assert reply.committed
    reply = await store.commit_index(["t:8"], "t:6", "below", [], entry("newer", 4, 6), TTL)
    assert reply.best == entry("passed", 5)


async def test_the_best_is_by_covers_then_generation_then_id(store: Store) -> None:
    ranked = [entry("a", 1, 9), entry("a2", 7, 8), entry("z", 3, 8), entry("b", 3, 8)]
    await set_text(store, "t:x", encode_index(reversed(ranked)))
    for position, best in enumerate(ranked):
        ignored = [found.id for found in ranked[:position]]
        reply = await store.commit_index(["t:x"], "t:y", "none of them", ignored, entry("new"), TTL)
        assert reply.best == best


async def test_a_set_is_bounded_and_keeps_the_best(store: Store) -> None:
    await set_text(store, "t:8", encode_index([entry("kick", 99, state="ready")]))
    expected = ""
    for generation in range(1, MAX_ENTRIES + 5):
        identity = f"id{generation}"
        reply = await store.commit_index([], "t:8", expected, (), entry(identity, generation), TTL)
        assert reply.committed
        expected = identity
    kept = decode_index((await store.mget(["t:8"]))[0])
    assert [found.generation for found in kept] == list(range(MAX_ENTRIES + 4, 4, -1))


JUNK = [
    b"",
    b"junk",
    b"null",
    b"7",
    b'"text"',
    b'{"1": [1,8,0,"x","active"]}',
    b"[[1,8,0]]",
    b'[null, 3, "x", {}, []]',
    b'[[1,8,0,5,"active"]]',
    b'[[1,8,0,"","active"]]',
    b'[[1,8,0,"x",null]]',
    b'[["1",8,0,"x","active"]]',
    b'[[-1,8,0,"x","active"]]',
    b'[[1,8,1e300,"x","active"]]',
    b'[[true,8,0,"x","active"]]',
    b"\xff\xfe",
    b"[" * 5000,
]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
async def test_junk_in_the_index_reads_as_nothing_and_is_overwritten(store: Store, junk: bytes) -> None:
    await set_text(store, "t:8", junk)
    await set_text(store, "t:6", junk)
    assert (await store.commit_index(["t:6"], "t:8", "", (), entry("a"), TTL)).committed
    assert decode_index((await store.mget(["t:8"]))[0]) == (entry("a"),)


async def test_a_later_version_of_an_entry_still_reads(store: Store) -> None:
    await set_text(store, "t:8", b'[[2,8,3,"later","active",{"more":1}],["junk"]]')
    reply = await store.commit_index([], "t:8", "", (), entry("a"), TTL)
    assert reply.best == IndexEntry(2, 8, 3, "later")
    assert (await store.commit_index([], "t:8", "later", (), entry("a", 3), TTL)).committed
    assert [found.id for found in decode_index((await store.mget(["t:8"]))[0])] == ["a", "later"]


async def test_eight_racing_commits_have_one_winner(store: Store) -> None:
    await store.commit_index([], "t:4", "", (), entry("base", 1, 4), TTL)
    commits = [
        store.commit_index(["t:4", "t:8", "t:9"], f"t:{8 + number % 2}", "base", (), entry(f"id{number}", 2, 8), TTL)
        for number in range(8)
    ]
    replies = await asyncio.gather(*commits)
    winners = [reply.best for reply in replies if reply.committed]
    assert len(winners) == 1
    assert {reply.best for reply in replies} == set(winners)


async def test_both_stores_do_the_same(redis_url: str) -> None:
    """The script and the pure function agree over random commits on random sets."""
    dice = random.Random(7)
    shared, memory = RedisStore(redis_url), MemoryStore()
    keys = [f"t:{number}" for number in range(4)]
    outcomes = set()
    for _ in range(400):
        known = ["", *(f"id{number}" for number in range(12))]
        state = dice.choice(["active", "active", "ready", "in-flight"])
        new = IndexEntry(dice.randrange(4), dice.randrange(1, 5), 0, dice.choice(known[1:]), state)
        arguments = (
            dice.sample(keys, dice.randrange(4)),
            dice.choice(keys),
            dice.choice(known),
            dice.sample(known[1:], dice.randrange(8)),
            new,
            TTL,
        )
        reply = await shared.commit_index(*arguments)
        assert reply == await memory.commit_index(*arguments)
        outcomes.add((reply.committed, reply.best is None))
        assert [decode_index(value) for value in await shared.mget(keys)] == [
            decode_index(value) for value in await memory.mget(keys)
        ]
    await shared.close()
    assert outcomes == {(True, False), (False, False), (False, True)}


async def test_keys_of_another_type_read_as_missing_and_are_overwritten(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        for key in ("t:a", "t:8"):
            client.rpush(key, "x")
    store = RedisStore(redis_url)
    assert await store.mget(["t:a", "t:8"]) == [None, None]
    assert not await store.renew("t:a", "token", 1000)
    assert not await store.release("t:a", "token")
    assert await store.put_if_absent("t:a", b"1", TTL) == b"1"
    assert (await store.commit_index(["t:a"], "t:8", "", (), entry("a"), TTL)).committed
    assert await store.mget(["t:a"]) == [b"1"]
    await store.close()


async def test_scripts_survive_a_flush_of_the_servers_script_cache(redis_url: str) -> None:
    store = RedisStore(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        for generation in range(2):
            client.script_flush()
            assert await store.put_if_absent("t:a", b"1", TTL) == b"1"
            assert (await store.commit_index([], f"t:{generation}", "", (), entry("a"), TTL)).committed
    await store.close()


async def test_an_abandoned_operation_leaves_no_answer_behind_for_the_next(redis_url: str) -> None:
    store = RedisStore(redis_url)
    await store.put_many({f"t:{number}": b"%d" % number for number in range(200)}, TTL)
    for number in range(200):
        abandoned = asyncio.ensure_future(store.mget([f"t:{number}"]))
        for _ in range(number % 12):
            await asyncio.sleep(0)
        abandoned.cancel()
        await asyncio.gather(abandoned, return_exceptions=True)
        other = (number + 1) % 200
        assert await store.mget([f"t:{other}"]) == [b"%d" % other]
    await store.close()


async def test_more_operations_at_once_than_connections(redis_url: str) -> None:
    store = RedisStore(redis_url, operation_seconds=20)
    await store.put("t:a", b"1", TTL)
    answers = await asyncio.gather(*(store.mget(["t:a"]) for _ in range(300)))
    assert answers == [[b"1"]] * 300
    await store.close()


async def test_options_in_the_url_do_not_change_what_is_relied_on(redis_url: str) -> None:
    store = RedisStore(f"{redis_url}?decode_responses=True&socket_timeout=900&protocol=3")
    await store.put("t:a", b"\xff", TTL)
    assert await store.mget(["t:a"]) == [b"\xff"]
    await store.close()


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    store = RedisStore("redis://user:hunter2@127.0.0.1:1/0?socket_timeout=1")
    with pytest.raises(StoreUnavailable, match=r"redis://127.0.0.1:1/0: ConnectionError") as failure:
        await store.ping()
    assert "hunter2" not in str(failure.value) + repr(store) + store.label
    await store.close()


@pytest.mark.skipif("://" in os.environ.get("TEST_REDIS_SERVER", ""), reason="another server is named")
async def test_a_frozen_server_is_unavailable(own_server) -> None:
    store = RedisStore(own_server.url)
    await store.put("t:a", b"1", TTL)
    own_server.freeze()
    with pytest.raises(StoreUnavailable, match="Timeout"):
        await store.mget(["t:a"])
    own_server.thaw()
    assert await store.mget(["t:a"]) == [b"1"]
    await store.close()


async def test_memory_is_bounded_and_forgets_what_was_used_longest_ago() -> None:
    store = MemoryStore(max_bytes=100_000)
    await store.put("t:kept", b"x" * 1000, TTL)
    for number in range(1000):
        await store.put(f"t:{number}", b"x" * 1000, TTL)
        await store.mget(["t:kept"])
        assert store.size <= 100_000
    assert await store.mget(["t:kept", "t:0", "t:999"]) == [b"x" * 1000, None, b"x" * 1000]
    await store.put("t:huge", b"x" * 200_000, TTL)
    assert await store.mget(["t:huge", "t:kept"]) == [None, b"x" * 1000]
    await store.delete([f"t:{number}" for number in range(1000)] + ["t:kept"])
    assert (store.size, len(store)) == (0, 0)


async def test_memory_lifetimes_run_on_the_clock_it_is_given() -> None:
    now = [100.0]
    store = MemoryStore(clock=lambda: now[0])
    await store.put("t:a", b"1", 2)
    now[0] += 1.9
    await store.touch(["t:a"], 2)
    now[0] += 1.9
    assert await store.mget(["t:a"]) == [b"1"]
    now[0] += 0.1
    assert await store.mget(["t:a"]) == [None]
    assert store.size == 0


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pass@host:6379/2?x=y", "redis://host:6379/2"),
        ("rediss://:p%40ss@host/0", "rediss://host/0"),
        ("unix:///run/redis.sock?password=secret", "unix:///run/redis.sock"),
    ],
)
def test_a_url_is_shown_without_its_credentials(url: str, shown: str) -> None:
    assert public_url(url) == shown


async def test_the_setting_names_the_store(tmp_path, redis_url: str) -> None:
    memory = await open_store("memory://", state_dir=tmp_path, ttl_seconds=TTL)
    assert isinstance(memory, MemoryStore)
    shared = await open_store(redis_url, state_dir=tmp_path, ttl_seconds=TTL)
    assert (shared.degraded, shared.label) == (False, public_url(redis_url))
    await shared.close()
    with pytest.raises(ValueError, match="unknown store 'mysql'; one of embedded, memory, redis, rediss, unix"):
        await open_store("mysql://x", state_dir=tmp_path, ttl_seconds=TTL)
