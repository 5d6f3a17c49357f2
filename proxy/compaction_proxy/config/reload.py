"""Re-reading the configuration while it is in use: by content, so that a swapped symlink counts and a touched file does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from compaction_proxy.config.load import digest, expand_glob, load_settings, with_address
from compaction_proxy.config.report import ConfigError, Mark, Problem, Sources
from compaction_proxy.config.settings import Settings, open_relay

POLL_SECONDS = 2.0
FROZEN = ("server", "store", "telemetry")
"""Sections that are read once, at start."""


@dataclass(frozen=True, slots=True)
class Reload:
    """What came of a re-reading.

    Args:
        settings: what is in force from now on; the former settings where there are problems.
        problems: why the new configuration is not used; empty = it is.
        restart: sections that changed and need a restart; the former ones stay in force.
    """

    settings: Settings
    problems: tuple[Problem, ...] = ()
    restart: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """The report, a line each."""
        if self.problems:
            return (*map(str, self.problems), "the configuration is not changed: the one before stays in force")
        sections = ", ".join(self.restart)
        need = (f"changes in {sections} need a restart; until then the former ones stay in force",) if sections else ()
        return ("the configuration was read again", *self.settings.warnings, *need)


class Watcher:
    """Keeps settings up to date with their files.

    Args:
        path: the configuration file; ``None`` = built-in: nothing is watched.
        env: where ``${VAR}`` is looked up.
        settings: what is in force, as loaded from ``path``; a change since then is noticed.
        report: called with every :class:`Reload`, on the thread of the watcher or of the caller of :meth:`reload`.
        interval_seconds: between two looks at the files.
    """

    def __init__(
        self,
        path: Path | None,
        env: Mapping[str, str],
        settings: Settings,
        report: Callable[[Reload], None],
        interval_seconds: float = POLL_SECONDS,
    ) -> None:
        self._path = path
        self._env = env
        self._report = report
        self._interval = interval_seconds
        self._settings = settings
        self._sources = settings.sources
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._settings

    def start(self) -> None:
        """Look at the files from now on, on a thread of its own."""
        if self._path is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="config-watcher", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; returns when it has ended."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def reload(self) -> Reload:
        """Read the files now, changed or not."""
        with self._lock:
            return self._reload()

    def poll(self) -> Reload | None:
        """Read the files if the content of any, or which there are, has changed since they were last read."""
        with self._lock:
            return self._reload() if _changed(self._sources) else None

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.poll()

    def _reload(self) -> Reload:
        before = self._settings
        try:
            loaded = with_address(load_settings(self._path, self._env), *before.address)
        except ConfigError as error:
            self._sources = error.sources
            result = Reload(before, error.problems)
        else:
            self._sources = loaded.sources
            result = _in_force(before, loaded)
            self._settings = result.settings
        self._report(result)
        return result


def _in_force(before: Settings, loaded: Settings) -> Reload:
    """The new settings with the former sections that only a restart changes."""
    restart = tuple(name for name in FROZEN if getattr(loaded, name) != getattr(before, name))
    if why := open_relay(before.server, loaded.providers):
        message = f"needs a restart: under the server section in force {why}"
        return Reload(before, (Problem(Mark(str(next(iter(loaded.files), "built-in"))), "providers", message),))
    kept = replace(loaded, server=before.server, store=before.store, telemetry=before.telemetry)
    return Reload(kept, (), restart)


def _changed(sources: Sources) -> bool:
    """True if what would be read now differs from what was."""
    named = {file for pattern in sources.patterns for file in expand_glob(sources.folder, pattern)}
    return not named <= set(sources.digests) or any(_digest(file) != was for file, was in sources.digests.items())


def _digest(file: Path) -> str:
    try:
        return digest(file.read_bytes())
    except OSError:
        return ""
