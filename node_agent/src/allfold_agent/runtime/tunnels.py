"""Connections with TLS as plain sockets, for code that reads and writes sockets by itself.

A tunnel has a plain end, one of a pair of Unix sockets, for the code; a thread moves bytes between
the other one of the pair and the connection, and encrypts and decrypts them on the way. So edges,
links and lanes know nothing of TLS. What it costs: two more threads to be woken per message, and
each byte is copied twice more.

A tunnel ends with the side that ends first, once what that side has sent is passed on: TLS cannot
end one direction alone and go on with the other. No closing alert is sent, since what comes through
tunnels has its length and its end in itself.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable
from itertools import cycle
from typing import Any

from allfold_agent.runtime.locks import make_condition
from allfold_agent.runtime.reactor import READABLE, WRITABLE, Reactor

log = logging.getLogger(__name__)

# A record of TLS has at most so many bytes. Reading never leaves a part of one in the library,
# where it would not be seen: only the kernel says what is readable.
_RECORD_BYTES = 16 * 1024
_BUFFER_BYTES = 16 * _RECORD_BYTES
_NOTHING = memoryview(b"")


class PlainEnd(socket.socket):
    """The end of a tunnel that the agent's code has.

    Attributes:
        wire: the connection beneath, whose TCP options and counters this end gives as its own.
    """

    wire: ssl.SSLSocket

    def getsockopt(self, level: int, option: int, *size: int) -> Any:
        if level == socket.IPPROTO_TCP:
            return self.wire.getsockopt(level, option, *size)
        return super().getsockopt(level, option, *size)


def crosses_a_wire(connected: socket.socket) -> bool:
    """Return True unless the two ends of a connection know that they are on one machine."""
    return connected.family != socket.AF_UNIX or isinstance(connected, PlainEnd)


class Tunnels:
    """Some threads, and the tunnels that they serve.

    Args:
        threads: how many; a connection is served by one of them.
    """

    def __init__(self, threads: int) -> None:
        self._pumps = [_Pump(f"allfold-tls-{number}") for number in range(threads)]
        self._turn = cycle(self._pumps)

    def open(self, wire: ssl.SSLSocket) -> PlainEnd:
        """Return the plain end of a connection whose handshake is done; the tunnel owns it now."""
        ours, theirs = socket.socketpair()
        end = PlainEnd(fileno=ours.detach())
        end.wire = wire
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _BUFFER_BYTES)
        for each in (wire, theirs):
            each.setblocking(False)
        next(self._turn).take(wire, theirs)
        return end

    def close(self, seconds: float) -> None:
        """End the threads, once what was written into closed tunnels is on its way, or later."""
        for pump in self._pumps:
            pump.close(seconds)


class _Pump:
    """A thread with its tunnels, and the one buffer that they take turns to use."""

    def __init__(self, name: str) -> None:
        self.reactor = Reactor(name)
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._tunnels: set[_Tunnel] = set()
        self._changed = make_condition("tunnels")
        self.reactor.start()

    def take(self, wire: ssl.SSLSocket, inner: socket.socket) -> None:
        tunnel = _Tunnel(self, wire, inner)
        with self._changed:
            self._tunnels.add(tunnel)
        self.reactor.call(tunnel.start)

    def forget(self, tunnel: _Tunnel) -> None:
        with self._changed:
            self._tunnels.discard(tunnel)
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._tunnels, seconds)
            left = list(self._tunnels)
        self.reactor.close()
        for tunnel in left:
            tunnel.drop()


class _Tunnel:
    """One connection. All of it happens in the pump's thread.

    Args:
        wire: the connection; it does not block.
        inner: the pair of the plain end; neither does it.
    """

    def __init__(self, pump: _Pump, wire: ssl.SSLSocket, inner: socket.socket) -> None:
        self._pump = pump
        self._wire = wire
        self._inner = inner
        self._to_wire = self._to_inner = _NOTHING
        self._wire_ended = self._inner_ended = False
        self._polled: dict[socket.socket, int] = {}

    def start(self) -> None:
        self._serve(self._move_in, self._move_out)

    def drop(self) -> None:
        """End both connections."""
        for each in (self._wire, self._inner):
            self._poll(each, None)
            each.close()
        self._pump.forget(self)

    def _serve_wire(self, events: int) -> None:
        moves = [self._move_out] if events & WRITABLE else []
        self._serve(*moves, *([self._move_in] if events & ~WRITABLE else []))

    def _serve_inner(self, events: int) -> None:
        moves = [self._move_in] if events & WRITABLE else []
        self._serve(*moves, *([self._move_out] if events & ~WRITABLE else []))

    def _serve(self, *moves: Callable[[], None]) -> None:
        try:
            for move in moves:
                move()
        except OSError as error:
            log.info("a connection with TLS broke: %s", error)
            self.drop()
            return
        is_over = self._inner_ended and not self._to_wire
        if is_over or (self._wire_ended and not self._to_inner):
            self.drop()
        else:
            self._poll_both()

    # From the wire

    def _move_in(self) -> None:
        """Decrypt what has come, as much as one buffer takes."""
        if not self._deliver() or self._wire_ended:
            return
        buffer, filled = self._pump.buffer, 0
        try:
            while len(buffer) - filled >= _RECORD_BYTES:
                count = self._wire.recv_into(buffer[filled:])
                filled += count
                if not count:
                    self._wire_ended = True
                    break
        except ssl.SSLWantReadError:
            pass
        except OSError as error:  # what has come before is passed on all the same
            log.info("a connection with TLS broke: %s", error)
            self._wire_ended = True
        self._to_inner = buffer[:filled]
        if not self._deliver():  # the buffer is for other tunnels, too
            self._to_inner = memoryview(bytes(self._to_inner))

    def _deliver(self) -> bool:
        """Pass on what was decrypted; return True if nothing is left."""
        try:
            while self._to_inner:
                self._to_inner = self._to_inner[self._inner.send(self._to_inner) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:  # nobody reads it; what was written before is still to be sent
            self._to_inner = _NOTHING
        return True

    # To the wire

    def _move_out(self) -> None:
        """Encrypt what was written, as much as one buffer takes."""
        if not self._encrypt() or self._inner_ended:
            return
        buffer = self._pump.buffer
        try:
            count = self._inner.recv_into(buffer)
        except BlockingIOError:
            return
        self._inner_ended = count == 0
        self._to_wire = buffer[:count]
        if not self._encrypt():
            self._to_wire = memoryview(bytes(self._to_wire))

    def _encrypt(self) -> bool:
        """Send what was written; return True if nothing is left."""
        try:
            while self._to_wire:
                self._to_wire = self._to_wire[self._wire.send(self._to_wire) :]
        except ssl.SSLWantWriteError:
            return False
        return True

    # Waiting. The kernel tells unasked that a connection has ended, and again and again: one that
    # has nothing to be done for it is not polled.

    def _poll_both(self) -> None:
        reads_wire = not self._wire_ended and not self._to_inner
        reads_inner = not self._inner_ended and not self._to_wire
        self._poll(self._wire, READABLE * reads_wire | WRITABLE * bool(self._to_wire) or None)
        self._poll(self._inner, READABLE * reads_inner | WRITABLE * bool(self._to_inner) or None)

    def _poll(self, sock: socket.socket, events: int | None) -> None:
        """Wait for these events; for ``None`` not at all."""
        reactor, before = self._pump.reactor, self._polled.get(sock)
        if events == before:
            return
        if events is None:
            reactor.unregister(sock)
            del self._polled[sock]
        elif before is None:
            serve = self._serve_wire if sock is self._wire else self._serve_inner
            reactor.register(sock, serve, events)
            self._polled[sock] = events
        else:
            reactor.modify(sock, events)
            self._polled[sock] = events
