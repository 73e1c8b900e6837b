"""The messages and the progress of groups, on the links between agents."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.registry import GroupRegistry
from allfold_agent.membership.group_terms import EarlyNotices
from allfold_agent.membership.link import LinkListener
from allfold_agent.membership.links import PeerLinks
from allfold_control.survival import Closed, pack
from allfold_core.protocol.frames import FrameError
from allfold_core.protocol.peer_link import Floor, GroupMessage, GroupProgress, LinkMessageType
from allfold_core.survival.suspicion import Awaited, Observation
from allfold_core.topology import Member

log = logging.getLogger(__name__)


class GroupLinks(LinkListener):
    """Takes what comes over links to the groups, and what groups say to links.

    Args:
        links: to the other agents.
        notices: keeps messages for groups whose plan is on its way.

    Attributes:
        on_link_down: called with the name of a node when the link to it has ended, or when nobody
            listens at its address any more.
    """

    def __init__(self, node: str, links: PeerLinks, registry: GroupRegistry, notices: EarlyNotices):
        self._node = node
        self._links = links
        self._registry = registry
        self._notices = notices
        self._wanted: dict[NodeGroup, dict[str, str]] = {}  # node: incarnation
        self.on_link_down: Callable[[str], None] = lambda _: None
        links.listener = self

    # From groups, in any thread

    def opened(self, group: NodeGroup) -> None:
        """Ask for links to all other nodes of a group."""
        self._wanted[group] = {}
        self.joined(group, [each for each in group.plan.members if each.node != self._node])

    def joined(self, group: NodeGroup, members: Collection[Member]) -> None:
        """The group has these nodes from now on."""
        wanted = self._wanted.get(group)
        if wanted is None:
            return  # the end of the group was faster
        for member in members:
            wanted[member.node] = member.incarnation
            self._links.want(member.node, member.data_address, member.incarnation)

    def left_out(self, group: NodeGroup, nodes: Collection[str]) -> None:
        """The group goes on without these nodes."""
        wanted = self._wanted.get(group, {})
        for node in nodes:
            with suppress(KeyError):  # the end of the group was faster
                self._links.unwant(node, wanted.pop(node))

    def over(self, group: NodeGroup) -> None:
        """The group needs its links no more."""
        self.left_out(group, list(self._wanted.get(group, ())))
        self._wanted.pop(group, None)

    def send(self, node: str, message: GroupMessage) -> None:
        """Send a message of a group; repeated by the group when the link is up again."""
        self._links.send(node, message.pack())

    # In the reactor's thread

    def missing(self, group: NodeGroup) -> Mapping[str, str]:
        """The nodes of a group's term that cannot be reached, each with a phrase that says so."""
        missing: dict[str, str] = {}
        now = monotonic()
        for node in group.agreement.term.voters:
            seen = None if node == self._node else self._links.observe(node)
            if seen is not None and seen.refused:
                missing[node] = "refuses connections"
            elif seen is not None and self._is_silent(node, seen, now):
                missing[node] = "is silent"
        return missing

    def _is_silent(self, node: str, seen: Observation, now: float) -> bool:
        if not seen.is_silent(now):
            return False
        heard = max(seen.last_heard, self.last_heard(node))
        return replace(seen, last_heard=heard).is_silent(now)

    def last_heard(self, node: str) -> float:
        """Return when the last byte came from a node on any edge (monotonic)."""
        edges = (each for group in self._shared(node) for each in (group.edges, group.p2p.edges))
        return max((each.last_heard(node) for each in edges), default=float("-inf"))

    def awaited(self) -> list[Awaited]:
        """Return what this node waits for in the rounds of its groups.

        It waits for nothing in a group that goes on without it. Nor for a node that has begun a new
        life since: that one answers pings, and cannot do the part of the earlier one. Suspected of
        that, it would be evicted from all groups that it is in.
        """
        found: list[Awaited] = []
        for group in self._registry.all():
            machine = group.agreement.machine
            if machine.out or group.evicted is not None:
                continue
            leader = (machine.term.leader,) if machine.frozen else ()
            found += [
                Awaited(group.name, group.opening, machine.term.number, machine.round, node)
                for node in group.agreement.waits_for or leader
                if node != self._node and self._links.is_with(node, group.members[node].incarnation)
            ]
        return found

    def _shared(self, node: str) -> Iterator[NodeGroup]:
        for group in self._registry.all():
            if node in group.agreement.term.voters:
                yield group

    def on_up(self, node: str, incarnation: str) -> None:  # noqa: ARG002 - the link has checked it
        for group in self._shared(node):
            group.link_up(node)

    def on_down(self, node: str, refused: bool) -> None:  # noqa: ARG002 - the link knows it, too
        self.on_link_down(node)

    def on_message(self, node: str, message: GroupMessage) -> None:
        def receive(group: NodeGroup) -> None:
            try:
                group.receive(node, message)
            except FrameError as error:
                log.error("group '%s': node %s sends nonsense: %s", group.name, node, error)

        if message.type is LinkMessageType.CLOSED:
            group = self._registry.look_for(message.group, message.opening, 0.0)
            if group is not None:
                receive(group)
            return

        if not self._notices.apply(message.group, message.opening, receive):
            self._answer_closed(node, message)

    def _answer_closed(self, node: str, message: GroupMessage) -> None:
        """Tell a node that a group is over: the decision that said so was lost with the link."""
        all_left = self._registry.had_no_ranks(message.group, message.opening)
        body = pack(Closed(all_left))
        answer = GroupMessage(LinkMessageType.CLOSED, message.group, message.opening, body)
        self._links.send(node, answer.pack())

    def progress(self, node: str) -> Sequence[GroupProgress]:
        return [
            GroupProgress(group.name, group.opening, *group.runs.progress(node))
            for group in self._shared(node)
        ]

    def on_progress(self, node: str, progress: Sequence[GroupProgress]) -> None:
        for each in progress:
            group = self._registry.look_for(each.group, each.opening, 0.0)
            if group is not None:
                group.runs.learn_progress(node, each.watermark, each.seq, each.digest)

    def floors(self, node: str) -> Sequence[Floor]:
        return [
            Floor(
                group.name,
                group.opening,
                group.agreement.machine.floor,
                group.agreement.waits_for,
            )
            for group in self._shared(node)
        ]

    def on_floors(self, node: str, floors: Sequence[Floor]) -> None:  # noqa: ARG002 - as on_progress
        for each in floors:
            group = self._registry.look_for(each.group, each.opening, 0.0)
            if group is not None:
                group.learn_floor(each.floor)
