"""Logs: one line a record, as text or as JSON.

Owns: their form, and which loggers there are.  Does not know: what is logged, prompts, keys.
Idea: whatever a client chose may stand in a message, so a line is escaped as a whole; nobody who
logs needs to think of it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Literal, TextIO

from runtime.server.journal import Journal

LogFormat = Literal["text", "json"]
LOGGERS = ("radixcache", "uvicorn", "asyncio", "opentelemetry")
"""Whose records are ours to show: the server's, and those of the layers that it stands on."""

_requests = logging.getLogger("radixcache.requests")
# Control characters, Unicode's line ends, and what turns the direction of writing.
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_PLAIN = re.compile(r"[!#-<>-~]+")


def set_up_logs(style: LogFormat, level: str, *, stream: TextIO | None = None) -> None:
    """Send our records, and those of the layers below, to one stream (standard error) in one form.

    level  "debug", "info", "warning" or "error"
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
    # Its warnings are that a client has left while something was sent to it, once a piece.
    logging.getLogger("asyncio").setLevel(logging.ERROR)


def log_request(journal: Journal, *, quiet: bool = False) -> None:
    """Log the one line of a request; `quiet` ones, such as probes, for debugging only."""
    level = logging.DEBUG if quiet else logging.INFO
    if _requests.isEnabledFor(level):
        _requests.log(level, "request", extra={"fields": journal.fields()})


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO radixcache.requests request id=… status=200 …`"""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line; a traceback follows in lines of its own that begin with "  | "."""
        parts = [_time(record), record.levelname, record.name, one_line(record.getMessage())]
        fields = getattr(record, "fields", {})
        parts += [f"{name}={_shown(value)}" for name, value in fields.items()]
        lines = [" ".join(parts)]
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            lines += [f"  | {one_line(line)}" for line in trace.splitlines()]
        return "\n".join(lines)


class JsonLines(logging.Formatter):
    """One JSON object a line: `time`, `level`, `logger`, `message`, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        # What JSON may leave as it is can still end a line where others read it.
        return _UNPRINTABLE.sub(
            lambda match: f"\\u{ord(match[0]):04x}", json.dumps(line, ensure_ascii=False)
        )


def one_line(text: str) -> str:
    r"""Escape whatever could end a line or hide a part of it.

    >>> one_line("a\nb\x1b[2J")
    'a\\nb\\x1b[2J'
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _shown(value: object) -> str:
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return json.dumps(one_line(text), ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"
