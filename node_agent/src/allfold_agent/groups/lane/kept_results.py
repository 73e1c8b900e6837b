"""The results of the short lane's ops that other nodes may need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from allfold_agent.groups.lane.op_memory import Elements
from allfold_agent.groups.lane.program import LaneProgram
from allfold_agent.runtime.buffers import Buffer


class HeldResult(NamedTuple):
    """The result of an op on this node, which other nodes may need.

    Attributes:
        kept: as the op's memory has it.
        buffers: that it is in, if it is not in the page.
    """

    program: LaneProgram
    kept: Elements
    buffers: tuple[Buffer, ...]

    def release(self) -> None:
        """Let go of it, as nobody will ask for it."""
        for buffer in self.buffers:
            buffer.release()


class KeptResults:
    """The results that the local ranks have, for as long as other nodes may lack them.

    With the lock of the group's ops held, but for what the lane's thread does.

    Args:
        others: the other nodes.

    Attributes:
        end: of the ops whose results the local ranks have.
        known_final: the end of the ops that were found to be final on all nodes.
    """

    def __init__(self, others: Sequence[str]) -> None:
        self.end = 0
        self.known_final = 0
        self._others = others
        self._heard: dict[str, int] = dict.fromkeys(others, 0)  # up to where each has them
        self._latest: dict[int, HeldResult] = {}  # by op, in their order
        # Of a time that is over: nodes on this machine that do not know that yet may still read it.
        self._left: list[HeldResult] = []
        self._in_parts: dict[int, LaneProgram] = {}  # by op, those that may not be final everywhere

    def open(self, first: int) -> None:
        """Begin anew, with this op."""
        self.end = first
        self.drop()
        self._in_parts, self.known_final = {}, 0

    def forget_others(self) -> None:
        """Of the new time nothing was heard. In the lane's thread."""
        self._heard = dict.fromkeys(self._others, 0)

    def hear(self, node: str, end: int) -> None:
        """Note that a node has all results below a number. In the lane's thread."""
        if end > self._heard[node]:
            self._heard[node] = end

    def final_everywhere(self) -> int:
        """Return the end of the ops whose results all nodes are known to have."""
        return min((self.end, *self._heard.values()))

    def add(self, seq: int, result: HeldResult) -> None:
        """Keep the result of the next op, which the local ranks have now."""
        self.end = seq + 1
        since, latest = self.final_everywhere(), self._latest
        while latest and (first := next(iter(latest))) < since:
            latest.pop(first).release()
        latest[seq] = result
        if result.program.is_in_parts:  # a round may ask for it until it is final everywhere
            self._in_parts[seq] = result.program

    def leave(self, result: HeldResult) -> None:
        """Keep the memory of an op that ends with the lane."""
        self._left.append(result)

    def held(self) -> dict[int, HeldResult]:
        """Return the results that other nodes may not have, by op."""
        since = self.final_everywhere()
        return {seq: each for seq, each in self._latest.items() if seq >= since}

    def parts(self) -> list[tuple[int, LaneProgram]]:
        """Return the ops of which the local ranks have their parts, as far as others may ask."""
        return list(self._in_parts.items())

    @property
    def number_of_parts(self) -> int:
        """The number of those."""
        return len(self._in_parts)

    def pass_parts(self, end: int) -> None:
        """Forget the parts of ops below a number: they are final on all nodes."""
        self.known_final = end
        self._in_parts = {seq: each for seq, each in self._in_parts.items() if seq >= end}

    def set_aside(self) -> None:
        """Hold no more results of this time, but keep their memory."""
        self._left += self._latest.values()
        self._latest = {}

    def drop(self) -> None:
        """Let go of the memory of all ops, as all nodes have closed the lane."""
        self.set_aside()
        while self._left:
            self._left.pop().release()
