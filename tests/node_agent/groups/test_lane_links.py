"""The links of the short lane: each node dials each, anew where a connection has ended."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from threading import Event, Lock

import pytest

from allfold_agent.edges.members import GroupNodes
from allfold_agent.edges.opening import Dial, EdgeRequest, Traffic
from allfold_agent.groups.lane.links import LaneLinks
from allfold_agent.groups.lane.payloads import LONGEST_PAYLOAD, Payload
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_agent.traffic.line import Sender
from allfold_agent.traffic.pacer import Pacer
from allfold_core.errors import PeerLost, ServiceError
from allfold_core.plan import Plan
from allfold_core.protocol.frames import FrameHeader
from allfold_core.survival.plans import first_term
from allfold_core.survival.records import Term
from tests.node_agent.in_lane import in_thread
from tests.support.fakes.local_groups import make_plan
from tests.support.waiting import never, wait_until

NODES = ("node0", "node1", "node2")


class Node:
    """One node's links, with a thread of their own."""

    def __init__(self, name: str, plan: Plan, network: Network) -> None:
        self.name = name
        self.thread = LaneThread(name)
        self.members = GroupNodes(plan.members, first_term(plan))
        self.frames: list[tuple[str, int, bytes]] = []
        self.changes = 0
        self.links = LaneLinks(
            "test",
            plan.opening,
            name,
            self.members,
            network.dial,
            self.thread,
            self,
            self._change,
            lambda zone: Sender(Pacer(name, "", 0, never), "test", zone, 1),
        )

    def destination(self, _node: str, _header: FrameHeader) -> memoryview | None:
        return None

    def take(self, node: str, header: FrameHeader, payload: Payload, *, is_there: bool) -> None:
        assert not is_there
        self.frames.append((node, header.seq, bytes(payload)))
        self.links.free(payload)

    def _change(self) -> None:
        self.changes += 1

    @property
    def others(self) -> list[str]:
        return [node for node in NODES if node != self.name]

    def send(self, node: str, seq: int, payload: bytes | bytearray) -> None:
        def send() -> None:
            link = self.links.link_to(node)
            assert link is not None
            link.send(seq, 0, 0, 0, 0, memoryview(payload))

        in_thread(self.thread, send)


class Network:
    """Nodes that dial each other over socket pairs.

    Attributes:
        requests: the dials so far.
        refused: the nodes that refuse connections.
        problem: what dials raise instead of what else happens.
    """

    def __init__(self) -> None:
        plan = make_plan([(0,), (1,), (2,)])
        self.requests: list[EdgeRequest] = []
        self.refused: set[str] = set()
        self.problem: Exception | None = None
        self._lock = Lock()
        self._pairs: list[tuple[EdgeRequest, socket.socket, socket.socket]] = []
        self.nodes = {name: Node(name, plan, self) for name in NODES}

    def dial(self, request: EdgeRequest, address: str) -> Dial:
        assert address == request.src  # a plan of the tests has names there

        def dial(from_frame: int) -> tuple[socket.socket, bytes]:
            if self.problem is not None:
                raise self.problem
            if request.src in self.refused:
                raise PeerLost("connection refused")
            door = self.nodes[request.src].links.serve(request)
            ours, theirs = socket.socketpair()
            with self._lock:
                self.requests.append(request)
                self._pairs.append((request, ours, theirs))
            door.attach(from_frame)(theirs)
            return ours, b""

        return dial

    def dials(self, source: str, destination: str) -> int:
        return [(each.src, each.dst) for each in self.requests].count((source, destination))

    def cut(self, source: str, destination: str) -> None:
        """Let the connections of one direction between two nodes end."""
        for request, ours, theirs in list(self._pairs):
            if (request.src, request.dst) == (source, destination):
                for each in (ours, theirs):
                    with suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)

    def want(self, *names: str) -> None:
        """Have nodes wish for links to all others that live."""
        for name in names or self.nodes:
            node = self.nodes[name]
            node.links.want([each for each in node.others if node.members.life_of(each)])

    def are_whole(self, *names: str) -> bool:
        return all(
            self.nodes[name].links.are_whole(self.nodes[name].others) for name in names or NODES
        )

    def connect(self) -> None:
        """Have all nodes wish for links, again and again as they do, until all are there."""

        def whole() -> bool:
            self.want()
            for node in self.nodes.values():
                in_thread(node.thread, lambda: None)  # no wish is left to be followed
            return self.are_whole()

        wait_until(whole, "all links are whole")

    def exchange(self, seq: int) -> None:
        """Have each node send each other one a frame, and await them."""
        for node in self.nodes.values():
            for other in node.others:
                node.send(other, seq, node.name.encode())
        for node in self.nodes.values():
            expected = {(other, seq, other.encode()) for other in node.others}
            wait_until(
                lambda node=node, expected=expected: expected <= set(node.frames),  # type: ignore[misc]
                "all frames have come",
            )

    def close(self) -> None:
        for node in self.nodes.values():
            node.links.close()
            in_thread(node.thread, lambda: None)
            node.thread.close()
        for _, ours, theirs in self._pairs:
            ours.close()
            theirs.close()


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


def test_each_node_dials_each_other_one_once_and_frames_go_both_ways(network: Network) -> None:
    network.connect()
    network.exchange(1)
    network.want()
    network.exchange(2)
    pairs = {(one, other) for one in NODES for other in NODES if one != other}
    assert len(network.requests) == len(pairs)
    assert {(each.src, each.dst) for each in network.requests} == pairs
    assert {(each.lane, each.group, each.from_frame) for each in network.requests} == {
        (Traffic.SHORT, "test", 0)
    }
    assert network.requests[0].lives == tuple(
        f"life {name[-1]}.3" for name in (network.requests[0].src, network.requests[0].dst)
    )


def test_links_are_not_whole_before_both_nodes_wish_for_them(network: Network) -> None:
    network.want("node0")
    wait_until(lambda: network.nodes["node1"].changes, "node0 has dialled node1")
    wait_until(lambda: network.nodes["node2"].changes, "node0 has dialled node2")
    assert not any(network.are_whole(name) for name in NODES)
    assert network.nodes["node0"].links.are_whole([])


def test_each_change_of_a_link_is_told(network: Network) -> None:
    network.connect()
    for node in network.nodes.values():
        wait_until(lambda node=node: node.changes == 4, "it is told")  # type: ignore[misc]
    network.cut("node0", "node1")
    for name in ("node0", "node1"):
        node = network.nodes[name]
        wait_until(lambda node=node: node.changes > 4, "it is told")  # type: ignore[misc]


@pytest.mark.parametrize(("source", "destination"), [("node0", "node1"), ("node2", "node0")])
def test_a_link_of_which_a_connection_has_ended_is_made_anew_at_the_next_wish(
    network: Network, source: str, destination: str
) -> None:
    network.connect()
    third = next(name for name in NODES if name not in (source, destination))
    for time in range(1, 4):
        network.cut(source, destination)
        wait_until(
            lambda: not network.are_whole(source) and not network.are_whole(destination),
            "both know that it has ended",
        )
        assert network.are_whole(third)
        network.connect()
        network.exchange(time)
    assert network.dials(source, third) == network.dials(third, source) == 1


def test_a_node_that_refuses_connections_is_dialled_until_it_accepts_one(network: Network) -> None:
    network.refused.add("node2")
    network.want()
    wait_until(lambda: network.dials("node1", "node0"), "the others are dialled")
    assert not network.are_whole("node0")
    network.refused.clear()
    wait_until(network.are_whole, "all links are whole")


def test_a_node_that_could_not_serve_the_link_for_long_is_dialled_again_at_the_next_wish(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold_agent.edges.opening._BUSY_SECONDS", -1.0)
    monkeypatch.setattr("allfold_agent.edges.opening._BUSY_RETRY_SECONDS", 0.001)
    network.problem = ServiceError("it has no file descriptor left")
    network.want()
    nodes = network.nodes.values()
    wait_until(lambda: not any(node.links._dialling for node in nodes), "all have given up")
    network.problem = None
    network.connect()
    network.exchange(1)


def later_term(plan_term: Term, left_out: str, number: int) -> Term:
    """The term in which a node has come back into the group."""
    joined = tuple(
        number if node == left_out else before
        for node, before in zip(plan_term.voters, plan_term.joined, strict=True)
    )
    return Term(number, plan_term.generation, plan_term.voters, joined)


def test_a_node_that_leaves_has_no_link_and_one_that_comes_back_has_a_new_one(
    network: Network,
) -> None:
    network.connect()
    first = first_term(make_plan([(0,), (1,), (2,)]))
    node = network.nodes["node0"]
    old = node.links.link_to("node2")
    assert old is not None
    connected = old.sending
    assert connected is not None
    node.members.dismiss([("node2", 3)])
    assert node.links.link_to("node2") is None
    assert node.links.are_whole(["node1", "node2"])  # the group goes on without that one
    with pytest.raises(PeerLost):
        node.links.serve(EdgeRequest("test", 3, "node0", "node2", lane=Traffic.SHORT))
    node.links.want(["node1"])
    wait_until(lambda: in_thread(node.thread, lambda: connected.fileno() < 0), "its link has ended")
    wait_until(lambda: not network.are_whole("node2"), "the other end is told")
    again = later_term(first, "node2", 8)
    for each in network.nodes.values():
        each.members.dismiss([("node2", 3)])
        each.members.welcome([make_plan([(0,), (1,), (2,)]).members[2]], again)
    assert node.links.link_to("node2") is None
    network.connect()
    network.exchange(1)
    assert node.links.link_to("node2") is not old
    assert network.dials("node1", "node0") == 1


def test_traffic_is_counted_by_link_and_direction(network: Network) -> None:
    network.connect()
    network.exchange(1)
    counted = {
        (direction, peer): (each.frames, each.payload_bytes)
        for direction, peer, each in network.nodes["node0"].links.counters()
    }
    assert counted == {
        (direction, peer): (1, 5) for direction in ("out", "in") for peer in ("node1", "node2")
    }


def test_links_have_sent_once_each_of_them_has(network: Network) -> None:
    """Memory that they have let go of may be written to; what was sent of it comes as it was."""
    network.connect()
    node, other = network.nodes["node0"], network.nodes["node1"]
    read = Event()

    def block() -> None:
        read.wait(10.0)

    other.thread.call(block)
    memory = bytearray(b"1" * LONGEST_PAYLOAD)
    try:
        for seq in range(8):
            node.send("node1", seq, memory)
        node.send("node2", 0, b"short")
        assert not in_thread(node.thread, lambda: node.links.have_sent)
        in_thread(node.thread, node.links.let_go)
        memory[:] = bytes(LONGEST_PAYLOAD)
    finally:
        read.set()
    wait_until(lambda: len(other.frames) == 8, "all have come")
    assert {payload for _, _, payload in other.frames} == {b"1" * LONGEST_PAYLOAD}
    assert in_thread(node.thread, lambda: node.links.have_sent)


def test_closed_links_end_their_connections_and_serve_and_dial_nobody(network: Network) -> None:
    network.connect()
    node = network.nodes["node0"]
    node.links.close()
    wait_until(lambda: not network.are_whole("node1"), "node1 knows")
    wait_until(lambda: not network.are_whole("node2"), "node2 knows")
    with pytest.raises(PeerLost):
        node.links.serve(EdgeRequest("test", 3, "node0", "node1", lane=Traffic.SHORT))
    dialled = network.dials("node1", "node0")
    node.links.want(node.others)
    in_thread(node.thread, lambda: None)
    assert network.dials("node1", "node0") == dialled
    assert not any(link.is_whole for link in node.links._links.values())


def test_links_that_are_closed_while_they_are_dialled_dial_no_more(network: Network) -> None:
    network.refused.add("node2")
    node = network.nodes["node0"]
    node.links.want(["node2"])
    wait_until(lambda: in_thread(node.thread, lambda: list(node.links._dialling)), "it dials")
    node.links.close()
    network.refused.clear()
    wait_until(lambda: not in_thread(node.thread, lambda: list(node.links._dialling)), "no more")
    assert not node.links.are_whole(["node2"])
