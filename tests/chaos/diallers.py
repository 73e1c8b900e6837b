"""Who has dialled a connection: the process that has the socket with its port."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path


def diallers(ports: Iterable[int], pids: Mapping[str, int]) -> dict[int, str]:
    """Return the nodes whose processes have the sockets with these local ports."""
    owners = {inode: node for node, pid in pids.items() for inode in _sockets_of(pid)}
    inodes = _inodes()
    return {port: owners[inodes[port]] for port in ports if inodes.get(port) in owners}


def _sockets_of(pid: int) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    with suppress(OSError):  # the process is gone
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                kind, _, inode = entry.readlink().name.partition(":")
                if kind == "socket":
                    yield inode.strip("[]")


def _inodes() -> dict[int, str]:
    """Return the inodes of all TCP sockets, by local port; those in TIME_WAIT have none."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split(None, 10) for line in lines]
    return {int(row[1][-4:], 16): row[9] for row in rows if row[9] != "0"}
