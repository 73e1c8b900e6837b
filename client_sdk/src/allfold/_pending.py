"""Requests to the agent that may have no answer yet."""

from __future__ import annotations

from typing import Any

from allfold_core.errors import AllfoldError


class Pending:
    """A request, and its answer once it has arrived.

    Attributes:
        epoch: of a call, the ordinal that its outcome carries.
        participants: of a call, the number of ranks that took part; 0 of an error.
        edge: of a call, the edge that its outcome announces; 0 for none.
    """

    __slots__ = ("answer", "done", "edge", "epoch", "error", "participants")

    def __init__(self) -> None:
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
