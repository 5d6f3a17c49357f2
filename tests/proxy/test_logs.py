"""Log lines: one form on a terminal, one in a file, and no text that somebody else wrote."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from compaction_proxy.logs import MAX_CHARS, log_event, setup_logging
from compaction_proxy.relay import BrokenOff

log = logging.getLogger("compaction_proxy.tested")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    names = ("", "compaction_proxy", "uvicorn.error")
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    handlers = list(logging.getLogger().handlers)
    filters = list(logging.getLogger("uvicorn.error").filters)
    yield
    logging.getLogger().handlers[:] = handlers
    logging.getLogger("uvicorn.error").filters[:] = filters
    for logger, level in before:
        logger.setLevel(level)


def test_a_compaction_is_one_json_line_where_nobody_watches() -> None:
    stream = io.StringIO()
    setup_logging(stream)
    log_event("compaction", trace_id="4bf9", policy="default", tokens_before=120_000, tokens_after=57_000, reason=None)
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "event": "compaction",
        "trace_id": "4bf9",
        "policy": "default",
        "tokens_before": 120_000,
        "tokens_after": 57_000,
    }


def test_a_failure_is_a_warning_and_readable_on_a_terminal() -> None:
    stream = Terminal()
    setup_logging(stream)
    log_event("compaction failed", reason="summarizer-failed", detail="HTTP 500", ms=12)
    line = stream.getvalue().rstrip("\n")
    assert line.partition(" ")[2] == 'warning compaction failed reason=summarizer-failed detail="HTTP 500" ms=12'


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["json", "text"])
def test_no_value_forges_a_line_or_breaks_one(stream: io.StringIO) -> None:
    setup_logging(stream)
    log_event("compaction", policy="x\n00:00:00 warning forged", detail="\ud800" + "y" * 5_000, messages="SECRET")
    stream.getvalue().encode("utf-8")
    assert stream.getvalue().count("\n") == 1
    assert "SECRET" not in stream.getvalue(), "a field that no line has"
    assert stream.getvalue().count("y") < MAX_CHARS + 10


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["json", "text"])
def test_an_exception_is_told_by_its_type_and_place_never_by_its_words(stream: io.StringIO) -> None:
    setup_logging(stream)
    try:
        {}["SECRET"]
    except KeyError:
        log.exception("request failed inside the proxy")
    said = stream.getvalue()
    assert "SECRET" not in said
    assert "KeyError" in said
    assert "test_logs.py:" in said


def test_an_answer_that_broke_off_is_no_error_of_the_server() -> None:
    stream = io.StringIO()
    setup_logging(stream)
    server = logging.getLogger("uvicorn.error")
    for error in (BrokenOff("gone"), ValueError("bad")):
        server.error("Exception in ASGI application", exc_info=error)
    assert [json.loads(line)["error"] for line in stream.getvalue().splitlines()] == ["ValueError"]


def test_libraries_speak_from_warnings_on() -> None:
    stream = io.StringIO()
    setup_logging(stream)
    logging.getLogger("some.library").info("chatter")
    log.info("ours")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["ours"]
