"""The wait of a rank that leaves for the end of torch's store, whatever listens there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Thread

import pytest

from allfold.torch import _lifecycle

GIVES_UP_WITHIN_SECONDS = 5.0


@dataclass
class TCPStore:
    """As much of torch's as is looked at; its name is."""

    host: str
    port: int


class Listener:
    """Listens, and does with each connection what the test says."""

    def __init__(self, accepted: Callable[[socket.socket], None]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._accepted = accepted
        self.connections = 0
        self.store = TCPStore(*self._socket.getsockname())
        self._thread = Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            self._accepted(connection)

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self.end()
        self._thread.join(GIVES_UP_WITHIN_SECONDS)


@pytest.fixture
def kept() -> Iterator[list[socket.socket]]:
    connections: list[socket.socket] = []
    yield connections
    for connection in connections:
        connection.close()


def _seconds_until_given_up(listener: Listener) -> float:
    began = time.monotonic()
    waiting = Thread(target=_lifecycle.await_end_of, args=[listener.store], daemon=True)
    waiting.start()
    waiting.join(GIVES_UP_WITHIN_SECONDS)
    took = time.monotonic() - began
    listener.close()
    return took


def test_what_closes_every_connection_is_not_asked_for_ever() -> None:
    listener = Listener(socket.socket.close)
    assert _seconds_until_given_up(listener) < GIVES_UP_WITHIN_SECONDS
    assert 1 < listener.connections < 500


def test_a_store_that_stays_is_not_waited_for_long(kept: list[socket.socket]) -> None:
    listener = Listener(kept.append)
    assert _seconds_until_given_up(listener) < GIVES_UP_WITHIN_SECONDS
    assert listener.connections == 1


def test_the_end_of_the_store_ends_the_wait() -> None:
    def end(connection: socket.socket) -> None:
        listener.end()
        connection.close()

    listener = Listener(end)
    assert _seconds_until_given_up(listener) < _lifecycle._STORE_SECONDS / 2
