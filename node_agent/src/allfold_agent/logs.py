"""Logging to standard error: lines for people on a terminal, JSON lines for machines."""

from __future__ import annotations

import logging
import sys

from pythonjsonlogger.core import LogData
from pythonjsonlogger.json import JsonFormatter

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_NAMES = {"levelname": "level", "name": "logger", "message": "msg", "exc_info": "exception"}


class JsonLines(JsonFormatter):
    """One JSON object per line: ts, level, logger, msg, what was passed as ``extra``, exception."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s %(message)s", rename_fields=_NAMES, timestamp="ts")

    def process_log_record(self, log_data: LogData) -> LogData:
        """Write levels in small letters, as the orchestrator does."""
        log_data["level"] = log_data["level"].lower()
        return log_data


def set_up(log_format: str, level: str) -> None:
    """Send all logging of this process to standard error.

    Args:
        log_format: "json" or "text".
        level: the name of the lowest level that is logged, in capitals.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
