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
import select
import socket
import ssl
from collections.abc import Callable
from itertools import cycle
from time import monotonic
from typing import Any

from allfold_agent.runtime.locks import make_condition
from allfold_agent.runtime.reactor import READABLE, WRITABLE, Reactor

log = logging.getLogger(__name__)

# A record of TLS has at most so many bytes. Reading never leaves a part of one in the library,
# where it would not be seen: only the kernel says what is readable.
_RECORD_BYTES = 16 * 1024
_BUFFER_BYTES = 16 * _RECORD_BYTES
_NOTHING = memoryview(b"")
_STALL_SECONDS = 30.0


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
        stall_seconds: a peer that takes nothing for so long loses what a closed plain end has left
            for it. Who still has the plain end decides on that by itself.
    """

    def __init__(self, threads: int, stall_seconds: float = _STALL_SECONDS) -> None:
        names = (f"allfold-tls-{number}" for number in range(threads))
        self._pumps = [_Pump(name, stall_seconds) for name in names]
        self._turn = cycle(self._pumps)

    def open(self, wire: ssl.SSLSocket) -> PlainEnd:
        """Return the plain end of a connection whose handshake is done; the tunnel owns it now.

        Raises:
            OSError: there is no file descriptor left for it.
        """
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
        deadline = monotonic() + seconds
        for pump in self._pumps:
            pump.close(deadline)


class _Pump:
    """A thread with its tunnels, and the one buffer that they take turns to use."""

    def __init__(self, name: str, stall_seconds: float) -> None:
        self.reactor = Reactor(name)
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._stall_seconds = stall_seconds
        self._tunnels: set[_Tunnel] = set()
        self._changed = make_condition("tunnels")
        self._closed = False
        self.reactor.start()
        self.reactor.later(stall_seconds, self._look_for_stalled)

    def take(self, wire: ssl.SSLSocket, inner: socket.socket) -> None:
        """Serve a connection; after :meth:`close`, end it."""
        tunnel = _Tunnel(self, wire, inner)
        with self._changed:
            is_late = self._closed
            if not is_late:
                self._tunnels.add(tunnel)
        if is_late:
            tunnel.close()
        else:
            self.reactor.call(tunnel.start)

    def forget(self, tunnel: _Tunnel) -> None:
        with self._changed:
            self._tunnels.discard(tunnel)
            self._changed.notify_all()

    def close(self, deadline: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._tunnels, max(0.0, deadline - monotonic()))
        self.reactor.close()
        for tunnel in list(self._tunnels):
            tunnel.close()

    def _look_for_stalled(self) -> None:
        with self._changed:
            tunnels = list(self._tunnels)
        for tunnel in tunnels:
            tunnel.drop_if_stalled()
        self.reactor.later(self._stall_seconds, self._look_for_stalled)


class _Tunnel:
    """One connection. All of it happens in the pump's thread, or after that has ended.

    Args:
        wire: the connection; it does not block.
        inner: the pair of the plain end; neither does it.
    """

    def __init__(self, pump: _Pump, wire: ssl.SSLSocket, inner: socket.socket) -> None:
        self._pump = pump
        self._wire = wire
        self._inner = inner
        self._to_wire = self._to_inner = _NOTHING
        # Of the wire, no more is to be read; to it, nothing can be written any more.
        self._wire_ended = self._wire_broken = False
        self._inner_ended = False
        self._has_sent = False
        self._polled: dict[socket.socket, int] = {}

    def start(self) -> None:
        self._serve(self._move_in, self._move_out)

    def close(self) -> None:
        """Close both connections, which nobody polls any more."""
        self._wire.close()
        self._inner.close()
        self._pump.forget(self)

    def drop_if_stalled(self) -> None:
        """End if the peer has taken nothing since the last call, and nobody here cares any more."""
        if self._to_wire and not self._has_sent and _is_closed_beyond(self._inner):
            log.info("a connection with TLS is given up: its peer does not take what was sent")
            self._drop()
        self._has_sent = False

    def _drop(self) -> None:
        self._poll(self._wire, None)
        self._poll(self._inner, None)
        self.close()

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
            _log_break(error)
            self._drop()
            return
        all_sent = self._inner_ended and not self._to_wire and not self._wire_broken
        if all_sent or (self._wire_ended and not self._to_inner):
            self._drop()
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
            _log_break(error)
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
        except (BrokenPipeError, ConnectionResetError):
            # Nobody reads it; what was written before is still to be sent.
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
        except ConnectionResetError:  # closed, with bytes that it has not read
            count = 0
        self._inner_ended = count == 0
        self._to_wire = buffer[:count]
        if not self._encrypt():
            self._to_wire = memoryview(bytes(self._to_wire))

    def _encrypt(self) -> bool:
        """Send what was written; return True if nothing is left."""
        try:
            while self._to_wire:
                self._to_wire = self._to_wire[self._wire.send(self._to_wire) :]
                self._has_sent = True
        except ssl.SSLWantWriteError:
            return False
        except OSError as error:  # the peer's last words, which may say why, are still to be read
            _log_break(error)
            self._to_wire = _NOTHING
            self._wire_broken = self._inner_ended = True
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


def _is_closed_beyond(inner: socket.socket) -> bool:
    """Return True if the other one of a pair is closed, whatever is still to be read of it."""
    poll = select.poll()
    poll.register(inner, 0)  # the kernel tells of the end unasked
    return bool(poll.poll(0))


def _log_break(error: OSError) -> None:
    log.info("a connection with TLS broke: %s", error)
