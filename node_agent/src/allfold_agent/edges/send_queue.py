"""The order in which the sources of an out-edge are sent."""

from __future__ import annotations

from collections import deque

from allfold_agent.edges.outgoing import PayloadSource


class SendQueue:
    """The sources of an edge that are not finished: the urgent ones first, each kind in its order.

    Frames are numbered when they are taken from their source, so what goes ahead here is ahead on
    the wire. The edge's lock protects it.
    """

    def __init__(self) -> None:
        self._urgent: deque[PayloadSource] = deque()
        self._others: deque[PayloadSource] = deque()

    def add(self, source: PayloadSource, *, urgent: bool) -> None:
        """Append a source to those of its kind."""
        (self._urgent if urgent else self._others).append(source)

    def head(self) -> PayloadSource | None:
        """Return the source that is sent next, ready or not; ``None`` without one."""
        for sources in (self._urgent, self._others):
            while sources and sources[0].is_finished():
                sources.popleft()
            if sources:
                return sources[0]
        return None
