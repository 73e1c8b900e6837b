"""The ranks of this node in one group: those that join it, wait at an edge, and have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from allfold_agent.groups.epoch import Epoch

Admitted = Callable[[Epoch | None], None]
"""Told the first epoch that a rank is in; ``None`` where it never will be in one."""

GoOn = Callable[[Epoch], None]
"""Lets a rank go on that waits at an edge, in this epoch."""


class LocalRanks:
    """The sessions of this node, over all epochs. With the lock of the group's ops held.

    Args:
        first: the sessions with which the group was opened.
        add_due: has something done without the lock, soon.

    Attributes:
        sessions: all that there have been.
    """

    def __init__(self, first: Iterable[str], add_due: Callable[[Callable[[], None]], None]) -> None:
        self.sessions = set(first)
        self._add_due = add_due
        self._ended: set[str] = set()
        self._joining: dict[str, Admitted] = {}
        self._at_edge: dict[str, GoOn] = {}

    @property
    def have_ended(self) -> bool:
        """True once each of them has left or is dead. From any thread."""
        return self._ended.issuperset(self.sessions)

    @property
    def present(self) -> set[str]:
        """The sessions that have not ended, those that are joining too."""
        return self.sessions - self._ended

    def joins(self, session: str, admitted: Admitted) -> None:
        """Register a rank that is ready to join."""
        self.sessions.add(session)
        self._joining[session] = admitted

    def waits_at_edge(self, session: str, go_on: GoOn) -> None:
        """Keep a rank waiting at an edge, until :meth:`leave_edge`."""
        self._at_edge[session] = go_on

    def ended(self, session: str) -> None:
        """Note that a rank is dead or has left. From any thread."""
        self._ended.add(session)

    def leave_edge(self, epoch: Epoch, sessions: Iterable[str] | None = None) -> None:
        """Let ranks go on that wait at an edge; all of them where none are named.

        Args:
            epoch: in which they go on. By the time that they hear of it there may be a later one,
                which others at the edge do not know yet.
        """
        for session in list(self._at_edge) if sessions is None else sessions:
            if (go_on := self._at_edge.pop(session, None)) is not None:
                self._add_due(partial(go_on, epoch))

    def settle_joins(self, epoch: Epoch, *, is_over: bool) -> list[str]:
        """Tell joining ranks that are in an epoch now, or never will be; return those that are.

        Args:
            is_over: the group takes in nobody any more.
        """
        admitted = [session for session in self._joining if epoch.has(session)]
        hopeless = [s for s in self._joining if s not in admitted and (is_over or s in self._ended)]
        for session in admitted:
            self._add_due(partial(self._joining.pop(session), epoch))
        for session in hopeless:
            self._ended.add(session)  # it may ask anew, which is another group on this node
            self._add_due(partial(self._joining.pop(session), None))
        return admitted
