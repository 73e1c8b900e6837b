"""Addresses: URLs of services, ``host:port``, the agent's socket, how others reach a listener."""

from __future__ import annotations

import errno
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from ipaddress import IPv6Address
from urllib.parse import urlsplit

from allfold_core.errors import InvalidArgument, ServiceError


def service_url(given: str, *, has_tls: bool) -> str:
    """Return the URL of a service, without a slash at its end; ``host:port`` alone is enough.

    The scheme is in lower case.

    Args:
        has_tls: True where there is a certificate: then everything goes through TLS, or the token
            would be sent in the clear.

    Raises:
        InvalidArgument: it is no URL, not one of HTTP, not one of HTTPS with TLS, or has a query or
            a fragment. The text begins with "must": the name of the setting belongs before it.
    """
    scheme = "https" if has_tls else "http"
    url = f"{scheme}://{given}" if ":" in given and "://" not in given else given
    try:
        parts = urlsplit(url)
        port = parts.port  # of a bad one, urlsplit complains only now
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    except ValueError:
        usable = False
    if not usable or any(each.isspace() or not each.isprintable() for each in given):
        raise InvalidArgument(f"must be an address such as {scheme}://10.0.0.1:7400, got {given!r}")
    if has_tls and parts.scheme == "http":
        raise InvalidArgument(
            f"must begin with https:// where ALLFOLD_TLS_DIR is set, got {given!r}"
        )
    if "?" in url or "#" in url:
        raise InvalidArgument(
            f"must have no query and no fragment, as paths are added to it, got {given!r}: leave "
            "out what begins with ? or #"
        )
    return (parts.scheme + url[len(parts.scheme) :]).rstrip("/")


_WILDCARDS = ("0.0.0.0", "::", "")
_HOST = re.compile(r"[^\s/:@?#\[\]]{1,253}")


def is_wildcard(address: str) -> bool:
    """Return True if whoever listens there is reached at every address of this machine."""
    return split(address)[0] in _WILDCARDS


def checked_host(host: str) -> str:
    """Return a host name or an IP address; an IPv6 address stands without brackets.

    Raises:
        InvalidArgument: it is neither, or has a scheme or a port.
    """
    try:
        usable = bool(IPv6Address(host) if ":" in host else _HOST.fullmatch(host))
    except ValueError:
        usable = False
    if not usable:
        raise InvalidArgument(
            f"must be a host name or an IP address, without scheme and port, got {host!r}"
        )
    return host


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host stands in brackets."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidArgument(f"address {address!r}: an IPv6 host needs brackets", address=address)
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidArgument(f"address {address!r} is not host:port", address=address)
    return host, int(port)


def local(bound: tuple[str, int]) -> str:
    """Return the address of a listener as seen from this machine."""
    host, port = bound
    return join("127.0.0.1" if host in _WILDCARDS else host, port)


def advertised(bound: tuple[str, int], host: str, orchestrator: str) -> str:
    """Return the address of a listener as seen from other machines.

    Args:
        bound: host and port to which it is bound.
        host: what the user says it is; else the host that the listener is bound to; else, for a
            wildcard, the source address of a packet to the orchestrator. The kernel is asked for
            it, never the host name; connecting a datagram socket sends nothing.
        orchestrator: its URL.

    Raises:
        ServiceError: the orchestrator's name cannot be resolved (yet).
    """
    bound_host, port = bound
    if host or bound_host not in _WILDCARDS:
        return join(host or bound_host, port)
    target = urlsplit(orchestrator)
    try:
        found = socket.getaddrinfo(target.hostname, target.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return join(str(probe.getsockname()[0]), port)
    except OSError as error:
        raise ServiceError(
            f"waiting for DNS: no way to {target.hostname} yet ({error}); the own address can "
            "also be named with --advertise or ALLFOLD_AGENT_ADVERTISE"
        ) from error


_BACKLOG = 2048
_INHERITED = re.compile(r"fd://([0-9]{1,7})")


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


def is_inherited(address: str) -> bool:
    """Return True for ``fd://N``: a socket that this process has had from its beginning."""
    return _INHERITED.fullmatch(address) is not None


def bind(address: str, setting: str) -> socket.socket:
    """Return a listening socket for ``host:port``; port 0 takes any free port.

    Args:
        address: or ``fd://N``, a bound socket that this process has inherited.
        setting: how the address is set, for the error: ``--data or ALLFOLD_AGENT_DATA_LISTEN``.

    Raises:
        ServiceError: that is no address of this machine, or the port is in use; or what was
            inherited is no socket that can listen.
    """
    try:
        if found := _INHERITED.fullmatch(address):
            return _inherited(int(found[1]))
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


def _inherited(descriptor: int) -> socket.socket:
    listener = socket.socket(fileno=descriptor)
    try:
        listener.set_inheritable(False)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def bound(listener: socket.socket) -> tuple[str, int]:
    """Return host and port to which a listener is bound."""
    host, port = listener.getsockname()[:2]
    return host, port


def default_socket(environment: Mapping[str, str] = os.environ) -> str:
    """Return the default path of the socket of an agent and its ranks, in a folder of this user's.

    ``XDG_RUNTIME_DIR`` may have come along from another machine or another user, as with ``srun``
    and ``su``: it counts where this user can use it.
    """
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return f"{runtime}/allfold/agent.sock"
    return f"{tempfile.gettempdir()}/allfold-{os.getuid()}/agent.sock"
