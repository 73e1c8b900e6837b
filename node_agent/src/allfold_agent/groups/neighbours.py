"""The interface of a group to the other nodes and to its agent."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Protocol

from allfold_agent.groups.standstill import Obstacles
from allfold_core.survival.records import Term
from allfold_core.wire.peer_link import GroupMessage

if TYPE_CHECKING:
    from allfold_agent.groups.agreeing_group import AgreeingGroup


class Neighbours(Protocol):
    """The other nodes, as a group needs them. None of these may wait; from any thread."""

    def send(self, node: str, message: GroupMessage) -> None:
        """Send a node a message, which is lost if the link to it is down."""

    def left_out(self, group: AgreeingGroup, nodes: Collection[str]) -> None:
        """The group goes on without these nodes."""

    def obstacles(self, group: AgreeingGroup) -> Obstacles:
        """Return the obstacles to a decision. In the reactor's thread."""

    def group_over(self, group: AgreeingGroup) -> None:
        """No rank is in the group any more."""


class LeftOut:
    """The nodes without which a group goes on: it needs their links and edges no more.

    Args:
        unlink: ends links.
        drop: ends edges.
    """

    def __init__(
        self, unlink: Callable[[Collection[str]], None], drop: Callable[[Collection[str]], None]
    ) -> None:
        self._unlink = unlink
        self._drop = drop
        self._on_edges: frozenset[str] = frozenset()

    def note(self, before: Term, now: Term, *, frozen: bool) -> list[Callable[[], None]]:
        """Return what is to be done where one term may have followed another.

        Args:
            frozen: until the decision attempts may need the edges of all nodes.
        """
        due: list[Callable[[], None]] = []
        gone = frozenset(before.voters).difference(now.voters)
        if gone:
            self._on_edges |= gone
            due.append(partial(self._unlink, gone))
        if self._on_edges and not frozen:
            due.append(partial(self._drop, self._on_edges))
            self._on_edges = frozenset()
        return due
