"""The interface of a group to the other nodes and to its agent."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Protocol

from allfold_agent.edges.members import Life, lives_of
from allfold_agent.groups.standstill import Obstacles
from allfold_core.protocol.peer_link import GroupMessage
from allfold_core.survival.records import Term
from allfold_core.topology import Member

if TYPE_CHECKING:
    from allfold_agent.groups.agreeing_group import AgreeingGroup


class Neighbours(Protocol):
    """The other nodes, as a group needs them. None of these may wait; from any thread."""

    def send(self, node: str, message: GroupMessage) -> None:
        """Send a node a message, which is lost if the link to it is down."""

    def joined(self, group: AgreeingGroup, members: Collection[Member]) -> None:
        """The group has these nodes from now on."""

    def left_out(self, group: AgreeingGroup, nodes: Collection[str]) -> None:
        """The group goes on without these nodes."""

    def obstacles(self, group: AgreeingGroup) -> Obstacles:
        """Return the obstacles to a decision. In the reactor's thread."""

    def group_over(self, group: AgreeingGroup) -> None:
        """No rank is in the group any more."""


class NodeChanges:
    """The nodes that come into a group, and those without which it goes on.

    It needs links and edges to the first, and those of the others no more.

    Args:
        link: wants links.
        unlink: ends links.
        drop: ends edges.
    """

    def __init__(
        self,
        link: Callable[[Collection[Member]], None],
        unlink: Callable[[Collection[str]], None],
        drop: Callable[[Collection[Life]], None],
    ) -> None:
        self._link = link
        self._unlink = unlink
        self._drop = drop
        self._on_edges: frozenset[Life] = frozenset()

    def note(self, before: Term, now: Term, *, frozen: bool) -> list[Callable[[], None]]:
        """Return what is to be done where one term may have followed another.

        A node that left and came back has another life in the group, and other links and edges.

        Args:
            frozen: until the decision attempts may need the edges of all nodes.
        """
        due: list[Callable[[], None]] = []
        known, present = lives_of(before), lives_of(now)
        gone, new = known - present, {node for node, _ in present - known}
        if gone:
            self._on_edges |= gone
            due.append(partial(self._unlink, [node for node, _ in gone]))
        if new:
            due.append(partial(self._link, [each for each in now.newcomers if each.node in new]))
        if self._on_edges and not frozen:
            due.append(partial(self._drop, self._on_edges))
            self._on_edges = frozenset()
        return due
