"""The connections between agents: those that this one opens, and what others find here."""

from __future__ import annotations

import socket
from dataclasses import replace

from allfold_agent.data_port import SocketTaker
from allfold_agent.edges.opening import Dial, EdgeRequest
from allfold_agent.groups.registry import PLAN_LAG_SECONDS, GroupRegistry
from allfold_agent.groups.results import Result, ResultRequest
from allfold_agent.http import client as http_client
from allfold_agent.http.transport import Transport
from allfold_agent.membership.link_dialling import DIAL_SECONDS, Dialled
from allfold_core.errors import AllfoldError, PeerLost, ServiceError
from allfold_core.protocol.frames import EDGE_PROTOCOL
from allfold_core.protocol.peer_link import LINK_PROTOCOL
from allfold_core.survival.records import Stamp

_EDGE_DIAL_SECONDS = 5.0


class PeerConnections:
    """Dials edges and links, and finds the groups that other agents ask for. In any thread.

    Args:
        transport: opens the connections.
        registry: the groups of this node.
    """

    def __init__(self, transport: Transport, registry: GroupRegistry) -> None:
        self._transport = transport
        self._registry = registry

    def dial_edge(self, request: EdgeRequest, address: str) -> Dial:
        """Return a function that opens an edge from a node with this address."""

        def dial(from_frame: int) -> tuple[socket.socket, bytes]:
            target = replace(request, from_frame=from_frame).target
            try:
                return http_client.upgrade(
                    self._transport, address, target, EDGE_PROTOCOL, _EDGE_DIAL_SECONDS
                )
            except (PeerLost, ServiceError):  # a peer that is busy is not lost
                raise
            except AllfoldError as error:
                raise PeerLost(f"{address} refuses the edge: {error.message}") from error

        return dial

    def dial_link(self, address: str, target: str) -> Dialled:
        """Open a link to the node with this address."""
        return http_client.upgrade(self._transport, address, target, LINK_PROTOCOL, DIAL_SECONDS)

    def open_edge(self, request: EdgeRequest) -> SocketTaker:
        """Return the function that takes over the connection of an edge that a peer has dialled.

        Raises:
            AllfoldError: the group refuses the edge, or is not open here.
        """
        group = self._registry.find(request.group, request.opening, PLAN_LAG_SECONDS)
        return group.serve_edge(request).attach(request.from_frame)

    def find_result(self, request: ResultRequest) -> Result | None:
        """Return the result of an op, held for the caller; ``None`` without one."""
        group = self._registry.find(request.group, request.opening)
        return group.results.take(request.seq, Stamp.unpack(request.stamp))
