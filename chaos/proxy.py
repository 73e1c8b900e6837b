"""A TCP proxy in front of the agents' ports, which breaks connections in every way that is asked.

A fault can be that of one direction between two nodes: when there is one, the proxy finds out which
node has dialled each connection. It runs as a process and obeys its standard input:

    python -m chaos.proxy
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from chaos.diallers import Ends, diallers

Pair = tuple[str, str]
"""A direction: from one node to another; the name is empty where no node is known."""

_CHUNK = 1 << 16
_BUFFER_BYTES = 1 << 18
_TICK_SECONDS = 0.01
# What comes before is the head of an HTTP request or response, which has no checksum of its own.
_HEAD_BYTES = 2048
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Route:
    """One port: where the proxy listens, and where it leads.

    Attributes:
        framed: its bytes have checksums, so that they may be flipped.
        was_reached: the agent has listened there. Before, others may dial the one that was there.
    """

    node: str
    listener: socket.socket
    target: tuple[str, int]
    framed: bool
    was_reached: bool = False


@dataclass(eq=False)
class Flow:
    """One direction of a connection. Until somebody asks, nobody knows between which nodes."""

    source: socket.socket
    target: socket.socket
    pair: Pair
    buffer: bytearray = field(default_factory=bytearray)
    passed: int = 0
    ended: bool = False
    flip: bool = False


@dataclass(eq=False)
class Connection:
    """Two sockets, and the bytes between them in both directions.

    Attributes:
        ends: the address of the one who has dialled, and the one that he has dialled.
        flows: away from him, and to him.
    """

    route: Route
    ends: Ends
    flows: tuple[Flow, Flow]
    is_known: bool = False

    def dialled_by(self, node: str) -> None:
        """Note who has dialled it."""
        self.is_known = True
        self.flows[0].pair, self.flows[1].pair = (node, self.route.node), (self.route.node, node)

    @property
    def sockets(self) -> tuple[socket.socket, socket.socket]:
        return self.flows[0].source, self.flows[0].target


@dataclass
class Rules:
    """The faults in force, by direction."""

    blocked: set[Pair] = field(default_factory=set)
    rates: dict[Pair, float] = field(default_factory=dict)
    allowance: dict[Pair, float] = field(default_factory=dict)

    @property
    def in_force(self) -> bool:
        return bool(self.blocked or self.rates)

    def room(self, pair: Pair) -> int:
        """Return how many bytes may pass in a direction now."""
        if pair in self.blocked:
            return 0
        return int(self.allowance.get(pair, 0.0)) if pair in self.rates else _CHUNK

    def refill(self, seconds: float) -> None:
        """Let more bytes pass where the rate is limited."""
        for pair, rate in self.rates.items():
            more = self.allowance.get(pair, 0.0) + rate * seconds
            self.allowance[pair] = min(more, max(rate * 4 * _TICK_SECONDS, 1.0))


class Proxy:
    """All routes and connections, in one thread. ``commands`` carries lines of JSON."""

    def __init__(self, commands: socket.socket) -> None:
        self._commands = commands
        self._unread = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(commands, selectors.EVENT_READ)
        self._routes: list[Route] = []
        self._pids: dict[str, int] = {}
        self._connections: set[Connection] = set()
        self._rules = Rules()
        self._bytes = 0
        self._open = True

    def run(self) -> None:
        """Work until the commands end."""
        before = monotonic()
        while self._open:
            timeout = _TICK_SECONDS if self._rules.rates else None
            for key, events in self._selector.select(timeout):
                self._on_ready(key, events)
            now = monotonic()
            if self._rules.rates and now >= before + _TICK_SECONDS:
                self._rules.refill(now - before)
                self._watch_all()
                before = now
        self._close()

    def _on_ready(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._commands:
            self._obey_all()
        elif isinstance(key.data, Route):
            self._accept(key.data)
        elif key.data in self._connections:
            self._move(key.data)

    # Connections

    def _accept(self, route: Route) -> None:
        try:
            client, address = route.listener.accept()
        except OSError:
            return
        server = socket.socket()
        try:
            server.connect(route.target)
        except OSError:
            server.close()
            if route.was_reached:
                # As when there were no proxy: this dial is refused, and so is every later one.
                self._stop_listening(route)
            _reset(client)
            return
        route.was_reached = True
        for each in (client, server):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        forth, back = ("", route.node), (route.node, "")
        flows = Flow(client, server, forth), Flow(server, client, back)
        connection = Connection(route, (address, client.getsockname()), flows)
        self._connections.add(connection)
        if self._rules.in_force:
            self._find_diallers()
        self._watch(connection)

    def _find_diallers(self) -> None:
        """Note who has dialled what."""
        unknown = [each for each in self._connections if not each.is_known]
        found = diallers([each.ends for each in unknown], self._pids)
        for connection in unknown:
            if connection.ends in found:
                connection.dialled_by(found[connection.ends])

    def _move(self, connection: Connection) -> None:
        try:
            for flow in connection.flows:
                self._read(flow)
                self._write(flow)
        except OSError:
            self._drop(connection)
            return
        if all(flow.ended and not flow.buffer for flow in connection.flows):
            self._drop(connection, reset=False)
        else:
            self._watch(connection)

    def _read(self, flow: Flow) -> None:
        if not self._may_read(flow):
            return
        with suppress(BlockingIOError):
            data = flow.source.recv(min(_CHUNK, self._rules.room(flow.pair)))
            flow.ended = not data
            flow.buffer += data
            if flow.ended and not flow.buffer:
                flow.target.shutdown(socket.SHUT_WR)
            if flow.pair in self._rules.rates:
                self._rules.allowance[flow.pair] -= len(data)
            if flow.flip and flow.passed > _HEAD_BYTES and len(data) > 1:
                flow.buffer[-len(data) // 2] ^= 0x10
                flow.flip = False

    def _write(self, flow: Flow) -> None:
        if not flow.buffer or flow.pair in self._rules.blocked:
            return
        with suppress(BlockingIOError):
            sent = flow.target.send(flow.buffer)
            del flow.buffer[:sent]
            flow.passed += sent
            self._bytes += sent
            if flow.ended and not flow.buffer:
                flow.target.shutdown(socket.SHUT_WR)

    def _may_read(self, flow: Flow) -> bool:
        has_room = len(flow.buffer) < _BUFFER_BYTES and self._rules.room(flow.pair) > 0
        return has_room and not flow.ended

    def _watch_all(self) -> None:
        for connection in self._connections:
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Wait for what can be done. A socket with nothing to do is not watched at all."""
        wanted: Counter[socket.socket] = Counter(dict.fromkeys(connection.sockets, 0))
        for flow in connection.flows:
            if self._may_read(flow):
                wanted[flow.source] |= selectors.EVENT_READ
            if flow.buffer and flow.pair not in self._rules.blocked:
                wanted[flow.target] |= selectors.EVENT_WRITE
        known = self._selector.get_map()
        for each, events in wanted.items():
            if each not in known and events:
                self._selector.register(each, events, connection)
            elif each in known and not events:
                self._selector.unregister(each)
            elif each in known and known[each].events != events:
                self._selector.modify(each, events, connection)

    def _drop(self, connection: Connection, *, reset: bool = True) -> None:
        self._connections.discard(connection)
        for each in connection.sockets:
            if each in self._selector.get_map():
                self._selector.unregister(each)
            if reset:
                _reset(each)
            else:
                each.close()

    # Commands

    def _obey_all(self) -> None:
        data = self._commands.recv(1 << 16)
        if not data:
            self._open = False
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            answer = self._obey(**json.loads(line))
            self._commands.sendall(json.dumps(answer).encode() + b"\n")

    def _obey(self, do: str, **arguments: Any) -> Any:
        pairs = {(one, other) for one, other in arguments.pop("pairs", [])}
        if pairs:
            self._find_diallers()
        match do:
            case "listen":
                return self._listen(**arguments)
            case "refuse":
                self._refuse(**arguments)
            case "block":
                self._rules.blocked |= pairs
            case "open":
                self._rules.blocked -= pairs
                for pair in pairs:
                    self._rules.rates.pop(pair, None)
            case "rate":
                self._rules.rates |= dict.fromkeys(pairs, arguments["rate"])
            case "reset":
                return self._break(pairs)
            case "flip":
                return self._flip(pairs)
            case "bytes":
                return self._bytes
            case _:
                raise ValueError(f"no command {do!r}")
        self._watch_all()
        return None

    def _listen(self, node: str, pid: int, routes: Iterable[tuple[str, str, bool]]) -> None:
        self._refuse(node)
        self._pids[node] = pid
        for address, target, framed in routes:
            listener = socket.create_server(_split(address), backlog=64)
            listener.setblocking(False)
            route = Route(node, listener, _split(target), framed)
            self._routes.append(route)
            self._selector.register(listener, selectors.EVENT_READ, route)

    def _refuse(self, node: str) -> None:
        for route in self._of_node(node):
            self._stop_listening(route)

    def _of_node(self, node: str) -> list[Route]:
        return [route for route in self._routes if route.node == node]

    def _stop_listening(self, route: Route) -> None:
        self._routes.remove(route)
        self._selector.unregister(route.listener)
        route.listener.close()

    def _break(self, pairs: set[Pair]) -> int:
        """Reset the connections between nodes, in whichever direction; how many."""
        found = [each for each in self._connections if {f.pair for f in each.flows} & pairs]
        for connection in found:
            self._drop(connection)
        return len(found)

    def _flip(self, pairs: set[Pair]) -> int:
        """Flip a bit of what passes next on each connection of a direction; on how many."""
        framed = [each for each in self._connections if each.route.framed]
        found = [flow for each in framed for flow in each.flows if flow.pair in pairs]
        for flow in found:
            flow.flip = True
        return len(found)

    def _close(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        for route in list(self._routes):
            self._stop_listening(route)
        self._selector.close()


def _reset(each: socket.socket) -> None:
    with suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    each.close()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def main() -> None:
    """Obey the socket that is standard input until it ends."""
    with socket.socket(fileno=0) as commands:
        Proxy(commands).run()


if __name__ == "__main__":
    main()
