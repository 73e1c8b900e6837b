"""The memory of the host that one rank shares, as its agent has it."""

from __future__ import annotations

import fcntl
import mmap
import os

from allfold_agent.runtime.buffers import MappedMemory, SharedFile
from allfold_core.errors import InvalidArgument
from allfold_core.protocol.rank_messages import Region


class RankArena:
    """The segments of a rank's arena. They last as long as somebody refers to this.

    Segments are added in one thread, and looked at from any.
    """

    def __init__(self) -> None:
        self._segments: dict[int, memoryview] = {}
        self._mappings: dict[int, MappedMemory] = {}
        self._files: dict[int, SharedFile] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._segments

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def nbytes(self) -> int:
        """The size of all segments."""
        return sum(map(len, self._mappings.copy().values()))

    def add(self, number: int, size: int, descriptor: int) -> None:
        """Map a memfd; ``InvalidArgument`` if it cannot be used safely."""
        actual = os.fstat(descriptor).st_size
        if actual < size:
            raise InvalidArgument(
                f"segment {number} of {size} bytes is not acceptable: the file has {actual}"
            )
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            # Whoever cuts memory that others have mapped kills them with SIGBUS.
            raise InvalidArgument(f"segment {number} is not sealed against being cut")
        memory = mmap.mmap(descriptor, size)
        self._mappings[number] = MappedMemory(memory)
        self._files[number] = SharedFile.read_only(descriptor)
        # Last: who finds it finds the others, too.
        self._segments[number] = memoryview(memory)

    def mapping(self, segment: int) -> MappedMemory:
        """Return a segment; ``InvalidArgument`` where there is none."""
        if segment not in self._mappings:
            raise InvalidArgument(f"this rank has no segment {segment} in the host's memory")
        return self._mappings[segment]

    def file(self, segment: int) -> SharedFile:
        """Return the file of a segment that is known here, for agents of this machine."""
        return self._files[segment]

    def memory(self, region: Region, nbytes: int) -> memoryview:
        """Return the bytes of a region; ``InvalidArgument`` where there is none."""
        if nbytes == 0:
            return memoryview(bytearray())
        segment = self._segments.get(region.segment)
        if segment is None or region.offset + nbytes > len(segment):
            raise not_in_arena(region, nbytes)
        return segment[region.offset : region.offset + nbytes]

    def place(self, region: Region, nbytes: int) -> memoryview:
        """Do as :meth:`memory`: all of it is in the host's memory."""
        return self.memory(region, nbytes)


def not_in_arena(region: Region, nbytes: int) -> InvalidArgument:
    """Return the error of a region that a rank has not got."""
    return InvalidArgument(
        f"{nbytes} bytes at {region.offset} of segment {region.segment} do not lie in this rank's "
        "arena"
    )
