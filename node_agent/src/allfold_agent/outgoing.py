"""The cargo that an op is to an edge: what it sends to one node, in the order of its schedule."""

from __future__ import annotations

from allfold_agent.dataflow import TaskKind
from allfold_agent.exchange import Exchange
from allfold_agent.out_edge import Load
from allfold_core.frames import FrameType


class Outgoing:
    """An op's part of the edge to one node."""

    def __init__(self, exchange: Exchange, destination: int, seq: int, fingerprint: int) -> None:
        self.seq = seq
        self.fingerprint = fingerprint
        self._exchange = exchange
        self._destination = destination

    def is_finished(self) -> bool:
        return self._exchange.all_sent(self._destination)

    def is_ready(self) -> bool:
        return self._exchange.send_is_ready(self._destination)

    def next_size(self) -> int:
        task = self._exchange.next_send(self._destination)
        return 0 if task is None else self._exchange.nbytes(task)

    def take(self) -> Load | None:
        exchange = self._exchange
        taken = exchange.take_send(self._destination)
        if taken is None:
            return None
        task, memory = taken
        signal = task.kind is TaskKind.SIGNAL

        def payload() -> memoryview | bytes:
            if signal:
                return b""
            return exchange.payload(task, memory)

        return Load(
            FrameType.SIGNAL if signal else FrameType.DATA,
            task.start,
            payload,
            lambda: exchange.complete(task),
            memory,
            exchange.place(task),
        )
