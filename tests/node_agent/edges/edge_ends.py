"""The ends of an edge as tests see them: the ops of a node, and the frames of an op."""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
from threading import Event

import numpy as np
import pytest
import xxhash

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_agent.arithmetic.operands import Operands
from allfold_agent.compilation.task_graph import build, chunks
from allfold_agent.execution.executor import Executor
from allfold_agent.execution.op_edges import OpReceiver
from allfold_agent.runtime.buffers import BufferPool
from allfold_core.dtypes import DType
from allfold_core.errors import AllfoldError
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.protocol.frames import FrameHeader, FrameType
from allfold_core.schedules.parts import End, NodeParts, Part
from allfold_core.schedules.schedule import Fold, Program, Slice
from tests.support.waiting import never, wait_until

NUMEL = 50_000
CHUNK = 3_000
STAMP = 7 << 40
FINGERPRINT = 1234
DEADLINE = 20.0
KIB = 1 << 10


def content(seq: int, numel: int = NUMEL) -> Array:
    return np.arange(seq, seq + numel).astype(np.float32)


class Side:
    """The ops of one node, and what its in-edge reports."""

    def __init__(
        self, count: int, program: Program, node: int, *, numel: int = NUMEL, chunk: int = CHUNK
    ) -> None:
        self.buffers = BufferPool(1 << 30, never)
        self.done = [Event() for _ in range(count)]
        self.lost: list[AllfoldError] = []
        self.incoherences: list[AllfoldError] = []
        self.problem = Event()
        folds = any(isinstance(step, Fold) for step in program)
        kind, op = (Kind.REDUCE, ReduceOp.SUM) if folds else (Kind.BROADCAST, None)
        fingerprint = Fingerprint(kind, op, DType.FLOAT32, (numel,), 0, "auto")
        arithmetic = Arithmetic(fingerprint, 2)
        graph = build(program, node=node, numel=numel, chunk=chunk)
        whole = Part(Slice(0, numel), (End(0, 0),), (End(0, 0),))
        layout = NodeParts((whole,), None, numel, numel)
        self.exchanges = [
            Executor(
                graph,
                Operands(layout, arithmetic, {0: content(seq, numel)}, {}),
                self.buffers,
                on_sendable=lambda _: None,
                on_receivable=lambda _: None,
                on_finished=done.set,
                on_failed=lambda error: pytest.fail(repr(error)),
            )
            for seq, done in enumerate(self.done)
        ]
        self.receivers = [OpReceiver(each, 0, FINGERPRINT) for each in self.exchanges]

    def sink_for(self, source: str, header: FrameHeader) -> OpReceiver | None:
        return self.receivers[header.seq]

    def edge_lost(self, source: str, error: AllfoldError) -> None:
        self.lost.append(error)
        self.problem.set()

    def incoherent(self, header: FrameHeader, error: AllfoldError) -> None:
        self.incoherences.append(error)
        self.problem.set()


class Feed:
    """The sending end of a connection whose receiving end can be looked at."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self._near = near
        self._far = far

    def send(self, data: bytes) -> None:
        self._near.sendall(data)

    def send_and_wait(self, data: bytes) -> None:
        """Until the receiver has taken all of it from the socket."""
        self.send(data)
        wait_until(lambda: self.waiting() == 0, "all of it is taken", DEADLINE)

    def waiting(self) -> int:
        """Bytes that have arrived and that nobody has read."""
        return int.from_bytes(fcntl.ioctl(self._far, termios.FIONREAD, bytes(4)), sys.byteorder)

    def low_water(self) -> int:
        """Return the number of bytes that must have arrived before the receiver is woken."""
        return self._far.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    def window(self) -> int:
        """Return the number of bytes that may be sent before one is read."""
        info = self._far.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 68)
        return int.from_bytes(info[64:68], sys.byteorder)  # rcv_ssthresh


def frames_of(numel: int, chunk: int) -> list[bytes]:
    """The frames of an op of ``numel`` elements and a signal behind it, as they are sent."""
    cuts = [*chunks(Slice(0, numel), chunk), (0, 0)]
    memory = content(0, numel)
    found = []
    for number, (start, stop) in enumerate(cuts):
        payload = memory[start:stop].tobytes()
        kind = FrameType.DATA if payload else FrameType.SIGNAL
        digest = xxhash.xxh3_64_intdigest(payload) if payload else 0
        header = FrameHeader(kind, STAMP, number, 0, start, len(payload), FINGERPRINT, digest)
        found.append(header.pack() + payload)
    return found
