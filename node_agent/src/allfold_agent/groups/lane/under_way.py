"""The op that the nodes exchange now in the short lane of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import NamedTuple

from allfold_agent.groups.lane.kept_results import HeldResult
from allfold_agent.groups.lane.op_memory import OpMemory, Outgoing
from allfold_agent.groups.lane.page import NextPost
from allfold_agent.groups.lane.payloads import Payload
from allfold_agent.groups.lane.program import LaneProgram
from allfold_agent.runtime.buffers import Buffer
from allfold_core.protocol.frames import FrameHeader


class EarlyFrame(NamedTuple):
    """A frame of an op that this node has not come to.

    Attributes:
        node: the index of the sender.
    """

    node: int
    header: FrameHeader
    payload: Payload


class OpTimes(NamedTuple):
    """The times of an op whose result the local ranks have (monotonic).

    Attributes:
        began: the last local rank had called it.
        heard: by the index of the node, its first data were taken in.
    """

    seq: int
    began: float
    heard: Mapping[int, float]
    published: float


class OpUnderWay:
    """An op whose chunks come from other nodes, and those that are still missing.

    Args:
        place: of its result in the page; -1 where it is in the slot.
        buffers: what it works in beside the page.
        free: takes a payload back that is not needed any more.

    Attributes:
        heard: by node, when something of it has come first (monotonic).
        words: the nodes that have said that they hold their parts.
        is_held: this node has said so, so that others may hand out theirs.
    """

    def __init__(
        self,
        post: NextPost,
        program: LaneProgram,
        memory: OpMemory,
        place: int,
        buffers: tuple[Buffer, ...],
        free: Callable[[Payload], None],
    ) -> None:
        self.seq, self.slot = post.seq, post.slot
        self.program = program
        self.place = place
        self.digest = program.spec.digest
        self._began = monotonic()
        self.heard: dict[int, float] = {}
        self.words: set[int] = set()
        self.is_held = False
        self._memory = memory
        self._buffers = buffers
        self._free = free
        self._missing = dict(program.expected)
        self._operands: dict[int, dict[int, Payload]] = {}

    @property
    def is_whole(self) -> bool:
        """True once all that others send has come."""
        return not self._missing

    @property
    def may_be_handed_out(self) -> bool:
        """True once all others hold what the ranks of their nodes get, where that counts."""
        return self.words >= self.program.words

    def begin(self) -> Iterator[Outgoing]:
        """Yield what this node sends at once."""
        return self.program.begin(self._memory)

    def destination(self, node: int, start: int, nbytes: int) -> memoryview | None:
        """Return the memory of a chunk that is taken as it comes; ``None`` for any other."""
        stop = self._missing.get((node, start))
        program = self.program
        if stop is None or program.is_folded(start) or program.nbytes(start, stop) != nbytes:
            return None
        return program.destination(self._memory, start, stop)

    def take(self, node: int, start: int, payload: Payload, *, is_there: bool) -> list[Outgoing]:
        """Take in a chunk; returns what this node sends now.

        Args:
            node: the index of the sender.
            is_there: it has come to its :meth:`destination`.

        Raises:
            ValueError: it is none that is missing.
        """
        program, memory = self.program, self._memory
        stop = self._missing.pop((node, start), -1)
        if stop < 0 or program.nbytes(start, stop) != len(payload):
            raise ValueError(f"{len(payload)} bytes at {start} are no chunk of it")
        if node not in self.heard:
            self.heard[node] = monotonic()
        if program.is_folded(start):
            operands = self._operands.setdefault(start, {})
            operands[node] = payload
            if len(operands) < len(program.others):
                return []
            frames = program.fold(memory, start, operands)
            for each in self._operands.pop(start).values():
                self._free(each)
            return frames
        if stop > start:
            if not is_there:
                program.destination(memory, start, stop)[:] = payload
                self._free(payload)
            program.finish(memory, start, stop)
        return []

    def times(self) -> OpTimes:
        """Return the times of the op, which is published now."""
        return OpTimes(self.seq, self._began, self.heard, monotonic())

    def hold(self) -> HeldResult:
        """Return the result, now that it is published."""
        return HeldResult(self.program, self._memory.kept, self._buffers)
