"""Requests to the agent that may have no answer yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from allfold_core.errors import AllfoldError


class Reader(Protocol):
    """The connection, which reads answers as they come."""

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until answers make a condition true."""

    def poll(self, pending: Pending) -> bool:
        """Process received messages without blocking; return True if the answer has arrived."""


class Pending:
    """A request, and its answer once it has arrived.

    Attributes:
        epoch: of a call, the ordinal that its outcome carries.
        participants: of a call, the number of ranks that took part; 0 of an error.
        edge: of a call, the edge that its outcome announces; 0 for none.
    """

    __slots__ = ("_connection", "answer", "done", "edge", "epoch", "error", "participants")

    def __init__(self, connection: Reader) -> None:
        self._connection = connection
        self.done = False
        self.answer: dict[str, Any] = {}
        self.error: AllfoldError | None = None
        self.epoch: int | None = None
        self.participants: int | None = None
        self.edge = 0

    def outcome(self) -> dict[str, Any]:
        """Return the answer, or raise the error that came instead."""
        if self.error is not None:
            raise self.error
        return self.answer

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the answer makes a condition true, for so long at most; return its value."""
        return self._connection.wait_until(condition, seconds)

    def poll(self) -> bool:
        """Return True if the answer has arrived, without waiting for it."""
        return self._connection.poll(self)

    def look(self) -> bool:
        """Return True if the answer is here, without asking the agent."""
        return self.done
