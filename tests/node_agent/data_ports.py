"""A data port that hands its edges to the test, and raw requests to it."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from allfold_agent.data_port import DataPort, SocketTaker
from allfold_agent.edges.opening import EdgeRequest
from allfold_agent.tensors.offers import Offers
from allfold_core.protocol.frames import EDGE_PROTOCOL
from tests.support.credentials import transport

TOKEN = "a-join-token"
EDGE = EdgeRequest("group/ü", 3, "node/b", "a", from_frame=7, lives=("i.3", "j.5"))
RAW_EDGE = (
    "GET /v1/groups/g/openings/3/edges/b/a HTTP/1.1\r\nHost: a\r\n"
    f"Connection: Upgrade\r\nUpgrade: {EDGE_PROTOCOL}\r\n"
)


def get(target: str) -> str:
    return f"GET {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


class Port:
    """A data port that hands the edges it granted to the test."""

    def __init__(self, **options: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.place = listener.getsockname()
        self.address = f"127.0.0.1:{self.place[1]}"
        self.tcp_address = f"localhost:{self.place[1]}"  # a name has no shortcut
        self.taken: SimpleQueue[tuple[EdgeRequest, socket.socket]] = SimpleQueue()
        self._closing = Lock()
        self._closed = False
        self.refusal: Exception | None = None
        self.greeting = b""
        options = {"token": None, "offers": Offers()} | options
        spoken = transport(options.pop("token"))
        self.server = DataPort(listener, transport=spoken, open_edge=self._open, **options)
        self.server.start()

    def _open(self, request: EdgeRequest) -> SocketTaker:
        if self.refusal:
            raise self.refusal

        def take(sock: socket.socket) -> None:
            sock.sendall(self.greeting)
            with self._closing:
                if self._closed:  # handed over after the test was over
                    sock.close()
                else:
                    self.taken.put((request, sock))

        return take

    def close(self) -> None:
        """Close the server, and every edge that the test did not take."""
        self.server.close()
        with self._closing:
            self._closed = True
            while not self.taken.empty():
                self.taken.get()[1].close()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.place, timeout=5)

    def say(self, request: str) -> tuple[int, str, bytes]:
        """Status, head and body of the answer to a raw request, read until the server closes."""
        with self.connect() as sock:
            sock.sendall(request.encode())
            return split_response(read_all(sock))


def read_all(sock: socket.socket) -> bytes:
    with suppress(ConnectionError):
        return b"".join(iter(lambda: sock.recv(65536), b""))
    return b""


def split_response(data: bytes) -> tuple[int, str, bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), body


@contextmanager
def serving(**options: Any) -> Iterator[Port]:
    port = Port(**options)
    try:
        yield port
    finally:
        port.close()


@contextmanager
def answering(response: bytes) -> Iterator[str]:
    """The address of something that answers one connection with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(response)

        thread = Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def begin(port: Port, host: str = "127.0.0.1") -> socket.socket:
    """A connection, from an address of this machine, that has had a first answer."""
    sock = socket.create_connection(port.place, timeout=5, source_address=(host, 0))
    sock.sendall(b"GET /v1/tensors/none HTTP/1.1\r\nHost: a\r\n\r\n")
    return sock


def status(sock: socket.socket) -> int:
    return split_response(sock.recv(65536))[0]
