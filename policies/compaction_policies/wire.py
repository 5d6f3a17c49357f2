"""Splitting JSON without rebuilding it: where each value's bytes stand, so that the rest can be re-emitted untouched.

msgspec splits. Where it refuses what providers and stdlib ``json`` accept (a lone surrogate, ``1e400``), the stdlib
scanner does. What neither reads, invalid UTF-8, and a key twice in one object are :class:`Unreadable`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.decoder import JSONDecoder
from json.scanner import make_scanner
from typing import Any, TypeAlias

import msgspec

Span: TypeAlias = tuple[int, int]

_SPACE = re.compile(rb"[ \t\n\r]*")
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_TEXT_SPACE = re.compile(r"[ \t\n\r]*")
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])
_arrays = msgspec.json.Decoder(list[msgspec.Raw])
_values = msgspec.json.Decoder()
_scan_once: Callable[[str, int], tuple[Any, int]] = make_scanner(JSONDecoder())  # type: ignore[arg-type]


class Unreadable(ValueError):
    """The bytes are not what the dialect knows: forwarded as they are. ``str()`` never holds message text."""


def check_encoding(data: bytes) -> None:
    """Raise :class:`Unreadable` unless the bytes are UTF-8."""
    if data.isascii():
        return
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"not UTF-8 at byte {error.start}"
        raise Unreadable(message) from None


def object_spans(data: bytes) -> dict[str, Span]:
    """Key -> ``(start, end)`` of its value. Raises :class:`Unreadable` for anything but one object with unique keys."""
    try:
        fields = _objects.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return _slow_object_spans(data)
    spans: dict[str, Span] = {}
    at = _skip(data, 0) + 1
    for _ in range(len(fields)):
        match = _KEY.match(data, _skip(data, at))
        if match is None:
            message = "a key appears twice in one object"
            raise Unreadable(message)
        key = match[1].decode("utf-8", "surrogatepass") if b"\\" not in match[1] else _text(match[0])
        start = _skip(data, _skip(data, match.end()) + 1)
        value = bytes(fields[key])
        if key in spans or not data.startswith(value, start):
            message = "a key appears twice in one object"
            raise Unreadable(message)
        spans[key] = (start, start + len(value))
        at = _skip(data, start + len(value)) + 1
    if fields and data[at - 1 : at] != b"}":
        message = "a key appears twice in one object"
        raise Unreadable(message)
    return spans


def array_spans(data: bytes) -> list[Span]:
    """``(start, end)`` of each element's bytes. Raises :class:`Unreadable` for anything but one array."""
    try:
        elements = _arrays.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return _slow_array_spans(data)
    spans: list[Span] = []
    at = _skip(data, 0) + 1
    for element in elements:
        start = _skip(data, at)
        end = start + len(memoryview(element))
        spans.append((start, end))
        at = _skip(data, end) + 1
    return spans


def value_of(data: bytes) -> Any:
    """The decoded value. Lone surrogates and overflowing numbers are read as stdlib ``json`` reads them."""
    try:
        return _values.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        message = "not JSON"
        raise Unreadable(message) from None


def _skip(data: bytes, at: int) -> int:
    match = _SPACE.match(data, at)
    return match.end() if match else at


def _text(quoted: bytes) -> str:
    value = value_of(quoted)
    return value if isinstance(value, str) else ""


class _Scan:
    """One pass of the stdlib scanner over a text, which reports offsets in bytes."""

    def __init__(self, data: bytes, opening: str) -> None:
        try:
            self.text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            message = f"not UTF-8 at byte {error.start}"
            raise Unreadable(message) from None
        self.at = 0
        self._seen_char = 0
        self._seen_byte = 0
        self.skip()
        if not self.take(opening):
            message = f"no {opening!r} where the dialect wants one"
            raise Unreadable(message)

    def skip(self) -> None:
        match = _TEXT_SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, char: str) -> bool:
        self.skip()
        if self.text.startswith(char, self.at):
            self.at += 1
            return True
        return False

    def value(self) -> tuple[Any, Span]:
        self.skip()
        start = self.at
        try:
            value, self.at = _scan_once(self.text, start)
        except (StopIteration, ValueError, RecursionError):
            message = "not JSON"
            raise Unreadable(message) from None
        return value, (self._byte(start), self._byte(self.at))

    def close(self, closing: str) -> bool:
        """True at the closing bracket, which must end the text; false behind a comma."""
        if self.take(","):
            return False
        if not self.take(closing):
            message = "not JSON"
            raise Unreadable(message)
        self.skip()
        if self.at != len(self.text):
            message = "not JSON"
            raise Unreadable(message)
        return True

    def _byte(self, char: int) -> int:
        self._seen_byte += len(self.text[self._seen_char : char].encode("utf-8"))
        self._seen_char = char
        return self._seen_byte


def _slow_object_spans(data: bytes) -> dict[str, Span]:
    scan = _Scan(data, "{")
    spans: dict[str, Span] = {}
    if scan.take("}"):
        return spans
    while True:
        key, _ = scan.value()
        if not isinstance(key, str) or key in spans or not scan.take(":"):
            message = "not an object with unique keys"
            raise Unreadable(message)
        _, spans[key] = scan.value()
        if scan.close("}"):
            return spans


def _slow_array_spans(data: bytes) -> list[Span]:
    scan = _Scan(data, "[")
    spans: list[Span] = []
    if scan.take("]"):
        return spans
    while True:
        spans.append(scan.value()[1])
        if scan.close("]"):
            return spans
