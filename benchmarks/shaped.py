"""The shapes on a network: each node, with its agent and ranks, in a namespace of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from allfold_cluster.network import Network
from allfold_cluster.network.links import INTERFACE, NetworkCluster, address, connected
from allfold_cluster.network.namespaces import Namespaces, entered
from benchmarks.conductor import Budget, Conductor
from benchmarks.errors import BenchmarkFailed
from benchmarks.fleet import Fleet
from benchmarks.loopback import join, telling
from benchmarks.plan import Shape

_SECONDS = 3.0
_DEADLINE = 30.0
_CHUNK = 1 << 20


@contextmanager
def shaped(
    network: Network, shape: Shape, libraries: Sequence[str], budget: Budget
) -> Iterator[tuple[Conductor, float]]:
    """The ranks of a shape on a network, and the payload in bytes per second of its lines."""
    with Namespaces(shape.nodes) as spaces, connected(network, spaces):
        limit = payload_rate(spaces)
        places = [
            partial(entered, spaces.nodes[rank // shape.per_node]) for rank in range(shape.world)
        ]
        with NetworkCluster(spaces) as cluster:
            cluster.start(shape.nodes)
            with telling(cluster), Fleet(shape.world, places=places) as fleet:
                join(fleet, shape, libraries, cluster, INTERFACE)
                agents = [agent.pid for agent in cluster.agents.values()]
                yield Conductor([fleet], agents, budget), limit
                fleet.leave()


def payload_rate(spaces: Namespaces, seconds: float = _SECONDS) -> float:
    """Bytes per second of payload, at the receiver, once the stream is at its pace.

    Raises:
        BenchmarkFailed: nothing comes through, or no more.
    """
    try:
        return _measured(spaces, seconds)
    except OSError as error:
        raise BenchmarkFailed(f"a TCP stream over the line failed: {error}") from error


def _measured(spaces: Namespaces, seconds: float) -> float:
    with ExitStack() as ending:
        with entered(spaces.nodes[1]):
            listener = ending.enter_context(socket.create_server((address(1), 0)))
        with entered(spaces.nodes[0]):
            connection = socket.create_connection(listener.getsockname(), _DEADLINE)
            sender = ending.enter_context(connection)
        listener.settimeout(_DEADLINE)
        receiver = ending.enter_context(listener.accept()[0])
        receiver.settimeout(_DEADLINE)
        sending = threading.Thread(target=_send, args=(sender,))
        sending.start()
        try:
            # The first half of the time is the stream's start.
            _receive(receiver, seconds / 2)
            return _receive(receiver, seconds / 2)
        finally:
            receiver.close()  # with bytes unread: the sender is told at once
            sending.join(_DEADLINE)


def _send(sender: socket.socket) -> None:
    chunk = bytes(_CHUNK)
    try:
        while True:
            sender.sendall(chunk)
    except OSError:
        return  # the receiver has seen enough


def _receive(receiver: socket.socket, seconds: float) -> float:
    buffer, total, began = bytearray(_CHUNK), 0, time.monotonic()
    while (took := time.monotonic() - began) < seconds:
        got = receiver.recv_into(buffer)
        if not got:
            raise BenchmarkFailed("the stream over the line broke")
        total += got
    return total / took
