"""Replicas on one Redis: one that dies, a store that freezes while a summary is written, and what stands in the store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
import redis
from test_e2e_compaction import CLEAR, SUMMARIZE, body

from support.bench import assistant, loop, turns, user
from support.proxy import config, running_proxy, served, until
from support.upstream import Reply, ScriptedUpstream, answer
from support.valkey import ValkeyServer

LONG = [*turns(0, 60, 40), user(500)]


def held(release: asyncio.Event, text: str) -> Reply:
    """A summary that comes when told."""
    reply = answer(f"## State\n{text}")
    reply.chunks = [release, *(reply.chunks or ())]
    return reply


async def test_a_replica_that_is_killed_in_mid_summary_leaves_the_work_to_the_next(
    redis_url: str, tmp_path: Path
) -> None:
    upstream = ScriptedUpstream()
    upstream.summary = lambda request: (
        held(asyncio.Event(), "NEVER") if len(upstream.summaries) == 1 else answer("## State\nDONE")
    )
    async with upstream.running():
        text = config(upstream, policy=SUMMARIZE, store=redis_url)
        async with (
            running_proxy(text) as alive,
            served(tmp_path, text) as (address, process),
            aiohttp.ClientSession() as http,
        ):
            lost = asyncio.ensure_future(http.post(f"{address}/v1/chat/completions", json=body(LONG)))
            await until(lambda: len(upstream.summaries) == 1, 20)
            process.kill()
            with pytest.raises(aiohttp.ClientError):
                await lost
            with redis.Redis.from_url(redis_url) as client:
                locks = list(client.scan_iter("cp:*:lock:*"))
                assert len(locks) == 1
                assert 0 < client.pttl(locks[0]) <= 60_000
                waiting = asyncio.ensure_future(alive.post(body(LONG)))
                await until(lambda: len(alive.proxy.services().jobs) == 1)
                assert len(upstream.summaries) == 1, "the dead one's lock stands"
                client.pexpire(locks[0], 1)  # its minute is over
            got = await waiting
    assert got.said == "compacted; reason=over-threshold"
    assert len(upstream.summaries) == 2
    assert b"DONE" in upstream.requests[-1].body


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_redis_goes_away_while_a_summary_is_written(how: str, own_server: ValkeyServer) -> None:
    release = asyncio.Event()
    upstream = ScriptedUpstream(summary=lambda request: held(release, "WRITTEN-MEANWHILE"))
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=SUMMARIZE, store=own_server.url)) as proxy,
    ):
        asking = asyncio.ensure_future(proxy.post(body(LONG)))
        await until(lambda: len(upstream.summaries) == 1)
        own_server.kill() if how == "killed" else own_server.freeze()
        release.set()
        got = await asking
        assert got.said == "compacted; reason=over-threshold", "what was paid for is used"
        assert b"WRITTEN-MEANWHILE" in upstream.requests[-1].body
        chat = [*LONG, assistant(600, 5), user(601, 5)]
        assert (await proxy.post(body(chat))).said == "sticky; reason=sticky"
        own_server.start() if how == "killed" else own_server.thaw()
        await until(lambda: not proxy.proxy.services().records.store.degraded, 40)
        assert (await proxy.post(body(chat))).said == "sticky; reason=sticky"
        await until(lambda: len(proxy.proxy.services().jobs) == 0)
        async with running_proxy(config(upstream, policy=SUMMARIZE, store=own_server.url)) as fresh:
            again = await fresh.post(body(chat))
            assert again.headers["x-compaction-id"] == got.headers["x-compaction-id"], (
                "offered to the store that is back"
            )
    assert len(upstream.summaries) == 1


async def test_no_credential_session_or_text_stands_in_a_key_and_no_credential_in_a_value(redis_url: str) -> None:
    upstream = ScriptedUpstream()
    session = {"x-session-id": "SESSION-of-somebody", "authorization": "Bearer sk-SECRET-KEY", "x-team": "TEAM-NAME"}
    async with upstream.running():
        for tenant in ("credential", "header:x-team"):
            for policy, chat in ((SUMMARIZE, LONG), (CLEAR, [user(0), *loop(1, 20, 150)])):
                text = config(upstream, policy=policy, store=redis_url, tenant=tenant)
                async with running_proxy(text) as proxy:
                    assert (await proxy.post(body(chat), session)).said.startswith("compacted")
                    await until(lambda proxy=proxy: len(proxy.proxy.services().jobs) == 0)
    with redis.Redis.from_url(redis_url, decode_responses=False) as client:
        keys = list(client.scan_iter("*"))
        values = [client.get(key) or b"" for key in keys]
    assert len(keys) > 10
    for secret in (b"sk-SECRET-KEY", b"SESSION-of-somebody", b"TEAM-NAME", b"lorem", b"SUMMARY-OF-THE-OLD-PART"):
        assert not any(secret in key for key in keys)
    for secret in (b"SECRET-KEY", b"SESSION-of-somebody", b"TEAM-NAME"):
        assert not any(secret in value for value in values)
    assert any(b"SUMMARY-OF-THE-OLD-PART" in value for value in values)


async def test_eight_at_once_on_two_replicas_and_a_third_that_starts_later_send_the_same_bytes(redis_url: str) -> None:
    release = asyncio.Event()
    upstream = ScriptedUpstream(summary=lambda request: held(release, "SHARED"))
    async with upstream.running():
        text = config(upstream, policy=SUMMARIZE, store=redis_url)
        async with running_proxy(text) as one, running_proxy(text) as two:
            asking = [asyncio.ensure_future(proxy.post(body(LONG, stream=True))) for proxy in (one, two) * 4]
            await until(lambda: len(upstream.summaries) == 1)
            release.set()
            assert {(await task).status for task in asking} == {200}
        async with running_proxy(text) as three:
            assert (await three.post(body(LONG, stream=True))).said == "sticky; reason=sticky"
    assert len(upstream.summaries) == 1
    assert len({request.body for request in upstream.requests}) == 1


@pytest.mark.parametrize("how", ["junk", "gone"])
async def test_a_record_that_is_gone_or_no_record_is_a_miss_and_made_anew(redis_url: str, how: str) -> None:
    upstream = ScriptedUpstream()
    async with upstream.running():
        text = config(upstream, policy=SUMMARIZE, store=redis_url)
        async with running_proxy(text) as proxy:
            first = await proxy.post(body(LONG))
        with redis.Redis.from_url(redis_url) as client:
            for key in client.scan_iter("cp:*:r:*"):
                client.delete(key) if how == "gone" else client.set(key, b'{"v":0,"junk":true}', keepttl=True)
        async with running_proxy(text) as proxy:
            again = await proxy.post(body(LONG))
            assert (again.status, again.said) == (200, "compacted; reason=over-threshold")
            assert again.headers["x-compaction-id"] == first.headers["x-compaction-id"], "to the same cut"
        async with running_proxy(text) as proxy:
            assert (await proxy.post(body(LONG))).said == "sticky; reason=sticky"
    assert len(upstream.summaries) == 2
