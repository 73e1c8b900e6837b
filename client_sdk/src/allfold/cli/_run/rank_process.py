"""One rank of a run: its process, and its output on the way to ours."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO

from allfold.cli._run.failures import Failure
from allfold.cli._run.tracebacks import Folding, Traceback, TracebackReader
from allfold_cluster.processes import Child, wait_for

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

    def write_note(self, text: str) -> None:
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


_READ_BYTES = 64 * 1024
# A pipe holds 1 MiB at most, and 64 KiB unless somebody enlarged it.
_FULL_PIPE_READS = 16
_KEPT_LINES = 40


class RankStream:
    """One stream of a rank. ``fileno`` is readable when there is something to forward."""

    def __init__(self, rank: int, source: IO[bytes], output: Output, *, shown: bool) -> None:
        self._rank = rank
        self._source = source
        self._shown = shown
        self._cutter = LineCutter()
        self._unshown: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self.output = output
        self.open = True

    def fileno(self) -> int:
        return self._source.fileno()

    def forward(self) -> None:
        """Pass on what there is to read."""
        data = self._source.read(_READ_BYTES)
        if data:
            self._pass_on(self._cutter.feed(data))
        else:
            self._finish()
        self.open = bool(data)

    def drain(self) -> None:
        """Pass on what is left, of a process that has ended."""
        # Until there is nothing, not until the end: what left the process's session may hold it.
        for _ in range(_FULL_PIPE_READS):
            if not (self.open and wait_for([self], 0)):
                break
            self.forward()
        self._finish()
        self._source.close()
        self.open = False

    def _finish(self) -> None:
        """Pass on a last line that the stream has not ended."""
        self._pass_on(self._cutter.close())

    def show_unshown(self) -> None:
        """Pass on the last lines of what was not to be shown."""
        self.output.write(self._rank, self._unshown)
        self._unshown.clear()

    def _pass_on(self, lines: Iterable[bytes]) -> None:
        if self._shown:
            self.output.write(self._rank, lines)
        else:
            self._unshown.extend(lines)


class ErrorStream(RankStream):
    """The standard error of a rank, whose tracebacks are known and may be folded.

    Attributes:
        reader: what was found.
        failed_at: when the last traceback had come (monotonic).
    """

    def __init__(
        self, rank: int, source: IO[bytes], output: Output, folding: Folding, *, shown: bool
    ) -> None:
        super().__init__(rank, source, output, shown=shown)
        # Of what is not shown only the end is kept, and that should be whole.
        self._folding = folding if shown else Folding(shows_all=True)
        self.reader = TracebackReader()
        self.failed_at: float | None = None

    def show_folded(self) -> None:
        """Show the last traceback whole, if it was folded to a line."""
        last = self.reader.last
        if last is not None and self._shown and self._folding.folds(last):
            self.output.write(self._rank, last.lines)

    def _pass_on(self, lines: Iterable[bytes]) -> None:
        super()._pass_on(
            [each for found in self.reader.feed(lines) for each in self._shown_of(found)]
        )

    def _finish(self) -> None:
        super()._finish()
        super()._pass_on(self.reader.close())

    def _shown_of(self, found: bytes | Traceback) -> Iterator[bytes]:
        """Yield the lines to be shown of a line or of a traceback."""
        if isinstance(found, Traceback):
            self.failed_at = time.monotonic()
            yield from self._folding.lines(self._rank, found)
        else:
            yield found


class RankProcess:
    """A running rank."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        env: Mapping[str, str],
        outputs: tuple[Output, Output],
        *,
        folding: Folding,
        shown: bool,
        stdin: int | None,
    ) -> None:
        self.number = number
        self.child = Child(
            f"rank {number}",
            command,
            env=env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        self._errors = ErrorStream(number, self.child.stderr, outputs[1], folding, shown=shown)
        self._streams = [
            RankStream(number, self.child.stdout, outputs[0], shown=shown),
            self._errors,
        ]

    @property
    def readable_streams(self) -> list[RankStream]:
        """Streams to read from now: a clogged output must not be fed."""
        return [each for each in self._streams if each.open and not each.output.clogged]

    def reap(self) -> int:
        """The status of a rank that has ended, after all its output was passed on."""
        status = self.child.reap()
        for stream in self._streams:
            stream.drain()
        return status

    def show_unshown(self) -> None:
        """Show the last lines of a rank that was to be quiet."""
        for stream in self._streams:
            stream.show_unshown()

    def show_folded(self) -> None:
        """Show the last traceback whole, if it was folded."""
        self._errors.show_folded()

    def failure(self, place: str, *, was_told: bool, restarts: int) -> Failure:
        """Return what is known of the end of a rank that has failed.

        Args:
            place: where it ran.
            was_told: the launcher had told it to end.
            restarts: how often it had been started again.
        """
        child, found = self.child, self._errors.reader
        assert child.status is not None
        # Of an exception that nobody catches; with another status, the script went on after it.
        last = found.last if child.status == 1 else None
        error, frames = found.fatal or ("", ()) if child.killed_by else ("", ())
        if last is not None:
            error, frames = last.error, last.frames
        elif not error and found.last_words:
            error = f"it last wrote: {found.last_words}"
        return Failure(
            self.number,
            place,
            child.pid,
            child.ending,
            child.status,
            child.killed_by,
            at=(self._errors.failed_at if last else None) or time.monotonic(),
            error=error,
            frames=frames,
            is_consequence=was_told or (last is not None and last.is_consequence),
            restarts=restarts,
        )
