"""Programs of ranks and of an agent that use the driver without a GPU."""

from __future__ import annotations

import gc
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from allfold_agent.gpu import gpus as proof_module
from allfold_agent.gpu.completions import FencePoller
from allfold_agent.gpu.device import GpuDevice, GpuEvent, RankMemory
from allfold_agent.gpu.gpus import Gpus
from allfold_agent.gpu.kernels import Variant
from allfold_agent.runtime.buffers import MappedMemory
from allfold_core.dtypes import DType
from allfold_core.errors import GpuFailed, InvalidArgument
from allfold_core.operations import ReduceOp
from tests.support.fakes.fake_cuda.processes import receive, send, serve

with suppress(ImportError):  # each test says that it needs them
    from cuda.bindings import driver

    from tests.support.fakes.fake_cuda.arrays import check
    from tests.support.fakes.fake_cuda.mappings import GRANULE, exported, mapping, use_device


SECONDS = 30.0
NUMEL = 1003
NBYTES = 4 * NUMEL
SINGLE = DType.FLOAT32
SUM_OF_TWO = Variant(SINGLE, SINGLE, SINGLE, ReduceOp.SUM, 2)

kept: dict[str, Any] = {}


def share(value: float, ordinal: int = 0) -> str:
    """Fill memory with a number and hand over its descriptor; what it begins with, in hex."""
    use_device(ordinal)
    address, handle = mapping(ordinal)
    given = np.full(GRANULE // 4, value, np.float32)
    check(driver.cuMemcpyHtoD(address, given.ctypes.data, GRANULE))
    kept["shared"] = address
    send(exported(handle))
    return given[:4].tobytes().hex()


def shared() -> float:
    """The one number that the memory now has in its first elements."""
    (found,) = np.unique(values(kept["shared"]))
    return float(found)


def values(address: int) -> Any:
    found = np.empty(NUMEL, np.float32)
    check(driver.cuMemcpyDtoH(found.ctypes.data, address, NBYTES))
    return found


def find(wanted: bool) -> dict[str, Any]:
    """Return the GPUs by UUID, and the reason why there are none."""
    gpus = kept["gpus"] = Gpus(wanted, FencePoller("test"))
    named = {uuid: [name.ordinal, name.name] for uuid, name in gpus.names.items()}
    return {"named": named, "reason": gpus.reason, "welcome": gpus.welcome()}


def known() -> list[str]:
    """The UUIDs of what was found."""
    return [*kept["gpus"].names]


def open_memory(
    uuid: str, proof: str, size: int | None = None, patience: float = SECONDS
) -> str | None:
    """Open memory of which a descriptor was handed over; why that is refused."""
    proof_module._PATIENCE_SECONDS = patience
    descriptor = receive()
    try:
        memory = kept["gpus"].open(uuid, descriptor, size or GRANULE, bytes.fromhex(proof))
    except InvalidArgument as error:
        return error.message
    finally:
        os.close(descriptor)
    kept.setdefault("opened", []).append(memory)
    return None


def contents(number: int) -> float:
    (found,) = np.unique(on_gpu(opened(number)))
    return float(found)


def opened(number: int) -> RankMemory:
    memory: RankMemory = kept["opened"][number]
    return memory


def on_gpu(memory: RankMemory) -> Any:
    with memory.device.current():
        return values(memory.address)


def drop_all() -> list[int]:
    """Count the mappings of shared memory, before and after all of it is dropped."""
    before, devices = mapped_files(), [memory.device for memory in kept["opened"]]
    kept["opened"].clear()
    for device in devices:
        await_releases(device)
    return [before, mapped_files()]


def await_releases(device: GpuDevice) -> None:
    """Return when the device has let go of all that was dropped."""
    done = Event()
    device.releases.later(done.set)
    assert done.wait(SECONDS), "nothing is let go of"


def mapped_files() -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:fake_cuda_of" in line for line in maps)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def allow_others() -> list[Any]:
    """Tell if one device reaches another, and return the error of giving it access."""
    one, other = (memory.device for memory in kept["opened"])
    reached = [one.reaches(one), one.reaches(other), other.reaches(one)]
    with one.current():
        try:
            opened(1).allow(one)
        except GpuFailed as error:
            return [*reached, error.message]
        return [*reached, float(values(opened(1).address)[0])]


def pinned_memory() -> tuple[MappedMemory, Any]:
    """MappedMemory memory and an array of it."""
    memory = MappedMemory(mmap.mmap(-1, NBYTES))
    return memory, np.frombuffer(memory.memory, np.float32)


def await_point(device: GpuDevice, point: GpuEvent) -> None:
    deadline = time.monotonic() + SECONDS
    while not point.is_reached():
        assert time.monotonic() < deadline, "the point is not reached"


def fold(number: int, launches: int = 1) -> list[float]:
    """The sums of a rank's memory and numbers in the host's, there and in the rank's memory."""
    memory = opened(number)
    gpus, device = kept["gpus"], memory.device
    given, numbers = pinned_memory()
    result, sums = pinned_memory()
    numbers[:] = np.arange(NUMEL)
    with device.current():
        expected = values(memory.address) + numbers
        inputs = [memory.address, gpus.pins.address(given, device)]
        for _ in range(launches):
            outputs = [gpus.pins.address(result, device)]
            device.launch(SUM_OF_TWO, inputs, outputs, NUMEL, 1.0, 1.0)
        device.launch(SUM_OF_TWO, inputs, [memory.address, *outputs], NUMEL, 1.0, 1.0)
        await_point(device, device.mark())
    errors = [sums - expected, on_gpu(memory) - expected]
    return [float(np.abs(each).max()) for each in errors]


def has_folded(number: int) -> list[bool]:
    """Tell if the kernel is known, before and after the first launch."""
    device = opened(number).device
    before = device.has(SUM_OF_TWO)
    fold(number)
    return [before, device.has(SUM_OF_TWO)]


def collect_in_another_context() -> list[float]:
    """Launch on one device, while a point of another is dropped in its context."""
    one, other = (memory.device for memory in kept["opened"])
    for _ in range(5):
        with other.current():
            point: GpuEvent | None = other.mark()
        with one.current():
            assert point is not None
            await_point(other, point)  # which needs the other context
            point = None
            gc.collect()
            assert int(check(driver.cuCtxGetDevice())) == one.ordinal
            marked = one.mark()
            await_point(one, marked)
    return [*fold(0), *fold(1)]


def points_end() -> list[Any]:
    """Return the errors of waits for a device: one for its work, one after it hangs."""
    device = opened(0).device
    told: list[Any] = []
    for seconds in (SECONDS, 0.05):
        with device.current():
            point = device.mark()
        device.completions.add(point, told.append, seconds)
    deadline = time.monotonic() + SECONDS
    while len(told) < 2:
        assert time.monotonic() < deadline, "nobody was told"
        time.sleep(0.001)
    return [error and type(error).__name__ for error in told]


def pin_twice(devices: int) -> list[bool]:
    """Tell if memory has the same address for all devices, always."""
    pins, memory = kept["gpus"].pins, pinned_memory()[0]
    found = [pins.address(memory, opened(each).device) for each in range(devices)] * 2
    return [address == found[0] for address in found]


def pin_again() -> bool:
    """Tell if memory can be registered at an address where other memory was registered before."""
    pins, device = kept["gpus"].pins, opened(0).device
    before = MappedMemory(mmap.mmap(-1, NBYTES))
    address = pins.address(before, device)
    del before
    await_releases(device)
    elsewhere: list[MappedMemory] = []
    while len(elsewhere) < 100:
        memory = MappedMemory(mmap.mmap(-1, NBYTES))
        if memory.address == address:
            return bool(pins.address(memory, device) == address)
        elsewhere.append(memory)
    raise AssertionError("the kernel does not use the address again")


def unpinned_first() -> list[str]:
    """Return the events of memory that is dropped, in order."""
    events: list[str] = []

    class Seen(mmap.mmap):
        def __del__(self) -> None:
            events.append("unmapped")

    pins, device = kept["gpus"].pins, opened(0).device
    memory = MappedMemory(Seen(-1, NBYTES))
    address = pins.address(memory, device)
    with device.current():
        assert not driver.cuMemHostGetDevicePointer(address, 0)[0]
    calls = {"unregister": driver.cuMemHostUnregister}

    def unregister(where: int) -> Any:
        assert where == address
        events.append("unregistered")
        return calls["unregister"](where)

    driver.cuMemHostUnregister = unregister
    try:
        del memory
        gc.collect()
        await_releases(device)
    finally:
        driver.cuMemHostUnregister = calls["unregister"]
    return events


if __name__ == "__main__":
    serve(globals())
