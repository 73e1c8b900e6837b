"""The log lines of the services: for people on a terminal, else one JSON object per line.

Facts go into ``extra``, not into the message. Both services log in this one form, so that what
collects their logs needs one rule.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["auto", "json", "text"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

_BLANK = logging.LogRecord("", 0, "", 0, "", None, None)
# Besides what every record has: uvicorn passes its messages a second time, in colour.
_NO_FACTS = frozenset({*vars(_BLANK), "message", "asctime", "color_message"})


class JsonLines(logging.Formatter):
    """One JSON object per line, with the same fields from every service.

    ``time`` (ISO 8601, UTC), ``level`` in small letters, ``service``, ``instance``, ``logger``,
    ``message``, what was passed as ``extra``, and ``exception`` and ``stack`` where there is one.

    Args:
        service: ``orchestrator`` or ``agent``.
        instance: which of them: the name of an agent's node, or of the replica's host.
    """

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._own = {"service": service, "instance": instance}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            **self._own,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        for name, value in _facts_of(record).items():
            line.setdefault(name, value)  # the fields above keep their meaning
        return json.dumps(line, default=_text_of, ensure_ascii=False)


class TextLines(logging.Formatter):
    """``<time> INFO    group complete group=train epoch=3``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
        """Return the time as JSON lines have it."""
        return _time_of(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's own name
        """Append what was passed as ``extra``."""
        facts = "".join(f" {name}={value}" for name, value in _facts_of(record).items())
        return super().formatMessage(record) + facts


def _time_of(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _facts_of(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _NO_FACTS}


def _text_of(value: object) -> object:
    """Return the form in JSON of a fact that has none of its own."""
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)


def set_up(
    log_format: LogFormat,
    level: LogLevel,
    *,
    service: str,
    instance: str,
    quiet: Collection[str] = (),
) -> None:
    """Send all logging of this process to standard error.

    Args:
        log_format: ``auto`` is ``text`` on a terminal, and ``json`` elsewhere.
        level: the lowest that is logged.
        service: ``orchestrator`` or ``agent``.
        instance: which of them, for those who read the logs of many.
        quiet: loggers of libraries of which only warnings are wanted.
    """
    if log_format == "auto":
        log_format = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextLines() if log_format == "text" else JsonLines(service, instance))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in quiet:
        logging.getLogger(name).setLevel(logging.WARNING)
