"""Fixtures that more than one area needs: a real Redis server, and the check that no key in it lives for ever.

``TEST_REDIS_SERVER`` may name another server: a URL of one that runs, or the path of a server program.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support.valkey import ValkeyServer


def _server_program() -> str | None:
    named = os.environ.get("TEST_REDIS_SERVER", "")
    return named if named and "://" not in named else None


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name; pytest's own may be too long."""
    folder = Path(tempfile.mkdtemp(prefix="cp-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """The URL of a real server, one for the whole session."""
    named = os.environ.get("TEST_REDIS_SERVER", "")
    if "://" in named:
        yield named
        return
    folder = Path(tempfile.mkdtemp(prefix="cp-"))
    server = ValkeyServer(folder, _server_program())
    server.start()
    yield server.url
    server.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def redis_url(redis_server: str) -> Iterator[str]:
    """The URL of a server without keys of ours; afterwards every key must have had a lifetime."""
    with redis.Redis.from_url(redis_server) as client:
        _clean(client)
        yield redis_server
        immortal = [key for key in client.scan_iter("*") if client.ttl(key) == -1 and not key.startswith(b"junk:")]
        _clean(client)
    assert immortal == [], "keys without a lifetime"


@pytest.fixture
def own_server(short_path: Path) -> Iterator[ValkeyServer]:
    """A server that the test may kill and freeze."""
    server = ValkeyServer(short_path, _server_program())
    server.start()
    yield server
    server.kill()


def _clean(client: redis.Redis) -> None:
    for pattern in ("cp:*", "t:*", "junk:*"):
        for key in client.scan_iter(pattern):
            client.delete(key)
