"""A rank as its agent sees it, in a test without processes."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import numpy as np

from allfold_agent.groups.group import NodeGroup
from allfold_agent.local.memberships import PROCESS_ENDED
from allfold_agent.runtime.buffers import MappedMemory, SharedFile
from allfold_core.dtypes import DType, Wire
from allfold_core.errors import AllfoldError, from_dict
from allfold_core.operations import ALL_RANKS, Fingerprint, Kind, Quorum, ReduceOp
from allfold_core.protocol.rank_messages import (
    FIRST_PAIR,
    Message,
    OpMessage,
    Outcome,
    P2PMessage,
    Region,
    unpack_json,
)

SECONDS = 20.0
# What the memory for a result holds before.
UNWRITTEN = -12345.0
_ROOM = 1 << 28  # virtual: what is not used takes no memory


def session_of(rank: int) -> str:
    """The session of a rank of the first epoch."""
    return f"session of {rank}"


class LocalRank:
    """A rank as its agent sees it: memory, calls, and the outcomes that it is sent.

    Attributes:
        rank: its number in the first epoch.
        view: the ordinal of the newest epoch that an outcome has told it of.
        told: the outcomes that it was sent, by number.
        sources: by the number of a receive, who has sent the message.
        holds: what it was told of times in which its group waited.
    """

    def __init__(self, group: NodeGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.view = 0
        self.session = session_of(rank)
        self._bytes = np.zeros(_ROOM, dtype=np.uint8)
        self._free = 0
        self._places: dict[int, tuple[int, int]] = {}
        self._inputs: dict[int, tuple[int, int]] = {}
        self._outcomes: SimpleQueue[tuple[int, AllfoldError | None]] = SimpleQueue()
        self.sources: dict[int, int] = {}
        self.told: dict[int, Outcome] = {}
        self.holds: list[dict[str, Any]] = []

    def memory(self, region: Region, nbytes: int) -> memoryview:
        return self._bytes[region.offset : region.offset + nbytes].data

    place = memory

    def mapping(self, segment: int) -> MappedMemory:
        raise AssertionError("no rank has memory on a GPU")

    def file(self, segment: int) -> SharedFile:
        raise AssertionError("no rank is on several nodes' lane")

    def send_outcome(self, outcome: Outcome) -> None:
        seq, body = outcome.seq, outcome.body or {}
        self.told[seq] = outcome
        failed = outcome.kind is Message.FAILED
        if not failed and "source" in body:
            self.sources[seq] = body["source"]
        self._outcomes.put((seq, from_dict(body) if failed else None))

    def send(self, message: bytes) -> None:
        assert message[0] == Message.HOLD
        self.holds.append(unpack_json(message))

    def call(
        self,
        seq: int,
        values: Any,
        *,
        strategy: str = "direct",
        op: ReduceOp = ReduceOp.SUM,
        timeout: float = SECONDS,
        shift: int = 0,
        called: float | None = None,
        posted: bool = False,
        weight: float = 1.0,
        quorum: Quorum = ALL_RANKS,
    ) -> None:
        """An all-reduce of float32 values, ``shift`` bytes from where they would lie.

        Args:
            weight, quorum: of a weighted mean.
            called: when the rank called (monotonic), if its data are there only now.
            posted: the call is taken over from the short lane, which is closed.
        """
        data = np.asarray(values, np.float32).view(np.uint8)
        self._free += shift
        place = Region(0, self._free)
        self._places[seq] = (self._free, len(data))
        self._bytes[self._free : self._free + len(data)] = data
        self._free += len(data)
        print_ = Fingerprint(
            Kind.ALL_REDUCE,
            op,
            DType.FLOAT32,
            (len(values),),
            -1,
            strategy,
            factor=weight,
            quorum=quorum,
        )
        message = OpMessage(0, seq, timeout, place, place, print_.pack(), view=self.view)
        self.group.calls.submit(self.session, self, 0, message, called, posted=posted)

    def run(
        self,
        seq: int,
        kind: Kind,
        values: Any,
        shape: int,
        gets: int,
        *,
        strategy: str = "direct",
        op: ReduceOp | None = None,
        root: int = -1,
        wire: Wire = Wire.NATIVE,
        counts: tuple[int, ...] = (),
    ) -> None:
        """A collective of float32 values whose result, of ``gets`` elements, goes elsewhere."""
        source = self._put(np.asarray(values, np.float32))
        target = self._put(np.full(gets, UNWRITTEN, np.float32))
        self._inputs[seq] = (source.offset, 4 * len(values))
        self._places[seq] = (target.offset, 4 * gets)
        print_ = Fingerprint(kind, op, DType.FLOAT32, (shape,), root, strategy, wire, counts=counts)
        message = OpMessage(0, seq, SECONDS, source, target, print_.pack(), view=self.view)
        self.group.calls.submit(self.session, self, 0, message)

    def _put(self, values: Any) -> Region:
        """New memory with these values, which begins at a whole line of the cache."""
        data = values.view(np.uint8)
        self._free = -(-self._free // 64) * 64
        place = Region(0, self._free)
        self._bytes[self._free : self._free + len(data)] = data
        self._free += len(data)
        return place

    def exchange(
        self,
        kind: Message,
        number: int,
        values: Any,
        peer: int,
        *,
        tag: int = 0,
        timeout: float = SECONDS,
    ) -> None:
        """A send or receive of float32 values."""
        data = np.asarray(values, np.float32).view(np.uint8)
        place = Region(0, self._free)
        seq = FIRST_PAIR + number
        self._places[seq] = (self._free, len(data))
        self._bytes[self._free : self._free + len(data)] = data
        self._free += len(data)
        dtype, view = DType.FLOAT32.code, self.view
        message = P2PMessage(kind, 0, seq, timeout, peer, tag, dtype, place, len(data), view=view)
        self.group.calls.submit_message(self.session, self, 0, message)

    def outcome(self, seconds: float = SECONDS) -> tuple[int, AllfoldError | None]:
        """The next one: which op, and its error. It may change the rank's view of the group."""
        seq, error = self._outcomes.get(timeout=seconds)
        self.view = max(self.view, self.told[seq].epoch)
        return seq, error

    def end(self, how: str = PROCESS_ENDED) -> None:
        """Die, or leave: as its node sees it."""
        self.group.rank_ended(self.session, how)

    def result(self, seq: int) -> Any:
        """A copy of what lies where the result goes."""
        return self._memory(*self._places[seq]).copy()

    def given(self, seq: int) -> Any:
        """A copy of what lies where the input of :meth:`run` was."""
        return self._memory(*self._inputs[seq]).copy()

    def overwrite(self, seq: int, value: float) -> None:
        """Use the memory of an op that is over for something else: its input and its output."""
        self._memory(*self._inputs[seq])[:] = value
        self._memory(*self._places[seq])[:] = value

    def _memory(self, offset: int, nbytes: int) -> Any:
        return self._bytes[offset : offset + nbytes].view(np.float32)


def no_outcome(rank: LocalRank, seconds: float) -> bool:
    """Tell if no outcome comes for a while."""
    deadline = monotonic() + seconds
    try:
        rank.outcome(deadline - monotonic())
    except Empty:
        return True
    return False
