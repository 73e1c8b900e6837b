"""The local socket: accepts the ranks of this machine, reads their messages, sends what waits."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from allfold_agent.local.rank_connection import RankConnection
from allfold_agent.runtime.reactor import READABLE, WRITABLE, Acceptor, Reactor
from allfold_core.errors import InvalidArgument, ServiceError
from allfold_core.protocol.rank_messages import MAX_MESSAGE

log = logging.getLogger(__name__)

_BACKLOG = 128
_SETTING = "--socket or ALLFOLD_SOCKET"
_DESCRIPTOR = struct.Struct("i")
# More than a socket holds: a process that is dead has sent no more than that.
_MOST_QUEUED = 4096
_ONE_DESCRIPTOR = socket.CMSG_LEN(_DESCRIPTOR.size)

Take = Callable[[RankConnection, bytes, list[int]], None]


class Listener:
    """Serves connections in the reactor's thread.

    Args:
        path: of the socket.
        reactor: calls it when something is ready.
        take: handles one message and the file descriptors that came with it, which are closed
            afterwards unless it removes them from the list. It raises ``ValueError`` or
            ``struct.error`` at what is no message; that ends the connection.
        gone: told once of each connection that has ended.

    Raises:
        InvalidArgument: the path cannot be used.
        ServiceError: another agent listens there.
    """

    def __init__(
        self, path: str, reactor: Reactor, take: Take, gone: Callable[[RankConnection], None]
    ) -> None:
        self._path = path
        self._reactor = reactor
        self._take = take
        self._gone = gone
        self._processes: dict[int, RankConnection] = {}
        self._socket = _listen(path)
        Acceptor(reactor, self._socket, self._accept, "connections of ranks")

    def close(self) -> None:
        """Remove the socket; the reactor has ended."""
        for process in self._processes.values():
            process.close()
        self._socket.close()
        Path(self._path).unlink(missing_ok=True)

    @property
    def processes(self) -> list[RankConnection]:
        """The connected processes."""
        return list(self._processes.values())

    def _accept(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        process = RankConnection(connected, self._want_write)
        self._processes[connected.fileno()] = process
        self._reactor.register(connected, lambda events: self._serve(process, events))

    def watch(self, process: RankConnection) -> None:
        """Notice the end of the process itself, even if a child of it holds its socket open.

        Only for a process that has answered since its connection was made: otherwise its process id
        might belong to another process by now.
        """
        if process.end is not None and not process.is_watched:
            process.is_watched = True
            self._reactor.register(process.end, lambda _: self._end_dead(process))

    def _end_dead(self, process: RankConnection) -> None:
        """Take in what a process has sent before it died."""
        for _ in range(_MOST_QUEUED):
            if not self._read(process):
                break
        if not process.is_closed:
            self._end(process)

    def _serve(self, process: RankConnection, events: int) -> None:
        if events & WRITABLE and process.flush():
            self._reactor.modify(process.socket, READABLE)
            if process.has_unsent:  # since then; its wish to write was just taken back
                self._want_write(process)
        if events & ~WRITABLE:
            self._read(process)

    def _want_write(self, process: RankConnection) -> None:
        try:
            self._reactor.modify(process.socket, READABLE | WRITABLE)
        except (OSError, ValueError) as error:
            log.debug("process %d is gone: %s", process.pid, error)

    def _read(self, process: RankConnection) -> bool:
        """Read one message; where more are there, the socket is still ready.

        Returns:
            True if there was one, and there may be more.
        """
        try:
            data, beside, _, _ = process.socket.recvmsg(MAX_MESSAGE, _ONE_DESCRIPTOR)
        except BlockingIOError:
            return False
        except OSError as error:
            log.debug("process %d: %s", process.pid, error)
            data, beside = b"", []
        descriptors = _descriptors(beside) if beside else []
        if not data:
            self._end(process)
            return False
        try:
            self._take(process, data, descriptors)
        except (ValueError, struct.error) as error:
            log.error("process %d does not speak our protocol: %s", process.pid, error)
            self._end(process)
            return False
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _end(self, process: RankConnection) -> None:
        # Before they are closed: the number of a closed descriptor may be that of another at once.
        self._reactor.unregister(process.socket)
        if process.end is not None and process.is_watched:
            self._reactor.unregister(process.end)
        del self._processes[process.socket.fileno()]
        process.close()
        self._gone(process)


def _descriptors(beside: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the file descriptors that came with a message; they are ours now."""
    return [
        *chain.from_iterable(
            (number for (number,) in _DESCRIPTOR.iter_unpack(data))
            for level, kind, data in beside
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        )
    ]


def _listen(path: str) -> socket.socket:
    """Listen in a folder of our own, replacing the socket that a dead agent left behind."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_dead(path)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise InvalidArgument(
            f"cannot listen on {path}: {error.strerror or error}. Choose another path with "
            f"{_SETTING}."
        ) from error
    return listener


def _remove_dead(path: str) -> None:
    """Remove a socket on which nobody listens; ``ServiceError`` where another agent does."""
    if not os.path.lexists(path):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):
        Path(path).unlink(missing_ok=True)
        return
    raise ServiceError(
        f"another agent listens on {path}. End it, or choose another path with {_SETTING}."
    )
