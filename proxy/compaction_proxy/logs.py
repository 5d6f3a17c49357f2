"""One log line per compaction and per failure: text on a terminal, JSON otherwise. Never message text, never a key."""

from __future__ import annotations

import json
import logging
from typing import Any, TextIO

from compaction_proxy.relay import BrokenOff

_events = logging.getLogger("compaction_proxy.events")


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
    """One line. ``None`` fields are left out; a line with a failure's reason is a warning."""
    known = {name: value for name, value in fields.items() if value is not None}
    failed = "failed" in event or "unavailable" in event
    _events.log(logging.WARNING if failed else logging.INFO, event, extra={"fields": known})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = (
            f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():<7} {record.getMessage()} {said}".rstrip()
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
