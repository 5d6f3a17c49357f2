"""What is publicly known about a model's size: read as a file from litellm's wheel, which is never imported.

Importing litellm costs 2.4 s and 130 MB; its price map is one JSON file of 3.5 MB.
An unknown model is ``None``, never a guess.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

FILE_NAME = "model_prices_and_context_window_backup.json"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of one model in tokens."""

    context_window: int | None
    max_output: int | None


class _Entry(msgspec.Struct):
    max_input_tokens: int | float | str | None = None
    max_output_tokens: int | float | str | None = None
    max_tokens: int | float | str | None = None


def catalogue_file() -> Path | None:
    """The file inside the installed litellm; ``None`` without the package."""
    spec = importlib.util.find_spec("litellm")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((Path(folder) / FILE_NAME for folder in folders), None)


def parse(data: bytes) -> dict[str, ModelSize]:
    """Model name -> sizes, of the models whose sizes are given.

    ``max_tokens`` is litellm's legacy key: the output limit where one is given, else the input limit.

    Raises:
        msgspec.DecodeError: not the file's shape.
    """
    sizes: dict[str, ModelSize] = {}
    for name, entry in msgspec.json.decode(data, type=dict[str, _Entry]).items():
        output = _tokens(entry.max_output_tokens)
        window = _tokens(entry.max_input_tokens) or (None if output else _tokens(entry.max_tokens))
        if window or output:
            sizes[name] = ModelSize(window, output)
    return sizes


def _tokens(value: float | str | None) -> int | None:
    return int(value) if isinstance(value, (int, float)) and value > 0 else None


_DATE = re.compile(r"[-@](?:\d{4}-\d{2}-\d{2}|\d{8}|\d{4})$")


def names(model: str) -> Iterator[str]:
    """The names to try, nearest first: as given, without provider prefixes, then the same without a date at the end."""
    bare = model
    forms = [model]
    while "/" in bare:
        bare = bare.partition("/")[2]
        forms.append(bare)
    yield from forms
    for form in forms:
        undated = _DATE.sub("", form)
        if undated != form:
            yield undated


@dataclass(slots=True)
class Catalogue:
    """Sizes by model name; empty until loaded.

    Args:
        path: the file; ``None`` where there is none.
    """

    path: Path | None = field(default_factory=catalogue_file)
    _sizes: Mapping[str, ModelSize] = field(default_factory=dict)

    async def load(self) -> None:
        """Reads the file in a thread. Where that fails the catalogue stays empty and one warning says so."""
        await asyncio.to_thread(self.load_now)

    def load_now(self) -> None:
        """As :meth:`load`, where nothing else waits."""
        self._sizes = self._read()

    def _read(self) -> Mapping[str, ModelSize]:
        try:
            if self.path is None:
                log.warning("litellm is not installed: context windows come from the configuration alone")
                return {}
            return parse(self.path.read_bytes())
        except (OSError, msgspec.MsgspecError) as error:
            problem = type(error).__name__
            log.warning("%s: %s: context windows come from the configuration alone", self.path, problem)
            return {}

    def context_window(self, model: str) -> int | None:
        """The model's input limit in tokens, where known."""
        return next((size.context_window for size in self._found(model) if size.context_window), None)

    def max_output(self, model: str) -> int | None:
        """The model's output limit in tokens, where known."""
        return next((size.max_output for size in self._found(model) if size.max_output), None)

    def _found(self, model: str) -> Iterator[ModelSize]:
        for name in names(model):
            size = self._sizes.get(name)
            if size is not None:
                yield size
