"""Problems of a configuration as values: where, at which key, what is wrong, what may have been meant. No reading here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a file; ``line`` and ``column`` count from 1, ``line`` 0 = the file as a whole."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem; as text ``file:line:col: path: message`` (``path`` left out where there is none)."""

    mark: Mark
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.mark}: {self.path}: {self.message}" if self.path else f"{self.mark}: {self.message}"


@dataclass(frozen=True, slots=True)
class Sources:
    """What a configuration was read from.

    Args:
        digests: of each file's content as it was read; ``""`` = it could not be read.
        patterns: those of ``policyFiles``, relative to ``folder``.
    """

    digests: Mapping[Path, str] = field(default_factory=dict)
    folder: Path = Path()
    patterns: tuple[str, ...] = ()


class ConfigError(Exception):
    """A configuration that cannot be used, with all its problems at once.

    Args:
        problems: in the order of files and lines.
        sources: what was read.
    """

    def __init__(self, problems: Iterable[Problem], sources: Sources | None = None) -> None:
        self.problems = ordered(problems)
        self.sources = sources or Sources()
        super().__init__("\n".join(map(str, self.problems)))


def ordered(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Without repetitions, files in the order of their first problem, then by line and column."""
    unique = dict.fromkeys(problems)
    files: dict[str, int] = {}
    for problem in unique:
        files.setdefault(problem.mark.file, len(files))
    return tuple(sorted(unique, key=lambda p: (files[p.mark.file], p.mark.line, p.mark.column)))


def join(path: str, key: str | int) -> str:
    """``models`` and ``0`` -> ``models[0]``; ``models[0]`` and ``match`` -> ``models[0].match``."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant; spelling of case, ``_`` and ``-`` does not count."""
    words = list(known)
    squeezed = {_squeeze(candidate): candidate for candidate in words}
    found = difflib.get_close_matches(_squeeze(word), squeezed, n=1, cutoff=0.75)
    return squeezed[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` or, where nothing is close, ``; known: a, b``."""
    words = list(known)
    meant = closest(word, words)
    if meant:
        return f"; did you mean '{meant}'?"
    return f"; known: {', '.join(words)}" if words else ""


def _squeeze(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")
