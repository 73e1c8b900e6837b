"""The links between the groups of several nodes in one process: what they agree upon goes there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from threading import Lock
from time import sleep

from allfold_agent.groups.deadlines import Obstacles
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.results import ResultRequest
from allfold_agent.runtime.reactor import Reactor
from allfold_core.protocol.peer_link import GroupMessage, LinkMessageType, LinkReader
from allfold_core.survival.records import Stamp
from allfold_core.topology import Member


class Notes:
    """The notes that the groups of all nodes have given to those around them.

    Attributes:
        joined: by node, the nodes that have come into its group.
        left_out: by node, the nodes without which its group goes on.
        over: the names of the nodes on which the group has ended.
    """

    def __init__(self) -> None:
        self.joined: defaultdict[str, set[str]] = defaultdict(set)
        self.left_out: defaultdict[str, set[str]] = defaultdict(set)
        self.over: list[str] = []


class LocalLinks:
    """Takes messages from node to node, in order; the reactor of the receiver takes them in.

    As over real links, what is sent while a link is down is lost.

    Attributes:
        groups: by node.
        down: the nodes whose links are down.
        sent: the messages that were sent, lost ones too: from, to, type.
        orchestrator_problem: why no node can ask the orchestrator.
    """

    def __init__(self, notes: Notes) -> None:
        self.orchestrator_problem: str | None = None
        self.groups: dict[str, NodeGroup] = {}
        self.notes = notes
        self.sent: list[tuple[str, str, LinkMessageType]] = []
        self._reactors: dict[str, Reactor] = {}
        self.down: set[str] = set()
        self._held: set[LinkMessageType] = set()
        self._waiting: list[tuple[str, str, GroupMessage]] = []
        self._lock = Lock()

    def add(self, group: NodeGroup, reactor: Reactor) -> None:
        """Connect the group of one more node."""
        self.groups[group.node] = group
        self._reactors[group.node] = reactor

    def send(self, source: str, node: str, message: GroupMessage) -> None:
        """Send a message, in the form that it has on the wire."""
        with self._lock:
            self.sent.append((source, node, message.type))
            if {source, node} & self.down:
                return
            if message.type in self._held:
                self._waiting.append((source, node, message))
                return
            self._deliver(source, node, message)

    def _deliver(self, source: str, node: str, message: GroupMessage) -> None:
        (received,) = LinkReader().feed(message.pack())
        assert isinstance(received, GroupMessage)
        self._reactors[node].call(partial(self.groups[node].receive, source, received))

    def hold(self, *kinds: LinkMessageType) -> None:
        """Keep messages of these types on their way, until :meth:`release`."""
        with self._lock:
            self._held |= set(kinds)

    def release(self) -> None:
        """Let everything arrive that was kept on its way."""
        with self._lock:
            self._held.clear()
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                self._deliver(*each)

    def drop(self) -> None:
        """Lose everything that was kept on its way."""
        with self._lock:
            self._held.clear()
            self._waiting.clear()

    def cut(self, node: str) -> None:
        """Lose what is sent to or from a node."""
        with self._lock:
            self.down.add(node)

    def mend(self, node: str) -> None:
        """Have the links of a node come up again, and both ends hear so."""
        with self._lock:
            self.down.discard(node)
        for other in self.groups.keys() - {node}:
            self._reactors[node].call(partial(self.groups[node].link_up, other))
            self._reactors[other].call(partial(self.groups[other].link_up, node))

    def ping(self) -> None:
        """Have every node tell all others how far it is, as pings do ten times a second."""
        for source, giver in self.groups.items():
            for node, taker in self.groups.items():
                if node != source and not {source, node} & self.down:
                    taker.runs.learn_progress(source, *giver.runs.progress(node))

    def count(self, kind: LinkMessageType) -> int:
        """Return the number of messages of a type that were sent."""
        return sum(each is kind for _, _, each in self.sent)

    def fetch(
        self,
        addresses: Sequence[str],
        request: ResultRequest,
        view: memoryview,
        is_wanted: Callable[[], bool],
        deadline: Callable[[], float],
    ) -> bool:
        """Get the result of an op from a node; the name of a node is its address here."""
        while is_wanted():
            for node in set(addresses) - self.down:
                stamp = Stamp.unpack(request.stamp)
                result = self.groups[node].results.take(request.seq, stamp)
                if result is not None:
                    view[:] = result.buffer.view[: result.nbytes]
                    result.buffer.release()
                    return True
            sleep(0.005)  # as the product does, until an attempt succeeds
        return False


class LocalNeighbours:
    """The other nodes, as the group of one node knows them."""

    def __init__(self, node: str, links: LocalLinks) -> None:
        self._node = node
        self._links = links

    def send(self, node: str, message: GroupMessage) -> None:
        self._links.send(self._node, node, message)

    def joined(self, group: NodeGroup, members: Collection[Member]) -> None:
        self._links.notes.joined[self._node] |= {member.node for member in members}

    def left_out(self, group: NodeGroup, nodes: Collection[str]) -> None:
        self._links.notes.left_out[self._node] |= set(nodes)

    def obstacles(self, group: NodeGroup) -> Obstacles:
        gone = (self._links.down - {group.node}).intersection(group.agreement.term.voters)
        return Obstacles(dict.fromkeys(gone, "is silent"), self._links.orchestrator_problem)

    def group_over(self, group: NodeGroup) -> None:
        self._links.notes.over.append(self._node)
