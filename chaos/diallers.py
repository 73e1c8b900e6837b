"""The dialler of a connection: the process that has the socket at its far end.

The kernel is asked for that one socket. Its table of all of them takes tens of milliseconds to
read on a machine with many, in which a proxy would pass nothing on.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

Address = tuple[str, int]
Ends = tuple[Address, Address]
"""The two ends of a connection: the dialler's, and the one that he has dialled."""

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY, _ERROR = 20, 2
_REQUEST = 1
_ALL_STATES = _ANY_COOKIE = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, process
_INODE = struct.Struct("=68xI")  # of struct inet_diag_msg
_ANSWER_BYTES = 8192


def diallers(connections: Iterable[Ends], pids: Mapping[str, int]) -> dict[Ends, str]:
    """Return which node's process has dialled a connection, for those of which that is known."""
    inodes = {ends: inode for ends in connections if (inode := _inode(ends))}
    if not inodes:
        return {}
    owners = {inode: node for node, pid in pids.items() for inode in _sockets_of(pid)}
    return {ends: owners[inode] for ends, inode in inodes.items() if inode in owners}


def _inode(ends: Ends) -> int:
    """Return the inode of the dialler's socket; 0 if he has closed it."""
    request = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, _ALL_STATES)
    request += _socket_id(*ends)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(header + request)
        answer = kernel.recv(_ANSWER_BYTES)
    if _HEADER.unpack_from(answer)[1] == _ERROR:  # there is no such socket
        return 0
    return int(_INODE.unpack_from(answer, _HEADER.size)[0])


def _socket_id(mine: Address, peers: Address) -> bytes:
    """Return the kernel's ``struct inet_diag_sockid`` of a socket."""
    hosts = (socket.inet_aton(host).ljust(16, b"\0") for host in (mine[0], peers[0]))
    ports = struct.pack("!HH", mine[1], peers[1])
    return ports + b"".join(hosts) + struct.pack("=III", 0, _ANY_COOKIE, _ANY_COOKIE)


def _sockets_of(pid: int) -> Iterator[int]:
    """Yield the inodes of a process's sockets."""
    with suppress(OSError):  # the process is gone
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                kind, _, inode = entry.readlink().name.partition(":")
                if kind == "socket":
                    yield int(inode.strip("[]"))
