"""The ranks as processes, and word with all of them at once."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

from allfold_cluster.processes import Child, Waitable, stop_all, wait_for
from benchmarks import mpi
from benchmarks.children import environment, python
from benchmarks.control import Line, Message
from benchmarks.errors import BenchmarkFailed

_START_SECONDS = 60.0
_SECONDS = 120.0
_LEAVE_SECONDS = 20.0

Place = Callable[[], AbstractContextManager[None]]


class Fleet:
    """The ranks of one shape, from their start to their end.

    Attributes:
        pids: of the ranks.
    """

    def __init__(
        self,
        world: int,
        *,
        places: Sequence[Place] = (),
        starter: str | None = None,
        crowded: bool = False,
    ) -> None:
        """Prepare; nothing is started before ``with``.

        Args:
            places: for each rank, what is entered while it is started: a network namespace.
            starter: the MPI that starts the ranks; None: they start as plain processes.
            crowded: there are more ranks than cores.
        """
        self._world = world
        self._places = places or [nullcontext] * world
        self._starter, self._crowded = starter, crowded
        self._children: list[Child] = []
        self._lines: list[Line] = []
        self.pids: list[int] = []
        self.folder = Path()

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="allfold-bench-"))
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every rank, whatever it does."""
        for line in self._lines:
            line.close()
        try:
            stop_all(self._children, grace=2.0)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, do: str, *, seconds: float = _SECONDS, **parameters: Any) -> list[Message]:
        """Tell all ranks the same; their answers, by rank."""
        return self.ask_each([{"do": do, **parameters}] * self._world, seconds=seconds)

    def ask_each(self, messages: Sequence[Message], *, seconds: float = _SECONDS) -> list[Message]:
        """Tell each rank its own; their answers.

        Raises:
            BenchmarkFailed: a rank failed, or did not answer in time.
        """
        deadline = time.monotonic() + seconds
        for rank, message in enumerate(messages):
            with _speaking_with(f"rank {rank}"):
                self._lines[rank].send(message)
        waiting = dict(enumerate(self._lines))
        answers: dict[int, Message] = {}
        while waiting:
            ready = wait_for(waiting.values(), max(0.0, deadline - time.monotonic()))
            if not ready:
                what = f"{messages[0]['do']!r} was not done in {seconds:g} s"
                raise BenchmarkFailed(f"ranks {sorted(waiting)}: {what}")
            for rank in [rank for rank, line in waiting.items() if line in ready]:
                answers[rank] = self._answer(rank, waiting.pop(rank))
        return [answers[rank] for rank in range(self._world)]

    def leave(self) -> None:
        """Let the ranks end by themselves."""
        self.ask("leave", seconds=_LEAVE_SECONDS)
        deadline = time.monotonic() + _LEAVE_SECONDS
        for child in self._children:
            if not wait_for([child], deadline - time.monotonic()):
                raise BenchmarkFailed(f"{child.name} did not end in {_LEAVE_SECONDS:g} s")
            if child.reap():
                raise BenchmarkFailed(f"{child.name} {child.ending}")

    def _start(self) -> None:
        path = str(self.folder / "control")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(self._world)
            for number in range(1 if self._starter else self._world):
                self._children.append(self._child(number, path))
            self._accept(listener)

    def _child(self, number: int, path: str) -> Child:
        command = python("benchmarks.rank", path)
        if self._starter:
            start = mpi.start(self._starter, self._world, crowded=self._crowded)
            settings = mpi.settings(self._starter, crowded=self._crowded)
            return Child(start[0], [*start, *command], env={**settings, **environment()})
        with self._places[number]():
            return Child(f"rank {number}", [*command, str(number)], env=environment())

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + _START_SECONDS
        found: dict[int, tuple[Line, int]] = {}
        while len(found) < self._world:
            watched: list[Waitable] = [listener, *self._children]
            if not wait_for(watched, max(0.0, deadline - time.monotonic())):
                raise BenchmarkFailed(f"only {len(found)} of {self._world} ranks started")
            if ended := [child for child in self._children if child.ended]:
                ended[0].reap()
                raise BenchmarkFailed(f"{ended[0].name} {ended[0].ending} when it started")
            line = Line(listener.accept()[0])
            with _speaking_with("a rank"):
                hello = line.receive(_START_SECONDS)
            found[hello["rank"]] = line, hello["pid"]
        self._lines = [found[rank][0] for rank in range(self._world)]
        self.pids = [found[rank][1] for rank in range(self._world)]

    def _answer(self, rank: int, line: Line) -> Message:
        with _speaking_with(f"rank {rank}"):
            answer = line.receive(1.0)
        if "error" in answer:
            raise BenchmarkFailed(f"rank {rank} failed:\n{answer['error']}")
        return answer


@contextmanager
def _speaking_with(whom: str) -> Iterator[None]:
    """An end of the line is the end of the rank."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise BenchmarkFailed(f"{whom} has ended") from error
