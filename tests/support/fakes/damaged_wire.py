"""Connections of a network that damages what it carries."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


class DamagedWire:
    """Connections over TCP through a proxy that flips one bit of each.

    Args:
        places: for each connection, which byte towards the receiver; ``None`` for a good one.
    """

    def __init__(self, places: Iterator[int | None]) -> None:
        self._places = places
        self._proxies: list[Thread] = []
        self.damaged = 0

    def connection(self) -> tuple[socket.socket, socket.socket]:
        """The receiver's end of a new connection, and the sender's."""
        sender, near = tcp_pair()
        far, receiver = tcp_pair()
        place = next(self._places)
        proxy = Thread(target=self._carry, args=(near, far, place), daemon=True)
        proxy.start()
        self._proxies.append(proxy)
        return receiver, sender

    def join(self) -> None:
        """Wait for the proxies, whose connections have ended."""
        for proxy in self._proxies:
            proxy.join(timeout=20.0)

    def _carry(self, near: socket.socket, far: socket.socket, place: int | None) -> None:
        carried = 0
        with near, far, selectors.DefaultSelector() as selector, suppress(OSError):
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    data = bytearray(key.fileobj.recv(65536))
                    if not data:
                        return
                    if key.fileobj is near:
                        if place is not None and carried <= place < carried + len(data):
                            data[place - carried] ^= 4
                            self.damaged += 1
                        carried += len(data)
                    key.data.sendall(data)
