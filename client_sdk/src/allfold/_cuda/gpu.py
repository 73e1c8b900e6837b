"""A GPU and the agent: the way that its tensors take, the arenas for them, and their fences."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from threading import RLock
from typing import Any

import numpy as np

from allfold._arena import GRANULE, Arena, ArenaBlock, Share
from allfold._cuda.device import CudaDevice, Event, NoCuda, is_recording, load, order
from allfold._cuda.memory import PinnedMemory, ShareGpu, device_memory, pinned_memory
from allfold._elements import itemsize_of
from allfold._process.settings import Choice, Path, choose, wanted
from allfold_core.errors import ArenaExhausted, GpuFailed, InvalidArgument
from allfold_core.protocol.rank_messages import FENCE_WORD, Fence

log = logging.getLogger("allfold")

_FIRST_ON_GPU = 32 << 20
_WRAP = 1 << 32
_LEGACY_STREAM = 0


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """The part of a session that GPUs need: facts about its agent, and how memory is handed over.

    Attributes:
        gpus: those that it folds on: names by UUID.
        reason: why it has none.
        numbers: of new segments.
        share: gives it memory of the host.
        share_gpu: gives it memory of a GPU; raises what it answers if it cannot open it.
    """

    gpus: Mapping[str, str]
    reason: str
    numbers: Iterator[int]
    share: Share
    share_gpu: ShareGpu


class Gpu:
    """One GPU in one session.

    Attributes:
        ordinal: its number in this process.
        path: the way its tensors take; with :data:`Path.HOST` there is nothing else here.
        why: the reason for it.
        staging: where tensors are copied to, on the GPU or, if the agent cannot have its memory
            open, in the host's memory. Only our stream touches it.
        pinned: the same, always in the host's memory.
        arrays: on the GPU; what users have here is not copied.
        array_written: when our stream has made its last copy to such an array; ``None`` before.
    """

    staging: Arena
    pinned: Arena
    arrays: Arena
    device: CudaDevice
    array_written: Event | None = None

    def __init__(self, ordinal: int, agent: AgentAccess) -> None:
        self.ordinal = ordinal
        self._lock = RLock()
        self._passed = 0
        self._array_streams: set[int] = set()
        self.path, self.why = self._open(ordinal, agent)
        level = logging.INFO if self.path is Path.IPC else logging.WARNING
        log.log(
            level, "tensors on cuda:%d: path %s, because %s", ordinal, self.path.value, self.why
        )

    def _open(self, ordinal: int, agent: AgentAccess) -> Choice:
        asked = wanted()
        try:
            load()
            self.device = CudaDevice(ordinal)
        except (NoCuda, GpuFailed) as error:
            return choose(asked, str(error), agent.gpus, "", agent.reason)
        choice = choose(asked, None, agent.gpus, self.device.uuid, agent.reason)
        if choice.path is Path.HOST:
            return choice
        try:
            self._open_pinned(agent)
        except (GpuFailed, ArenaExhausted) as error:
            return Choice(Path.HOST, f"the GPU cannot use the host's memory: {error.message}")
        return self._open_shared(agent, choice) if choice.path is Path.IPC else choice

    def _open_pinned(self, agent: AgentAccess) -> None:
        grow = pinned_memory(self.device, agent.share)
        self.pinned = self.staging = Arena(grow, agent.numbers, GRANULE)
        self._word = self.pinned.allocate(FENCE_WORD.size)
        assert isinstance(self._word.owner, PinnedMemory)
        self._word_on_gpu = self._word.owner.on_gpu + self._word.region.offset
        try:
            with self.device.current():
                self.device.write(self._word_on_gpu, 0)  # is it able to?
        except GpuFailed:
            self.pinned.close()
            raise

    def _open_shared(self, agent: AgentAccess, choice: Choice) -> Choice:
        grow = device_memory(self.device, agent.share_gpu)
        staging = Arena(grow, agent.numbers, _FIRST_ON_GPU)
        try:
            staging.free(staging.allocate(1))
        except (GpuFailed, ArenaExhausted, InvalidArgument) as error:
            return Choice(
                Path.PINNED, f"its memory cannot be shared with the agent: {error.message}"
            )
        self.staging = staging
        self.arrays = Arena(grow, agent.numbers, _FIRST_ON_GPU)
        return choice

    @contextmanager
    def turn(self) -> Iterator[CudaDevice]:
        """Give the GPU work that belongs together, while no other thread does."""
        with self._lock, self.device.current():
            yield self.device

    def fence(self) -> Fence:
        """Return the fence of a call whose memory is free once all work of our stream is done."""
        self._passed = self._passed % (_WRAP - 1) + 1  # never 0, which stands for no fence
        self.device.write(self._word_on_gpu, self._passed)
        return Fence(self._word.region, self._passed)

    def allocate_array(self, nbytes: int) -> ArenaBlock:
        """Memory for a tensor of the user's, ready for the current stream.

        As with torch's own allocator, the stream on which freed memory was allocated may still use
        it. Here, other streams wait for that stream, and also for ours, which may still have to
        copy a result there that nobody has waited for.
        """
        with self.turn() as device:
            current = self.current_stream() if _torch_uses_gpus() else _LEGACY_STREAM
            device.check_not_recording(current)
            block = self.arrays.allocate(nbytes)
            for stream in self._array_streams - {current}:
                try:
                    if not is_recording(stream):  # else all would become part of its graph
                        order(current, Event(device, stream))
                except GpuFailed:  # there is no such stream any more
                    self._array_streams.discard(stream)
            self._array_streams.add(current)
            if self.array_written is not None:
                order(current, self.array_written)
            device.wait_for(current)  # so that the memory is not freed while that stream uses it
            return block

    def order_callers(self, event: Event, streams: Collection[int | None]) -> None:
        """The streams of results wait for an event; ``None`` is torch's current one.

        Raises:
            InvalidArgument: one records a graph, of which the event is no part.
        """
        with self.device.current():
            for stream in streams:
                waiting = self.current_stream() if stream is None else stream
                self.device.check_not_recording(waiting)
                order(waiting, event)

    def current_stream(self) -> int:
        """The stream on which torch works in this thread."""
        torch: Any = sys.modules["torch"]
        return int(torch.cuda.current_stream(self.device.ordinal).cuda_stream)

    @property
    def shares_memory(self) -> bool:
        """True if the agent has opened memory of the GPU."""
        return self.path is Path.IPC

    def close(self) -> None:
        """Release the memory."""
        if self.path is Path.HOST:
            return
        if self.shares_memory:
            self.arrays.close()
            self.staging.close()
        self.pinned.close()


def _torch_uses_gpus() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


class CudaArray:
    """An array that collectives need not copy: ``cupy.asarray`` and ``torch.as_tensor`` take it.

    The memory is the arena's again when nobody has the array, or what was made of it, any more.
    """

    def __init__(self, gpu: Gpu, shape: tuple[int, ...], dtype: Any) -> None:
        dtype = np.dtype(dtype)
        block = gpu.allocate_array(prod(shape) * dtype.itemsize)
        self._memory = block.owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (block.address, False),
            "strides": None,
        }
        gpu.arrays.free_with(self, block)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.__cuda_array_interface__["shape"])

    @property
    def dtype(self) -> Any:
        """The type of its elements, one of NumPy's."""
        return np.dtype(str(self.__cuda_array_interface__["typestr"]))


def empty(gpu: Gpu, shape: Sequence[int], dtype: Any) -> Any:
    """An uninitialized tensor on a GPU: torch's for a torch dtype, else a :class:`CudaArray`.

    Where the agent cannot have the GPU's memory open, a torch tensor is one of torch's own.

    Raises:
        ArenaExhausted: the GPU has no memory left.
        InvalidArgument: there is no arena on the GPU for anything but torch.
    """
    torch: Any = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(dtype, torch.dtype)
    sizes = tuple(shape)
    if not gpu.shares_memory:
        if is_torch:
            return torch.empty(sizes, dtype=dtype, device=f"cuda:{gpu.ordinal}")
        raise InvalidArgument(
            f"no arena on cuda:{gpu.ordinal}, because {gpu.why}; allocate with your own library"
        )
    if not is_torch:
        return CudaArray(gpu, sizes, dtype)
    bytes_ = CudaArray(gpu, (prod(sizes) * itemsize_of(dtype),), np.uint8)
    return torch.as_tensor(bytes_, device=f"cuda:{gpu.ordinal}").view(dtype).reshape(sizes)


def ordinal_of_device(device: Any) -> int | None:
    """The number of a CUDA device that a user names as torch does; ``None`` for the host."""
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or (number and not number.isdigit()):
        raise InvalidArgument(f"device= is 'cpu', 'cuda' or 'cuda:<number>', got {device!r}")
    if number:
        return int(number)
    torch: Any = sys.modules.get("torch")
    return (
        int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_available() else 0
    )
