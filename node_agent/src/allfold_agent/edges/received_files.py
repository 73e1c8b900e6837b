"""Files of a sender on the same machine, mapped to read payloads where they lie."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import weakref
from collections import deque

from allfold_agent.edges.outgoing import SLOTS
from allfold_agent.runtime.buffers import is_sealed
from allfold_core.protocol.frames import (
    RANGE_SIZE,
    FrameError,
    FrameHeader,
    FrameType,
    SharedRange,
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_DESCRIPTOR = struct.Struct("i")
_RIGHTS_BYTES = socket.CMSG_SPACE(_DESCRIPTOR.size)
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_MAP_FAILED = ctypes.c_void_p(-1).value


class MissingFile(FrameError):
    """No file has come with a frame: what lies between the two nodes passes bytes alone."""


class ReceivedFiles:
    """The files that came on one connection. Used by the thread that receives on it.

    The sender keeps the content of a range as it is until the frame is acknowledged, which must
    not be before all of it was read.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, memoryview] = {}
        self._descriptors: deque[int] = deque()
        self._newest = -1

    def receive_into(self, connected: socket.socket, view: memoryview) -> int:
        """Receive what is there, and keep the files that come with it; the number of bytes."""
        count, rights, _, _ = connected.recvmsg_into([view], _RIGHTS_BYTES, _AT_ONCE)
        for _, _, data in rights:
            self.add([each for (each,) in _DESCRIPTOR.iter_unpack(data)])
        return count

    def add(self, descriptors: list[int]) -> None:
        """Take descriptors that came with the bytes of a frame."""
        self._descriptors.extend(descriptors)

    def content(self, header: FrameHeader, place: memoryview) -> tuple[FrameHeader, memoryview]:
        """Return the ``DATA`` frame that a ``SHARED`` one stands for, and its payload.

        It may be asked for more than once.

        Args:
            place: the payload of the ``SHARED`` one.

        Raises:
            FrameError: there is no such memory.
        """
        if header.length != RANGE_SIZE:
            raise FrameError(f"frame {header.number} cannot have its payload in shared memory")
        found = SharedRange.unpack(place)
        memory = self.memory(header.number, found)
        return header._replace(type=FrameType.DATA, length=found.nbytes), memory

    def memory(self, number: int, shared: SharedRange) -> memoryview:
        """Return a range of a file that has come with this frame or an earlier one."""
        if shared.is_new and number > self._newest:
            self._map(shared.slot)
            self._newest = number
        found = self._mapped.get(shared.slot)
        if found is None or shared.start + shared.nbytes > len(found):
            raise FrameError(f"frame {number} has its payload in no file that has come: {shared}")
        return found[shared.start : shared.start + shared.nbytes]

    def _map(self, slot: int) -> None:
        if slot >= SLOTS:
            raise FrameError(f"there is no slot {slot} for a file")
        if not self._descriptors:
            raise MissingFile(f"no file has come for slot {slot}")
        descriptor = self._descriptors.popleft()
        try:
            if not is_sealed(descriptor):
                raise FrameError(f"the file for slot {slot} is not sealed against being cut")
            self._mapped[slot] = _bytes_of(_Mapping(descriptor))
        except OSError as error:
            raise FrameError(f"the file for slot {slot} cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Forget all files; what is used no more is unmapped."""
        self._mapped.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())


class _Mapping:
    """A file that is mapped to be read. An ``mmap`` would keep a descriptor of it open."""

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        address = _libc.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address in (None, _MAP_FAILED):
            raise OSError(ctypes.get_errno(), "mmap")
        self.address = int(address)
        weakref.finalize(self, _libc.munmap, self.address, self.size).atexit = False


def _bytes_of(mapping: _Mapping) -> memoryview:
    """The bytes of a mapping, which lasts as long as they do.

    By its address, as torch warns of arrays that cannot be written. Nobody writes there.
    """
    view = (ctypes.c_uint8 * mapping.size).from_address(mapping.address)
    view.mapping = mapping  # type: ignore[attr-defined]
    return memoryview(view).cast("B")
