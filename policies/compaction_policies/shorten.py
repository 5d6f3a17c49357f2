"""Shorter forms of a text: head and tail, and tool call arguments without their long strings. Pure and deterministic.

Cuts fall between code points and never inside a character as a reader sees it (combining marks, joined emoji, flags).
"""

from __future__ import annotations

import json
import re
import unicodedata

LEFT_OUT = "\n[... middle left out ...]\n"
"""The note between head and tail."""
CLEARED = " [... rest cleared]"
"""The note at the end of a shortened string value."""
LONG_VALUE_CHARS = 200
KEPT_VALUE_CHARS = 80

_LOOKAROUND = 64
"""How far a cut moves for the sake of a whole character."""
_ZWJ = "\u200d"
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_COLON = re.compile(r"[ \t\n\r]*:")


def head_tail(text: str, limit_chars: int, note: str = LEFT_OUT) -> str:
    """The first 70 % and the last 30 % with ``note`` between; at most ``limit_chars`` characters, or the note alone.

    A text within the limit is returned as it is, so shortening twice changes nothing more.
    """
    if len(text) <= limit_chars:
        return text
    room = limit_chars - len(note)
    if room <= 0:
        return note
    head = room * 7 // 10
    return text[: _back(text, head)] + note + text[_forth(text, len(text) - (room - head)) :]


def head_only(text: str, limit_chars: int, note: str = "") -> str:
    """The beginning and ``note``, where the text is longer than ``limit_chars``."""
    if len(text) <= limit_chars:
        return text
    return text[: _back(text, max(0, limit_chars - len(note)))] + note


def shorten_strings(
    arguments: str, longer_than: int = LONG_VALUE_CHARS, keep: int = KEPT_VALUE_CHARS, note: str = CLEARED
) -> str | None:
    """JSON arguments with every long string value cut to its first characters and a note.

    Keys, short values, numbers and spacing stay as written: only the text of long string values is exchanged, at any depth.

    Returns:
        The shorter text, which still parses; ``None`` where the arguments are not a JSON object or array, or nothing is gained.
    """
    try:
        parsed = json.loads(arguments, parse_int=str)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict | list):
        return None
    pieces: list[str] = []
    done = 0
    for token in _STRING.finditer(arguments):
        if len(token[0]) <= longer_than or _COLON.match(arguments, token.end()):
            continue
        value = json.loads(token[0])
        if len(value) <= longer_than:
            continue
        shorter = _quoted(value[: _back(value, keep)] + note, ascii_only=token[0].isascii())
        if len(shorter) < len(token[0]):
            pieces += (arguments[done : token.start()], shorter)
            done = token.end()
    return "".join((*pieces, arguments[done:])) if pieces else None


def _quoted(value: str, *, ascii_only: bool) -> str:
    lone = any("\ud800" <= char <= "\udfff" for char in value)
    return json.dumps(value, ensure_ascii=ascii_only or lone)


def _back(text: str, at: int) -> int:
    """The nearest place at or before ``at`` that splits no character."""
    return next(
        (place for place in range(at, max(0, at - _LOOKAROUND), -1) if _splits_nothing(text, place)), _pair(text, at)
    )


def _forth(text: str, at: int) -> int:
    """The nearest place at or behind ``at`` that splits no character."""
    end = min(len(text), at + _LOOKAROUND)
    return next((place for place in range(at, end) if _splits_nothing(text, place)), _pair(text, at))


def _pair(text: str, at: int) -> int:
    """``at``, moved out of a surrogate pair."""
    return at - 1 if _inside_pair(text, at) else at


def _inside_pair(text: str, at: int) -> bool:
    """Two surrogates that stand as two characters of a Python string still belong together."""
    return 0 < at < len(text) and "\ud800" <= text[at - 1] <= "\udbff" and "\udc00" <= text[at] <= "\udfff"


def _splits_nothing(text: str, at: int) -> bool:
    """True where a new character begins: the parts of Unicode's rule for grapheme clusters that matter for whole words."""
    if at <= 0 or at >= len(text):
        return True
    before, after = text[at - 1], text[at]
    if before.isascii() and after.isascii():
        return not (before == "\r" and after == "\n")
    if before == _ZWJ or _continues(after) or _inside_pair(text, at):
        return False
    return not (_is_flag(after) and _flags_before(text, at) % 2)


def _continues(char: str) -> bool:
    """A combining mark, a joiner, a variation selector, a skin tone, a tag, or the second half of a Hangul syllable."""
    return (
        char == _ZWJ
        or unicodedata.category(char).startswith("M")
        or "\U0001f3fb" <= char <= "\U0001f3ff"
        or "\U000e0020" <= char <= "\U000e007f"
        or "\u1160" <= char <= "\u11ff"
    )


def _is_flag(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def _flags_before(text: str, at: int) -> int:
    """How many regional indicators stand directly before ``at``; two make one flag."""
    start = at
    while start > 0 and _is_flag(text[start - 1]):
        start -= 1
    return at - start
