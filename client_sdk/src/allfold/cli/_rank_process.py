"""One rank of a run: its process, and its output on the way to ours."""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

from allfold.cli._output import LineCutter, Output
from allfold.cli._processes import Child, wait_for

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
        self._pass_on(self._cutter.feed(data) if data else self._cutter.close())
        self.open = bool(data)

    def drain(self) -> None:
        """Pass on what is left, of a process that has ended."""
        # Until there is nothing, not until the end: what left the process's session may hold it.
        for _ in range(_FULL_PIPE_READS):
            if not (self.open and wait_for([self], 0)):
                break
            self.forward()
        self._pass_on(self._cutter.close())
        self._source.close()
        self.open = False

    def show_unshown(self) -> None:
        """Pass on the last lines of what was not to be shown."""
        self.output.write(self._rank, self._unshown)
        self._unshown.clear()

    def _pass_on(self, lines: list[bytes]) -> None:
        if self._shown:
            self.output.write(self._rank, lines)
        else:
            self._unshown.extend(lines)


class RankProcess:
    """A running rank."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        env: Mapping[str, str],
        outputs: tuple[Output, Output],
        *,
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
        pipes = (self.child.stdout, self.child.stderr)
        self._streams = [
            RankStream(number, pipe, output, shown=shown)
            for pipe, output in zip(pipes, outputs, strict=True)
            if pipe is not None
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
