"""Errors that the product catches and logs: one of its own makes a story fail."""

from __future__ import annotations

import logging
import traceback
from types import TracebackType

from tests.support.state_search import Violation

PRODUCT = ("allfold_agent", "allfold_core", "allfold_orchestrator")


class Failures(logging.Handler):
    """Within a ``with`` block, takes note of exceptions that are logged as errors.

    Attributes:
        found: the violations so far, in the order in which they were found.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[Violation] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Violation):
            self.found.append(error)
        elif error is not None:
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
            self.found.append(Violation(f"{record.getMessage()}: {error!r} at {at}"))

    def __enter__(self) -> None:
        for name in PRODUCT:
            logger = logging.getLogger(name)
            logger.setLevel(logging.ERROR)
            logger.addHandler(self)
            logger.propagate = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in PRODUCT:
            logger = logging.getLogger(name)
            logger.setLevel(logging.NOTSET)
            logger.removeHandler(self)
            logger.propagate = True
