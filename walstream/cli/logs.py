"""Logs of the commands that run for long: on standard error, a line each, for a person or as JSON for a collector."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from .console import redact


class Form(StrEnum):
    """How a line looks."""

    TEXT = "text"
    JSON = "json"


LogFormat = Annotated[
    Form, typer.Option("--log-format", help="text, or json: one object a line, with time, level, logger and message.")
]

_TEXT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

# What every record has; the rest was given by `extra=` and is the reader's.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time`` (UTC, RFC 3339), ``level``, ``logger``, ``message``, ``error`` (a traceback) and
    whatever the call gave as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        import orjson

        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
            "thread": record.threadName,
        }
        if record.exc_info:
            found["error"] = redact(self.formatException(record.exc_info))
        found |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        return orjson.dumps(found, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class Text(logging.Formatter):
    """For a person; without passwords that a message of the driver may quote."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def log_to_stderr(verbose: bool = False, form: Form = Form.TEXT) -> None:
    """Write walstream's own log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form is Form.JSON else Text(_TEXT))
    logger = logging.getLogger("walstream")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
