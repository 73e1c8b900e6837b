"""The addresses that a service listens on: ``host:port``."""

from __future__ import annotations

import errno
import socket

from allfold_core.errors import InvalidArgument, ServiceError

_BACKLOG = 2048


def split(address: str) -> tuple[str, int]:
    """Return host and port of an address to listen on; port 0 means any free port.

    Raises:
        InvalidArgument: it is not ``host:port``.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and int(port) < 65536):
        raise InvalidArgument(f"must be host:port, got {address!r}")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """``host:port``, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(address: str, setting: str) -> socket.socket:
    """Return a listening socket for ``host:port``; port 0 takes any free port.

    Args:
        setting: how the address is set, for the error: ``--data or ALLFOLD_AGENT_DATA_LISTEN``.

    Raises:
        ServiceError: that is no address of this machine, or the port is in use.
    """
    try:
        return _listener(*split(address))
    except OSError as error:
        other_way = ", or end what listens there" if error.errno == errno.EADDRINUSE else ""
        raise ServiceError(
            f"cannot listen on {address}: {error.strerror}. Choose another address with "
            f"{setting}{other_way}.",
            address=address,
        ) from error


def _listener(host: str, port: int) -> socket.socket:
    places = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
    # Of a name with both, as localhost often is: where there is no IPv6, its IPv4 address works.
    places.sort(key=lambda place: place[0] != socket.AF_INET)
    family, kind, protocol, _, place = places[0]
    # asyncio sets TCP_NODELAY where it sees that a socket is of TCP. Without it answers on a kept
    # connection wait 40 ms for an ACK, as their heads and bodies are written apart.
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def bound(listener: socket.socket) -> tuple[str, int]:
    """Return host and port to which a listener is bound."""
    host, port = listener.getsockname()[:2]
    return host, port
