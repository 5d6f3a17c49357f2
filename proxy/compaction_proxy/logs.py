"""One log line per compaction and per failure: text on a terminal, JSON otherwise. Never message text, never a key.

So an exception is logged by its type and where it was raised: its own words may quote what it failed on.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from compaction_proxy.relay import BrokenOff

FIELDS = frozenset(
    {
        "trace_id",
        "policy",
        "outcome",
        "reason",
        "detail",
        "tokens_before",
        "tokens_after",
        "ms",
        "compaction_id",
    }
)
"""What a line may say beside its event."""
MAX_CHARS = 256
MAX_FRAMES = 12

_events = logging.getLogger("compaction_proxy.events")
_NEEDS_QUOTES = re.compile(r"[^\w./:@+-]")


def setup_logging(stream: TextIO) -> None:
    """Log to ``stream``; libraries only from warnings on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Text() if stream.isatty() else _Json())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("compaction_proxy").setLevel(logging.INFO)
    server = logging.getLogger("uvicorn.error")
    server.setLevel(logging.WARNING)
    server.addFilter(_no_aborts)


def _no_aborts(record: logging.LogRecord) -> bool:
    """An answer that broke off is raised through the server to abort the connection; it is no fault of ours."""
    return not isinstance(record.exc_info, tuple) or record.exc_info[0] is not BrokenOff


def log_event(event: str, **fields: Any) -> None:
    """One line. Fields that are ``None`` or not in ``FIELDS`` are left out; a failure is a warning."""
    known = {name: _short(value) for name, value in fields.items() if name in FIELDS and value is not None}
    failed = "failed" in event or "unavailable" in event
    _events.log(logging.WARNING if failed else logging.INFO, event, extra={"fields": known})


def _short(value: object) -> object:
    return value if isinstance(value, (bool, int, float)) else str(value)[:MAX_CHARS]


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _raised(record: logging.LogRecord) -> tuple[str, list[str]] | None:
    """The type of a record's exception and the newest frames, ``file:line function``."""
    if not isinstance(record.exc_info, tuple) or record.exc_info[0] is None:
        return None
    kind, _, raised_at = record.exc_info
    frames = traceback.extract_tb(raised_at)[-MAX_FRAMES:]
    return kind.__name__, [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record).items())
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():<7} {record.getMessage()}{said}"
        raised = _raised(record)
        return line if raised is None else "\n    ".join((f"{line} [{raised[0]}]", *raised[1]))


def _quoted(value: object) -> str:
    """A value that cannot be taken for another line or field."""
    text = str(value)
    return json.dumps(text) if _NEEDS_QUOTES.search(text) or not text.isascii() else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        raised = _raised(record)
        if raised is not None:
            line["error"], line["raised_at"] = raised
        return json.dumps(line)
