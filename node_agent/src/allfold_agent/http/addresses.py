"""The addresses of other agents, and those under which others reach this one."""

from __future__ import annotations

import re
import socket
from ipaddress import IPv6Address
from urllib.parse import urlsplit

from allfold_core.errors import InvalidArgument, ServiceError
from allfold_service.addresses import join, split

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
