"""Logging to standard error: lines for people on a terminal, JSON lines for machines.

Facts go into ``extra``, not into the message.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Literal

from pythonjsonlogger.core import RESERVED_ATTRS, LogData
from pythonjsonlogger.json import JsonFormatter

LogFormat = Literal["json", "text"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

_NAMES = {"levelname": "level", "name": "logger", "message": "msg", "exc_info": "exception"}
# uvicorn passes its messages a second time, in colour.
_NO_FACTS = frozenset({*RESERVED_ATTRS, "message", "color_message"})


class JsonLines(JsonFormatter):
    """One JSON object per line: ts, level, logger, msg, what was passed as ``extra``, exception."""

    def __init__(self) -> None:
        super().__init__(
            "%(levelname)s %(name)s %(message)s",
            rename_fields=_NAMES,
            reserved_attrs=_NO_FACTS,
            timestamp="ts",
        )

    def process_log_record(self, log_data: LogData) -> LogData:
        """Write levels in small letters."""
        log_data["level"] = log_data["level"].lower()
        return log_data


class Text(logging.Formatter):
    """``<time> INFO  group complete group=train epoch=3``."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's own name
        """Append what was passed as ``extra``."""
        facts = "".join(f" {name}={value}" for name, value in _facts_of(record).items())
        return super().formatMessage(record) + facts


def _facts_of(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _NO_FACTS}


def set_up(log_format: LogFormat, level: LogLevel) -> None:
    """Send all logging of this process to standard error, from ``level`` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else Text())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
