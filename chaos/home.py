"""A user's folder for jobs that start their own services; it finds all processes they leave."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from allfold_cluster.environment import clean_environment

_MARK = "MARK_OF_THE_HOME"
_AGENT, _ORCHESTRATOR, _SUPERVISOR = (
    "allfold_agent",
    "allfold_orchestrator",
    "allfold_cluster.supervisor",
)


class Home:
    """The folder of a user who has never started anything; short enough for sockets.

    All processes that have its environment are found by it, and ended with it.

    Args:
        of: another home of the same user, with the same folder but processes of its own.

    Attributes:
        folder: what ``XDG_RUNTIME_DIR`` and ``TMPDIR`` name.
    """

    def __init__(self, of: Home | None = None) -> None:
        self.folder: Path = of.folder if of else Path(tempfile.mkdtemp(prefix="af", dir="/tmp"))
        self._is_shared = of is not None
        self._mark = uuid.uuid4().hex

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environment(self) -> dict[str, str]:
        """Return the environment of a job there, of which no launcher and no agent is known."""
        ours = {"XDG_RUNTIME_DIR": str(self.folder), "TMPDIR": str(self.folder), _MARK: self._mark}
        return clean_environment("ALLFOLD_") | ours

    def processes(self, module: str = "") -> list[int]:
        """Return the living processes, or those of one module of Python."""
        return [pid for pid, words in self._commands() if not module or module in words]

    @property
    def agents(self) -> list[int]:
        """Their processes."""
        return self.processes(_AGENT)

    @property
    def orchestrators(self) -> list[int]:
        """Their processes."""
        return self.processes(_ORCHESTRATOR)

    @property
    def supervisors(self) -> list[int]:
        """Their processes."""
        return self.processes(_SUPERVISOR)

    def left(self) -> list[str]:
        """Return all processes and files that are there, in words."""
        commands = [" ".join(words)[-200:] for _, words in self._commands()]
        return commands + self.files()

    def files(self) -> list[str]:
        """Return the paths of all files and folders of services."""
        found = []
        for folder, _, names in os.walk(self.folder / "allfold"):  # some may go meanwhile
            found += [folder, *(f"{folder}/{name}" for name in names)]
        return found

    def close(self) -> None:
        """End what is left, and remove it."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self._is_shared:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _commands(self) -> Iterator[tuple[int, list[str]]]:
        mark = f"\0{_MARK}={self._mark}\0".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # a process may end while it is looked at
                if mark in b"\0" + (entry / "environ").read_bytes():
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    yield int(entry.name), words
