"""Whatever comes on an edge is a sign of life of the node at its other end."""

from __future__ import annotations

import socket

from allfold_agent.edges.connections import InConnection
from allfold_agent.edges.edges import Edges
from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.p2p.messages import control_frame
from allfold_agent.runtime.reactor import Reactor
from allfold_core.protocol.frames import ACK, HEADER_SIZE, FrameType
from tests.node_agent.edges.edge_ends import DEADLINE
from tests.support.fakes.local_groups import local_groups
from tests.support.waiting import wait_until

NEVER = float("-inf")


def test_part_of_a_frame_is_a_sign_of_life_and_an_end_is_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = InConnection(ours)
        opened = connection.last_heard
        assert opened > NEVER
        view = memoryview(bytearray(10))
        assert connection.receive_into(view) == 0
        assert connection.last_heard == opened
        theirs.send(b"abc")
        assert connection.receive_into(view) == 3
        assert connection.last_heard > opened


def test_an_acknowledgement_is_a_sign_of_life_also_if_nobody_else_looks_for_it(
    reactor: Reactor,
) -> None:
    edge = OutEdge("b", reactor)
    assert edge.last_heard() == NEVER
    edge.enqueue(control_frame(FrameType.GRANT, 7))
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(DEADLINE)
        edge.attach(0)(theirs)
        opened = edge.last_heard()
        assert opened > NEVER
        assert len(ours.recv(HEADER_SIZE)) == HEADER_SIZE
        assert edge.last_heard() == opened
        ours.send(ACK.pack(1))
        assert edge.last_heard() > opened
    edge.close()


def test_a_node_was_heard_when_something_last_came_on_an_edge_of_either_direction() -> None:
    with local_groups([[0], [1], [2]]) as local:
        heard = [group.edges.last_heard for group in local.groups]
        assert heard[0]("node1") == NEVER
        last = NEVER
        for seq in range(3):
            local.call_all(seq, [[1.0], [2.0], [3.0]], strategy="chain")
            assert [rank.outcome() for rank in local.ranks] == [(seq, None)] * 3
            assert heard[0]("node1") > last
            last = heard[0]("node1")
        assert heard[1]("node0") > NEVER
        assert heard[1]("a stranger") == NEVER


def test_the_latest_of_both_directions_counts() -> None:
    with local_groups([[0], [1]]) as local:
        edges: Edges = local.groups[0].edges
        local.call_all(0, [[1.0], [2.0]])
        assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2

        def is_the_latest() -> bool:  # acknowledgements may still come
            both = (edges.out("node1").last_heard(), edges.open_in("node1").last_heard)
            return edges.last_heard("node1") == max(both)

        wait_until(is_the_latest, "what came last on either edge counts")
