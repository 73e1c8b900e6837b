"""The rate of the link itself: one TCP stream from a node to the next, and nothing else."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack

from benchmarks.errors import BenchmarkFailed
from benchmarks.network.links import address
from benchmarks.network.namespaces import Namespaces, entered

_SECONDS = 3.0
_DEADLINE = 30.0
_CHUNK = 1 << 20


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
