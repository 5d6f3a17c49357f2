"""The marks that fence foreign text, and how text that imitates them is made harmless. Nothing else may build a mark.

Marks are for the reader, a model. No code ever looks for one to decide anything: what looks like a mark in a message is text.
"""

from __future__ import annotations

import re

OPEN_DERIVED = '<<<untrusted_content trust="derived">>>'
"""Opens text that was made from tool results."""
OPEN_TRANSCRIPT = '<<<untrusted_content trust="transcript">>>'
"""Opens a transcript that a summarizer reads."""
CLOSE = "<<<end_untrusted_content>>>"
RECORD_OPEN = "[record of the earlier conversation]"
RECORD_CLOSE = "[end of the record]"
NEUTRAL = "[mark removed]"
"""Stands where text imitated a mark."""

_INVISIBLE = r"[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]*"
_GAP = r"[\s_\-\u00ad\u200b-\u200f\u2060-\u2064\ufeff]*"
_LEFT = r"[<\u2039\u27e8\u3008\uff1c]"
_RIGHT = r"[>\u203a\u27e9\u3009\uff1e]"


def _spelled(words: str) -> str:
    """A pattern for words, blind to case, spacing and invisible characters."""
    return _GAP.join(_INVISIBLE.join(re.escape(letter) for letter in word) for word in words.split())


_ROLES = "|".join(_spelled(word) for word in ("user", "assistant", "system", "tool result", "other"))
_IMITATION = re.compile(
    rf"{_LEFT}{{2,}}{_GAP}/?{_GAP}(?:{_spelled('end')}{_GAP})?{_spelled('untrusted content')}[^<>\n]{{0,80}}(?:{_RIGHT}{{1,}})?"
    rf"|{_LEFT}{{3,}}{_GAP}(?:{_ROLES})\b[^<>\n]{{0,100}}{_RIGHT}{{2,}}"
    rf"|\[{_GAP}(?:{_spelled('record of the earlier conversation')}|{_spelled('end of the record')}){_GAP}\]",
    re.IGNORECASE,
)


def neutralise(text: str) -> str:
    """The text with every imitation of a mark replaced, visibly; applying it twice changes nothing more."""
    return _IMITATION.sub(NEUTRAL, text)


def label(role: str, detail: str = "") -> str:
    """The line that opens one message of a transcript. ``detail`` must be safe already (a tool name: :func:`safe_name`)."""
    return f"<<<{role} {detail}>>>" if detail else f"<<<{role}>>>"


def safe_name(name: str) -> str:
    """A tool name fit for fixed text: only word characters and ``. - : /``, at most 64, never empty."""
    return re.sub(r"[^\w.\-:/]+", "_", name)[:64] or "unknown"


_MEDIA = {"image": "[image]", "audio": "[audio]", "video": "[video]", "file": "[file]"}


def media_note(kind: str) -> str:
    """What stands for a media part in text: its kind, from a fixed vocabulary, and nothing that the sender wrote."""
    return _MEDIA.get(kind, "[media]")
