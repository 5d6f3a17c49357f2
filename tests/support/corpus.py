"""Recorded conversations: the replay corpus where it is at hand, else the small sample in tests/data.

The corpus stands beside the repository (``../shared/corpus``), or where ``COMPACTION_CORPUS`` says. A conversation is a
dict ``{"id", "source", "license", "messages", "tools"}`` in OpenAI chat form; an oddity has a ``note`` too, and its
messages may be invalid.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "tests" / "data" / "sample.jsonl"

Conversation = dict[str, Any]


def corpus_folder() -> Path | None:
    """Where the corpus is, or None. A folder that ``COMPACTION_CORPUS`` names must hold it."""
    named = os.environ.get("COMPACTION_CORPUS")
    folder = Path(named) if named else ROOT.parent / "shared" / "corpus"
    if (folder / "conversations.jsonl").is_file():
        return folder
    if named:
        message = f"COMPACTION_CORPUS names {folder}, which has no conversations.jsonl"
        raise FileNotFoundError(message)
    return None


def corpus_or_skip() -> Path:
    """The folder of the corpus; skips the calling test (or, at import, its module) where there is none."""
    folder = corpus_folder()
    if folder is None:
        pytest.skip(
            "the replay corpus is not here: put it at ../shared/corpus or name its folder in COMPACTION_CORPUS",
            allow_module_level=True,
        )
    return folder


def conversations() -> list[Conversation]:
    """Every conversation of the corpus, or the sample's four. Read once and shared: treat them as read-only."""
    folder = corpus_folder()
    return _read(folder / "conversations.jsonl" if folder else SAMPLE)


def conversation(name: str) -> Conversation:
    """The conversation with that id; skips the calling test where it is only in the corpus and that is not here."""
    found = [each for each in conversations() if each["id"] == name]
    if not found:
        corpus_or_skip()
        message = f"no conversation {name!r} in the corpus"
        raise LookupError(message)
    return found[0]


def oddities() -> list[Conversation]:
    """Arrays as found in the wild that are invalid or not plain OpenAI chat; none without the corpus."""
    folder = corpus_folder()
    return _read(folder / "oddities.jsonl") if folder else []


def requests_of(conversation: Conversation, model: str = "gpt-4o") -> Iterator[tuple[int, dict[str, Any]]]:
    """``(a, body)`` for each assistant message at index ``a`` > 0: the request it answered, ``messages[:a]``.

    ``tools`` is left out of the body where the conversation has none, as a client would.
    """
    messages = conversation["messages"]
    tools = {"tools": conversation["tools"]} if conversation.get("tools") else {}
    for a, message in enumerate(messages):
        if a > 0 and message["role"] == "assistant":
            yield a, {"model": model, "messages": messages[:a], **tools}


@cache
def _read(path: Path) -> list[Conversation]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
