"""The ranks' output on ours: whole lines, each with its rank in front."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

_LONGEST_LINE = 64 * 1024
# A pipe that is writable takes this much without blocking.
_PIECE = select.PIPE_BUF
# Readable on dark and on light: cyan, magenta, green, yellow, blue, red.
_COLOURS = (36, 35, 32, 33, 34, 31)


class LineCutter:
    """Cuts a stream of bytes into lines. A carriage return ends one too: progress bars use it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, with their ends."""
        lines = (self._rest + data).splitlines(keepends=True)
        self._rest = b""
        # A \r at the very end may be half of a \r\n.
        if lines and not lines[-1].endswith(b"\n"):
            self._rest = lines.pop()
        if len(self._rest) > _LONGEST_LINE:
            lines += self.close()
        return lines

    def close(self) -> list[bytes]:
        """The last line, ended even where the stream did not end it."""
        rest, self._rest = self._rest, b""
        if not rest:
            return []
        return [rest if rest.endswith(b"\r") else rest + b"\n"]


class Output:
    """One of our streams, shared by all ranks. It never blocks: what the reader does not take
    yet is kept, and the launcher reads no more of the ranks while something is kept.
    """

    def __init__(self, fd: int, *, prefix: bool = True) -> None:
        self._fd = fd
        self._prefix = prefix
        self._colour = prefix and os.isatty(fd) and not os.environ.get("NO_COLOR")
        self._kept = bytearray()

    def fileno(self) -> int:
        return self._fd

    @property
    def clogged(self) -> bool:
        """True while the reader has not taken everything."""
        return bool(self._kept)

    def write(self, rank: int, lines: Iterable[bytes]) -> None:
        """Write lines of a rank; BrokenPipeError when nobody reads any more."""
        head = self._head(rank)
        self._kept += b"".join(head + line for line in lines)
        self.flush()

    def note(self, text: str) -> None:
        """Write a line of the launcher's own."""
        self._kept += f"allfold: {text}\n".encode()
        self.flush()

    def flush(self) -> None:
        """Write what can be written now."""
        while self._kept and self._writable():
            del self._kept[: os.write(self._fd, self._kept[:_PIECE])]

    def _writable(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(0))

    def _head(self, rank: int) -> bytes:
        if not self._prefix:
            return b""
        if not self._colour:
            return b"[%d] " % rank
        return b"\x1b[%dm[%d]\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], rank)
