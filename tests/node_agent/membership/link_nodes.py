"""Nodes with links between them: real data ports and reactors, in one process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, Thread
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from allfold_agent.data_port import DataPort
from allfold_agent.http.client import upgrade
from allfold_agent.membership.link import LinkListener
from allfold_agent.membership.link_dialling import DIAL_SECONDS, Dialled, LinkRequest
from allfold_agent.membership.links import PeerLinks
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.tensors.offers import Offers
from allfold_core.errors import AllfoldError
from allfold_core.protocol.peer_link import (
    LINK_PROTOCOL,
    Floor,
    GroupMessage,
    GroupProgress,
    LinkMessageType,
    LinkReader,
)
from allfold_core.survival.suspicion import Observation
from tests.support.credentials import transport
from tests.support.waiting import wait_until

SECONDS = 20.0
TOKEN = "a-join-token"
T = TypeVar("T")


class Recorder(LinkListener):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.messages: list[tuple[str, GroupMessage]] = []
        self.said: Sequence[GroupProgress] = ()
        self.known: Sequence[Floor] = ()
        self.progress_of: dict[str, Sequence[GroupProgress]] = {}
        self.floors_of: dict[str, Sequence[Floor]] = {}

    def on_up(self, node: str, incarnation: str) -> None:
        self.events.append(("up", node, incarnation))

    def on_down(self, node: str, refused: bool) -> None:
        self.events.append(("down", node, refused))

    def on_message(self, node: str, message: GroupMessage) -> None:
        self.messages.append((node, message))

    def progress(self, node: str) -> Sequence[GroupProgress]:
        return self.said

    def on_progress(self, node: str, progress: Sequence[GroupProgress]) -> None:
        self.progress_of[node] = progress

    def floors(self, node: str) -> Sequence[Floor]:
        return self.known

    def on_floors(self, node: str, floors: Sequence[Floor]) -> None:
        self.floors_of[node] = floors


class Node:
    """An agent's links, with a reactor and a data port of their own.

    Attributes:
        sockets: all connections that it has dialled or accepted.
        before_dial: called in the thread of each dial.
        refused: the requests of dials that have come to nothing.
    """

    def __init__(self, name: str, incarnation: str = "life-1", port: int = 0) -> None:
        self.name = name
        self.incarnation = incarnation
        self.heard = Recorder()
        self.sockets: list[socket.socket] = []
        self.refused: list[LinkRequest] = []
        self.before_dial: Callable[[], object] = lambda: None
        self.reactor = Reactor(f"reactor-{name}")
        self.links = PeerLinks(name, incarnation, self.reactor, self._dial, self.heard)
        listener = socket.create_server(("127.0.0.1", port))
        self.port = listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.data = DataPort(
            listener,
            transport=transport(TOKEN),
            open_edge=lambda _: socket.socket.close,
            open_link=self._open,
            offers=Offers(),
        )
        self.data.start()
        self.reactor.start()

    def _dial(self, address: str, target: str) -> Dialled:
        self.before_dial()
        try:
            dialled = upgrade(transport(TOKEN), address, target, LINK_PROTOCOL, DIAL_SECONDS)
        except AllfoldError:
            self.refused.append(LinkRequest.parse(dict(parse_qsl(urlsplit(target).query))))
            raise
        self.sockets.append(dialled[0])
        return dialled

    def _open(self, request: LinkRequest) -> Callable[[socket.socket], None]:
        take = self.links.open(request)

        def note(connected: socket.socket) -> None:
            self.sockets.append(connected)
            take(connected)

        return note

    def close(self) -> None:
        self.reactor.close()
        self.links.close()
        self.data.close()

    def in_reactor(self, call: Callable[[], T]) -> T:
        """The result of a call in the reactor's thread."""
        results: list[T] = []
        self.reactor.call(lambda: results.append(call()))
        wait_until(lambda: results, f"an answer of the reactor of {self.name}", SECONDS)
        return results[0]

    def observe(self, node: str) -> Observation:
        return self.in_reactor(lambda: observe(self, node))

    def open_sockets(self) -> list[socket.socket]:
        return [each for each in list(self.sockets) if each.fileno() >= 0]

    def await_connections(self, number: int) -> None:
        wait_until(
            lambda: len(self.open_sockets()) == number,
            f"{number} connections of {self.name}, not {len(self.open_sockets())}",
            SECONDS,
        )

    def await_refusal(self, node: str, incarnation: str) -> None:
        """Wait until a dial for a life of a node was refused, and that is known."""
        request = LinkRequest(node, incarnation)
        wait_until(lambda: request in list(self.refused), f"a refusal of {request}", SECONDS)
        self.links._links[node].join()
        self.in_reactor(lambda: None)

    def await_messages(self, sender: str, number: int) -> None:
        """Wait for so many messages of a node."""
        wait_until(lambda: len(self.bodies(sender)) >= number, f"messages of {sender}", SECONDS)

    def is_up(self, node: str) -> bool:
        return self.in_reactor(lambda: self.links.is_up(node))

    def knows(self, node: str) -> bool:
        """Return True while there is anything between the two."""
        return self.in_reactor(lambda: self.links.observe(node)) is not None

    def count(self, *event: object) -> int:
        """Return the number of events that begin with these values."""
        return sum(each[: len(event)] == event for each in list(self.heard.events))

    def await_event(self, *event: object, times: int = 1) -> None:
        wait_until(
            lambda: self.count(*event) >= times,
            f"{self.name} is told {event} {times} times, not only {self.heard.events}",
            SECONDS,
        )

    def bodies(self, sender: str) -> list[dict[str, Any]]:
        return [message.body for node, message in list(self.heard.messages) if node == sender]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The reactor does nothing meanwhile."""
        began, go_on = Event(), Event()

        def pause() -> None:
            began.set()
            go_on.wait(SECONDS)

        self.reactor.call(pause)
        assert began.wait(SECONDS)
        try:
            yield
        finally:
            go_on.set()


def observe(node: Node, other: str) -> Observation:
    """Return a node's observation of another one. Call it in the reactor's thread."""
    seen = node.links.observe(other)
    assert seen is not None
    return seen


@contextmanager
def nodes(*names: str) -> Iterator[list[Node]]:
    made: list[Node] = []
    try:
        made.extend(Node(name) for name in names)
        yield made
    finally:
        for node in made:
            node.close()


def link(*linked: Node) -> None:
    """Have all of them want links to all others, and wait for those."""
    for node in linked:
        for other in linked:
            if other is not node:
                node.links.want(other.name, other.address, other.incarnation)
    for node in linked:
        for other in linked:
            if other is not node:
                node.await_event("up", other.name)


def message(number: int, text: str = "") -> bytes:
    body = {"number": number, "text": text}
    return GroupMessage(LinkMessageType.DOUBT, "train", 1, body).pack()


class Stranger:
    """A peer that says what the test wants, over a connection that it has dialled."""

    def __init__(self, node: Node) -> None:
        target = LinkRequest(node.name).target
        self.socket, early = upgrade(transport(TOKEN), node.address, target, LINK_PROTOCOL, SECONDS)
        self.socket.settimeout(SECONDS)
        self._reader = LinkReader()
        self._read = list(self._reader.feed(early))

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, *messages: bytes) -> None:
        self.socket.sendall(b"".join(messages))

    def hear(self) -> object:
        """The next message; ``None`` where the connection is over."""
        while not self._read:
            with suppress(ConnectionResetError):
                if data := self.socket.recv(65536):
                    self._read += self._reader.feed(data)
                    continue
            return None
        return self._read.pop(0)

    def hears_the_end(self) -> bool:
        while self.hear() is not None:
            pass
        return True


class Wire:
    """A relay before a node. What it relays can vanish, without an end of the connections."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._swallows = Event()  # of the connections that there are
        self._ends: list[socket.socket] = []
        self._threads: list[Thread] = []
        self._acceptor = Thread(target=self._accept)
        self._acceptor.start()

    def swallow(self) -> None:
        """Let nothing more through on present connections; later ones are relayed."""
        self._swallows.set()
        self._swallows = Event()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._node.port))
                self._ends += [near, far]
                for source, target in ((near, far), (far, near)):
                    arguments = (source, target, self._swallows)
                    thread = Thread(target=self._relay, args=arguments)
                    self._threads.append(thread)
                    thread.start()

    def _relay(self, source: socket.socket, target: socket.socket, swallows: Event) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not swallows.is_set():
                    target.sendall(data)
            if not swallows.is_set():
                target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(SECONDS)
        for each in self._ends:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(SECONDS)
        for each in (self._listener, *self._ends):
            each.close()


def await_one_connection(*linked: Node) -> None:
    """Wait until there is one connection between two nodes, and it carries messages both ways."""
    for node in linked:
        node.await_connections(1)
    for node, other in (linked, linked[::-1]):
        carries = partial(_carries, node, other, len(other.bodies(node.name)))
        wait_until(carries, f"messages of {node.name}", SECONDS)


def _carries(node: Node, other: Node, before: int) -> bool:
    """Send once more, as one connection may just take another's place; True if anything came."""
    node.links.send(other.name, message(99))
    return len(other.bodies(node.name)) > before
