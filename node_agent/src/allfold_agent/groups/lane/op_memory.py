"""The memory of one op of the short lane on one node, and what is sent from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from allfold_agent.arithmetic.arrays import ARRAY_DTYPES, Array
from allfold_agent.edges.outgoing import FilePlace, SharedMemory
from allfold_agent.groups.lane.page import AgentPage
from allfold_core.dtypes import DType

NOTHING = memoryview(b"")


class Outgoing(NamedTuple):
    """A chunk for another node.

    Attributes:
        node: its index.
        start: in the index space.
        place: where a node on this machine may read it; ``None`` for nowhere.
    """

    node: int
    start: int
    payload: memoryview
    place: FilePlace | None


class SharedBytes(NamedTuple):
    """Raw memory that agents of this machine may read.

    Attributes:
        file: that it is in; ``None`` if others may not read it.
        place: where it begins there.
    """

    memory: memoryview
    file: SharedMemory | None
    place: int

    @property
    def at(self) -> FilePlace | None:
        """The file, and where it begins there; ``None`` for nowhere."""
        return None if self.file is None else (self.file, self.place)


class Elements:
    """Elements, and where agents of this machine may read them.

    Args:
        view: of their bytes.
        at: the file, and where they begin in it; ``None`` for nowhere.

    Attributes:
        bytes: of all of them.
    """

    __slots__ = ("_arrays", "_at", "_chunks", "_dtype", "bytes")

    def __init__(self, view: memoryview, dtype: DType, at: FilePlace | None) -> None:
        self.bytes = view
        self._dtype = dtype
        self._at = at
        # As the memory of slots is used again and again.
        self._chunks: dict[tuple[int, int], tuple[memoryview, FilePlace | None]] = {}
        self._arrays: dict[tuple[int, int], Array] = {}

    def array(self, start: int, numel: int) -> Array:
        """Return the elements of a range."""
        found = self._arrays.get((start, numel))
        if found is None:
            part, _ = self.chunk(start, numel)
            found = np.frombuffer(part, ARRAY_DTYPES[self._dtype])
            self._arrays[start, numel] = found
        return found

    def chunk(self, start: int, numel: int) -> tuple[memoryview, FilePlace | None]:
        """Return the bytes of a range, and where they are."""
        found = self._chunks.get((start, numel))
        if found is None:
            size, place = self._dtype.itemsize, None
            if self._at is not None:
                place = self._at[0], self._at[1] + start * size
            payload = self.bytes[start * size : (start + numel) * size]
            found = self._chunks[start, numel] = payload, place
        return found

    def copy(self, start: int, numel: int, source: Elements, source_start: int) -> None:
        """Copy elements of the same type to a range."""
        self.chunk(start, numel)[0][:] = source.chunk(source_start, numel)[0]


class OpMemory(NamedTuple):
    """The memory of one op on this node.

    Attributes:
        inputs: of the local ranks, in the order of their numbers.
        own: the row of what this node brings, in the accumulation type; it may be ``kept``.
        kept: what it gets, before a mean is divided and half types are rounded.
        result: the row that local ranks take; it may be ``kept``.
    """

    inputs: Sequence[Elements]
    own: Elements
    kept: Elements
    result: Elements


def private(nbytes: int) -> SharedBytes | None:
    """Memory of this process; ``None`` for none."""
    return SharedBytes(memoryview(bytearray(nbytes)), None, 0) if nbytes else None


class Places:
    """The places of a page, for results that are longer than a slot."""

    def __init__(self, page: AgentPage) -> None:
        self._page = page
        self._by_op: dict[int, int] = {}  # those of results that may be in use
        self._touched: set[int] = set()  # those that take memory

    def take(self, seq: int, final: int) -> int:
        """Return the first place whose result no local rank needs, and no other node.

        There is one: a rank posts no op while its last one of the same slot is in use.

        Args:
            seq: the op that gets it.
            final: the end of the ops whose results all nodes have.
        """
        used = self._used(final)
        place = next(each for each in range(self._page.layout.slots) if each not in used)
        self._by_op[seq] = place
        self._touched.add(place)
        return place

    def _used(self, final: int) -> set[int]:
        end = min(self._page.end_of_finished_by_all(), final)
        self._by_op = {seq: place for seq, place in self._by_op.items() if seq >= end}
        return set(self._by_op.values())

    def clear(self) -> None:
        """All of them are free."""
        self._by_op = {}

    def rest(self, final: int) -> None:
        """Give the memory of those that are free back to the system; see :meth:`take`."""
        used = self._used(final)
        for place in self._touched - used:
            self._page.discard_place(place)
        self._touched = used
