"""Programs of two ranks, one of which is interrupted in the middle of its calls.

The other one, the mirror, does what it is told over a socket: it need not know the group for that.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

import allfold
from allfold_core.errors import AllfoldError
from tests.support.interrupts import Interrupt, Interruption
from tests.support.waiting import wait_until

SIZES = {"short": 12, "long": 20_000}  # of an op that is posted, and of one that is a message
_SECONDS = 20.0
_MOST_LINES = 3000


class Op:
    """A call with its own tensors, and what is to be in the output in the end."""

    def __init__(self, group: allfold.Group, kind: str, numel: int, number: int) -> None:
        self.group = group
        rank, size = group.rank, group.world_size
        brought = [
            np.arange(numel, dtype=np.float64) + 1000 * number + each for each in range(size)
        ]
        self.given = brought[rank].copy()
        self.output = self.given
        self.expected = self.given.copy()
        getattr(self, f"_{kind}")(brought, rank, size)
        self.kind = kind

    def _all_reduce(self, brought: list[Any], *_: int) -> None:
        self.expected = sum(brought)
        self.do: Callable[..., Any] = lambda **o: self.group.all_reduce(self.given, **o)

    def _reduce(self, brought: list[Any], rank: int, _: int) -> None:
        self.expected = sum(brought) if rank == 0 else self.expected
        self.do = lambda **o: self.group.reduce(self.given, 0, **o)

    def _broadcast(self, brought: list[Any], *_: int) -> None:
        self.expected = brought[1]
        self.do = lambda **o: self.group.broadcast(self.given, 1, **o)

    def _all_gather(self, brought: list[Any], _: int, size: int) -> None:
        self.output, self.expected = np.zeros(self.given.size * size), np.concatenate(brought)
        self.do = lambda **o: self.group.all_gather(self.given, self.output, **o)

    def _gather(self, brought: list[Any], rank: int, size: int) -> None:
        self.output = np.zeros(self.given.size * size)
        self.expected = np.concatenate(brought) if rank == 0 else self.output.copy()
        output = self.output if rank == 0 else None
        self.do = lambda **o: self.group.gather(self.given, 0, output, **o)

    def _scatter(self, brought: list[Any], rank: int, size: int) -> None:
        self.output = np.zeros(self.given.size // size)
        self.expected = np.split(brought[0], size)[rank]
        inputs = self.given if rank == 0 else None
        self.do = lambda **o: self.group.scatter(self.output, inputs, 0, **o)

    def _reduce_scatter(self, brought: list[Any], rank: int, size: int) -> None:
        self.output = np.zeros(self.given.size // size)
        self.expected = np.split(np.asarray(sum(brought)), size)[rank]
        self.do = lambda **o: self.group.reduce_scatter(self.given, self.output, **o)

    def _all_to_all(self, brought: list[Any], rank: int, size: int) -> None:
        self.output = np.zeros(self.given.size)
        self.expected = np.concatenate([np.split(each, size)[rank] for each in brought])
        self.do = lambda **o: self.group.all_to_all(self.given, self.output, **o)

    def _barrier(self, *_: Any) -> None:
        self.do = lambda **o: self.group.barrier(**o)

    def _send(self, _: list[Any], rank: int, size: int) -> None:
        """Rank 0 sends, the others receive."""
        self.output = np.zeros(self.given.size)
        if rank == 0:
            self.expected = self.output.copy()
            self.do = lambda **o: self.group.send(self.given, size - 1, **o)
        else:
            self._receive(0)

    def _recv(self, _: list[Any], rank: int, size: int) -> None:
        """Rank 0 receives, the others send."""
        self.output = np.zeros(self.given.size)
        if rank == 0:
            self._receive(size - 1)
        else:
            self.expected = self.output.copy()
            self.do = lambda **o: self.group.send(self.given, 0, **o)

    def _receive(self, source: int) -> None:
        mine = self.group.rank
        self.expected = self.given - mine + source
        self.do = lambda **o: self.group.recv(self.output, source, **o)

    @property
    def is_right(self) -> bool:
        return np.array_equal(self.output, self.expected)


def mirror(group: allfold.Group, path: str) -> int:
    """Do the ops that the other rank asks for, until it asks for none; how many there were."""
    with socket.socket(socket.AF_UNIX) as told:
        told.settimeout(60.0)
        wait_until(lambda: _connects(told, path), "the other rank listens")
        with told.makefile("rw") as stream:
            for done in itertools.count():
                words = stream.readline().split()
                if not words:
                    return done
                kind, numel, number = words[0], int(words[1]), int(words[2])
                op = Op(group, kind, numel, number)
                op.do(timeout=_SECONDS)
                assert op.is_right, (words, op.output[:4], op.expected[:4])
                stream.write("done\n")
                stream.flush()
    raise AssertionError


def _connects(told: socket.socket, path: str) -> bool:
    with suppress(OSError):
        told.connect(path)
        return True
    return False


class Interrupted:
    """The rank that is interrupted."""

    def __init__(self, group: allfold.Group, kind: str, numel: int, stream: Any) -> None:
        self._group, self._kind, self._numel, self._stream = group, kind, numel, stream
        self._numbers = itertools.count()

    def _op(self, numel: int, kind: str) -> Op:
        """Make an op that the mirror does as well."""
        number = next(self._numbers)
        self._stream.write(f"{kind} {numel} {number}\n")
        self._stream.flush()
        return Op(self._group, kind, numel, number)

    def _await_mirror(self) -> None:
        assert self._stream.readline() == "done\n", "the other rank has failed"

    def call_right(self, kind: str, numel: int) -> None:
        """Do an op that nothing interrupts."""
        op = self._op(numel, kind)
        op.do(timeout=_SECONDS)
        assert op.is_right, (op.output[:4], op.expected[:4])
        self._await_mirror()

    def interrupt(self, at: int, *, fresh: bool, async_op: bool) -> str:
        """Interrupt an op, and do those that have to go on; return where it was, "" if nowhere.

        Args:
            fresh: there has been no op like it.
        """
        numel = self._numel + 2 * at if fresh else self._numel
        if not fresh:
            self.call_right(self._kind, numel)
        op = self._op(numel, self._kind)
        interruption = Interruption(at)
        self._call(op, interruption, async_op=async_op)
        wait_until(lambda: op.is_right, f"the op interrupted at {interruption.where} is done", 5.0)
        self._await_mirror()
        for size in ("short", "long", "short"):
            self.call_right("all_reduce", SIZES[size])
        assert op.is_right, f"it was written to after it was done: {interruption.where}"
        in_flight = self._group._channel.in_flight
        wait_until(lambda: not in_flight(), f"all have outcomes: {interruption.where}", 5.0)
        return interruption.where

    def _call(self, op: Op, interruption: Interruption, *, async_op: bool) -> None:
        """Call an op, and once more if the call that is interrupted does not count."""
        before, has_handle = self._group.next_op, False

        def call() -> None:
            nonlocal has_handle
            handle = op.do(timeout=_SECONDS, async_op=async_op)
            has_handle = True
            if async_op:
                handle.wait()

        try:
            interruption.call(call)
        except Interrupt as interrupt:
            # A message has no number that a program sees: the note says whether it counts.
            noted = "It counts" in "".join(getattr(interrupt, "__notes__", ()))
            is_message = op.kind in ("send", "recv")
            counts = noted if is_message else self._group.next_op > before
            if not counts and not has_handle:
                op.do(timeout=_SECONDS)


def sweep(
    group: allfold.Group,
    path: str,
    kind: str,
    size: str,
    fresh: bool,
    async_op: bool,
    first: int = 1,
    step: int = 1,
) -> list[str]:
    """Interrupt an op at each of its lines in turn; where that was.

    Args:
        first, step: the first of these lines, and how many to go on each time.
    """
    found: list[str] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(_SECONDS)
        told, _ = listener.accept()
        told.settimeout(_SECONDS)
        with told, told.makefile("rw") as stream:
            rank = Interrupted(group, kind, SIZES[size], stream)
            for at in range(first, _MOST_LINES, step):
                try:
                    where = rank.interrupt(at, fresh=fresh, async_op=async_op)
                except (AllfoldError, AssertionError, OSError) as error:
                    raise AssertionError(f"line {at}, after {found[-1:]}: {error!r}") from error
                if not where:
                    break
                found.append(where)
    return found
