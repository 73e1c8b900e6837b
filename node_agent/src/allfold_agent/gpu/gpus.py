"""The GPUs of this machine: whether the agent folds there, and the memory that ranks share."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from allfold_agent.gpu import device, kernels
from allfold_agent.gpu.completions import FencePoller
from allfold_agent.gpu.device import DriverUnavailable, GpuDevice, GpuName, RankMemory, find
from allfold_agent.gpu.kernels import KernelError, Variant
from allfold_agent.runtime.buffers import MappedMemory
from allfold_agent.runtime.locks import make_lock, make_rlock
from allfold_core.dtypes import DType
from allfold_core.errors import GpuFailed, InvalidArgument
from allfold_core.operations import ReduceOp


class Pins:
    """Page-locked memory. It stays locked as long as it is mapped, because locking takes long."""

    def __init__(self) -> None:
        # The garbage collector may release some while more is taken.
        self._lock = make_rlock("gpu pins")
        self._offsets: weakref.WeakKeyDictionary[MappedMemory, int] = weakref.WeakKeyDictionary()

    def address(self, mapping: MappedMemory, gpu: GpuDevice) -> int:
        """Return the address of mapped memory for GPUs."""
        with self._lock:
            offset = self._offsets.get(mapping)
            if offset is None:
                with gpu.current():
                    offset = device.register(mapping.address, len(mapping)) - mapping.address
                self._offsets[mapping] = offset
                end = weakref.finalize(mapping, _release, mapping.memory, mapping.address, gpu)
                end.atexit = False
            return mapping.address + offset


def _release(memory: mmap.mmap, address: int, gpu: GpuDevice) -> None:
    gpu.releases.later(partial(_unlock, memory, address, gpu))


def _unlock(_memory: mmap.mmap, address: int, gpu: GpuDevice) -> None:
    """Unlock page-locked memory; the reference to it keeps it mapped until then."""
    with gpu.current():
        device.unregister(address)


_PATIENCE_SECONDS = 10.0


def begins_with(memory: RankMemory, proof: bytes, pins: Pins) -> bool:
    """Return true if these bytes, one page at most, are at the beginning of a GPU's memory.

    Raises:
        GpuFailed: the GPU refuses to look, or does not come to it for some seconds.
    """
    device, page = memory.device, MappedMemory(mmap.mmap(-1, mmap.PAGESIZE))
    with device.current():
        device.copy(pins.address(page, device), memory.address, len(proof))
        copied = device.mark()
    told: SimpleQueue[Exception | None] = SimpleQueue()

    def then(error: Exception | None, _used: object = (memory, page)) -> None:
        told.put(error)

    device.completions.add(copied, then, _PATIENCE_SECONDS)
    error = told.get(timeout=2 * _PATIENCE_SECONDS)  # it comes in half of it, whatever happens
    if isinstance(error, TimeoutError):
        raise GpuFailed(f"{device.name.name} is busy for {_PATIENCE_SECONDS:g} s now") from error
    if error is not None:
        raise error
    return page.memory[: len(proof)] == proof


def fold_on(homes: Sequence[int], reaches: Callable[[int, int], bool]) -> int:
    """The GPU that reaches the memory of most ranks; of equals the one of the lowest rank.

    Args:
        homes: the GPU that has the memory of each rank with memory on one, in rank order.
        reaches: whether kernels on one GPU can use the memory of another.
    """
    if not homes:
        raise ValueError("no rank has memory on a GPU")
    reached = {home: sum(reaches(home, other) for other in homes) for home in homes}
    return max(reached, key=reached.__getitem__)


log = logging.getLogger(__name__)

_PROBE = Variant(
    DType.FLOAT32, DType.FLOAT32, DType.FLOAT32, ReduceOp.SUM, 2, scaled=False, divided=False
)
_PROOF_BYTES = 16


class Gpus:
    """The GPUs of the agent. Each is opened for the first tensor on it, because that costs memory.

    Attributes:
        names: those that ranks may share memory of, by UUID.
        reason: why there are none.
        pins: memory of the host that they reach.

    Args:
        wanted: whether they may be used.
        poller: sees when they have done something.
    """

    def __init__(self, wanted: bool, poller: FencePoller) -> None:
        self._poller = poller
        self.pins = Pins()
        self._lock = make_lock("gpus")
        self._devices: dict[str, GpuDevice] = {}
        self.names, self.reason = _probe(wanted)
        if self.names:
            listed = ", ".join(f"{each.name} ({uuid})" for uuid, each in self.names.items())
            log.info("folds on GPUs that ranks share memory of: %s", listed)
        else:
            log.info("folds on the CPU alone: %s", self.reason)

    def welcome(self) -> dict[str, object]:
        """The description of the GPUs that ranks get."""
        return {
            "gpus": {uuid: each.name for uuid, each in self.names.items()},
            "no_gpu": f"the agent folds on no GPU: {self.reason}",
        }

    def open(self, uuid: str, descriptor: int, size: int, proof: bytes) -> RankMemory:
        """Open memory that a rank shares.

        Args:
            descriptor: stands for it; is the caller's to close.
            proof: what the rank has written at its beginning.

        Raises:
            InvalidArgument: it cannot be opened, or is not what the rank says.
        """
        name = self.names.get(uuid)
        if name is None:
            raise InvalidArgument(f"the agent does not fold on the GPU {uuid}")
        if len(proof) != _PROOF_BYTES:
            raise InvalidArgument(f"a proof has {_PROOF_BYTES} bytes, got {len(proof)}")
        try:
            memory = RankMemory(self._device(name), descriptor, size)
            if not begins_with(memory, proof, self.pins):
                raise InvalidArgument("the file descriptor stands for other memory here")
        except GpuFailed as error:
            raise InvalidArgument(error.message) from error
        return memory

    def _device(self, name: GpuName) -> GpuDevice:
        with self._lock:
            device = self._devices.get(name.uuid)
            if device is None:
                device = self._devices[name.uuid] = GpuDevice(name, self._poller)
            return device


def _probe(wanted: bool) -> tuple[dict[str, GpuName], str]:
    """The GPUs that can be folded on, and why there are none."""
    if not wanted:
        return {}, "ALLFOLD_AGENT_GPU says so"
    try:
        found = find()
    except (DriverUnavailable, GpuFailed) as error:
        return {}, str(error)
    problems = {each: _problem(each) for each in {each.architecture for each in found}}
    for each in found:
        if problem := problems[each.architecture]:
            log.warning("does not fold on %s: %s", each.name, problem)
    names = {each.uuid: each for each in found if not problems[each.architecture]}
    reasons = [*filter(None, problems.values())] if found else ["the NVIDIA driver shows no GPU"]
    return names, "; ".join(reasons)


def _problem(architecture: str) -> str:
    """Return the reason why there are no kernels for GPUs of a kind; empty where there are."""
    try:
        kernels.compile_image(_PROBE, architecture)
    except KernelError as error:
        return f"kernels cannot be compiled: {error}"
    return ""
