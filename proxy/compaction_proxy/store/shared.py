"""The store on a Redis server (7.0 or later, or Valkey): the only module that talks to one.

Short time-outs, no retries, no state of its own: whether the server is worth asking is decided in
:mod:`compaction_proxy.store.failover`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from redis import asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from compaction_proxy.store.base import StoreUnavailable
from compaction_proxy.store.index import MAX_ENTRIES, MAX_NUMBER, CommitReply, IndexEntry, decode_entry, encode_entry

OPERATION_SECONDS = 0.5
"""The longest that one operation takes, connecting and waiting for a connection included."""

MAX_CONNECTIONS = 50

T = TypeVar("T")


class Script:
    """A Lua script, sent by its hash and in full only where the server does not know it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


PUT_IF_ABSENT = Script("""
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'string' then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return held
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
""")

RENEW = Script("""
if redis.pcall('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 0
""")

RELEASE = Script("""
if redis.pcall('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
""")

# KEYS: the sets to read, the set to write last. ARGV: expected id, entry, lifetime in ms, ids to ignore...
COMMIT_INDEX = Script(f"""
local function number(value)
  return type(value) == 'number' and value >= 0 and value < {MAX_NUMBER} and value % 1 == 0
end
local function entries(text)
  local found = {{}}
  if type(text) ~= 'string' then return found end
  local ok, rows = pcall(cjson.decode, text)
  if not ok or type(rows) ~= 'table' then return found end
  for _, row in ipairs(rows) do
    if type(row) == 'table' and number(row[1]) and number(row[2]) and number(row[3])
       and type(row[4]) == 'string' and row[4] ~= '' and type(row[5]) == 'string' then
      found[#found + 1] = {{row[1], row[2], row[3], row[4], row[5]}}
    end
  end
  return found
end
local function better(a, b)
  if a[2] ~= b[2] then return a[2] > b[2] end
  if a[1] ~= b[1] then return a[1] > b[1] end
  return a[4] > b[4]
end

local expected, entry, ttl = ARGV[1], cjson.decode(ARGV[2]), ARGV[3]
local ignored = {{}}
for i = 4, #ARGV do ignored[ARGV[i]] = true end
local best = nil
local values = redis.call('MGET', unpack(KEYS))
for i = 1, #KEYS do
  for _, row in ipairs(entries(values[i])) do
    if row[5] == 'active' and not ignored[row[4]] and (best == nil or better(row, best)) then best = row end
  end
end
local id = best and best[4] or ''
if id ~= expected and id ~= entry[4] then
  return {{0, best and cjson.encode(best) or ''}}
end

local kept = {{entry}}
for _, row in ipairs(entries(values[#KEYS])) do
  if row[4] ~= entry[4] then kept[#kept + 1] = row end
end
table.sort(kept, function(a, b)
  local first, second = a[5] == 'active', b[5] == 'active'
  if first ~= second then return first end
  return better(a, b)
end)
for i = #kept, {MAX_ENTRIES + 1}, -1 do kept[i] = nil end
redis.call('SET', KEYS[#KEYS], cjson.encode(kept), 'PX', ttl)
return {{1, ''}}
""")


class RedisStore:
    """``redis://``, ``rediss://`` and ``unix://``. See :class:`compaction_proxy.store.base.Store`.

    Every operation raises :exc:`StoreUnavailable` after :data:`OPERATION_SECONDS`, or at once where the server refuses.

    Args:
        url: as redis-py reads it; a user, a password and TLS options may stand in it.
        label: where the data is kept, for people; default: the URL without its credentials and options.
        operation_seconds: the deadline of one operation.
    """

    degraded = False

    def __init__(self, url: str, label: str = "", operation_seconds: float = OPERATION_SECONDS) -> None:
        self.label = label or public_url(url)
        self._seconds = operation_seconds
        pool = redis.BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=operation_seconds)
        # After the URL's own options, so that none of these can be overruled there.
        pool.connection_kwargs.update(
            decode_responses=False,
            socket_connect_timeout=operation_seconds,
            socket_timeout=operation_seconds,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._redis = redis.Redis.from_pool(pool)

    def __repr__(self) -> str:
        return f"RedisStore({self.label})"

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        return cast("list[bytes | None]", await self._bounded(self._redis.mget(keys)))

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        await self._bounded(self._redis.set(key, value, px=_ms(ttl)))

    async def put_many(self, values: Mapping[str, bytes], ttl: float) -> None:
        if values:
            pipeline = self._redis.pipeline(transaction=False)
            for key, value in values.items():
                pipeline.set(key, value, px=_ms(ttl))
            await self._bounded(pipeline.execute())

    async def put_if_absent(self, key: str, value: bytes, ttl: float) -> bytes:
        return cast(bytes, await self._run(PUT_IF_ABSENT, [key], value, _ms(ttl)))

    async def touch(self, keys: Sequence[str], ttl: float) -> None:
        if keys:
            pipeline = self._redis.pipeline(transaction=False)
            for key in keys:
                pipeline.pexpire(key, _ms(ttl))
            await self._bounded(pipeline.execute())

    async def delete(self, keys: Sequence[str]) -> None:
        if keys:
            await self._bounded(self._redis.unlink(*keys))

    async def acquire(self, key: str, token: str, ttl_ms: int) -> bool:
        return bool(await self._bounded(self._redis.set(key, token, nx=True, px=ttl_ms)))

    async def renew(self, key: str, token: str, ttl_ms: int) -> bool:
        return bool(await self._run(RENEW, [key], token, ttl_ms))

    async def release(self, key: str, token: str) -> bool:
        return bool(await self._run(RELEASE, [key], token))

    async def commit_index(
        self,
        read_keys: Sequence[str],
        write_key: str,
        expected_id: str,
        ignore_ids: Collection[str],
        entry: IndexEntry,
        ttl: float,
    ) -> CommitReply:
        keys = [*dict.fromkeys(key for key in read_keys if key != write_key), write_key]
        reply = await self._run(COMMIT_INDEX, keys, expected_id, encode_entry(entry), _ms(ttl), *ignore_ids)
        committed, best = cast("tuple[int, bytes]", reply)
        return CommitReply(True, entry) if committed else CommitReply(False, decode_entry(best))

    async def ping(self) -> None:
        await self._bounded(self._redis.ping())

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def _run(self, script: Script, keys: Sequence[str], *values: object) -> object:
        return await self._bounded(self._script(script, keys, *values))

    async def _script(self, script: Script, keys: Sequence[str], *values: Any) -> object:
        try:
            return await cast("Awaitable[object]", self._redis.evalsha(script.sha, len(keys), *keys, *values))
        except NoScriptError:
            return await cast("Awaitable[object]", self._redis.eval(script.text, len(keys), *keys, *values))

    async def _bounded(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._seconds):
                return await work
        except (RedisError, OSError, TimeoutError) as error:
            message = f"{self.label}: {type(error).__name__}"
            raise StoreUnavailable(message) from error


def public_url(url: str) -> str:
    """A store URL without its user, password and options."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def _ms(ttl: float) -> int:
    return max(1, round(ttl * 1000))
