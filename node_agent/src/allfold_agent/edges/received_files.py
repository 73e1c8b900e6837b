"""Files of a sender on the same machine, mapped to read payloads where they lie."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque

import torch

from allfold_agent.edges.outgoing import SLOTS
from allfold_agent.runtime.buffers import is_sealed
from allfold_core.protocol.frames import FrameError, SharedRange

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
_MAP_FAILED = ctypes.c_void_p(-1).value


class MissingFile(FrameError):
    """No file has come with a frame: what lies between the two nodes passes bytes alone."""


class ReceivedFiles:
    """The files that came on one connection. Used by the thread that receives on it.

    The sender keeps the content of a range as it is until the frame is acknowledged, which must
    not be before all of it was read.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, torch.Tensor] = {}
        self._descriptors: deque[int] = deque()
        self._newest = -1

    def add(self, descriptors: list[int]) -> None:
        """Take descriptors that came with the bytes of a frame."""
        self._descriptors.extend(descriptors)

    def memory(self, number: int, shared: SharedRange) -> torch.Tensor:
        """Return the content of a frame, which may be asked for more than once.

        Args:
            number: of the frame.

        Raises:
            FrameError: there is no such memory.
        """
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


def _bytes_of(mapping: _Mapping) -> torch.Tensor:
    """The bytes of a mapping, which lasts as long as they do.

    By its address, as torch takes no buffer that cannot be written.
    """
    view = (ctypes.c_uint8 * mapping.size).from_address(mapping.address)
    view.mapping = mapping  # type: ignore[attr-defined]
    return torch.frombuffer(view, dtype=torch.uint8)
