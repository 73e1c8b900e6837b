"""Programs that share memory of the fake driver's devices, and memory for any program."""

from __future__ import annotations

import mmap
import os
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.fakes.fake_cuda.processes import receive, send

with suppress(ImportError):  # each test says that it needs them
    from cuda.bindings import driver

    from tests.support.fakes.fake_cuda.arrays import check
    from tests.support.fakes.fake_cuda.mappings import (
        GRANULE,
        create,
        descriptor_type,
        exported,
        give_access,
        mapping,
        name_of,
        reserve,
        use_device,
    )


SECONDS = 60.0
NUMEL = 1000
NBYTES = 4 * NUMEL
ROUNDS = 20
KERNEL = "fold_float32_float32_float32_sum_2_0_0"

kept: dict[str, Any] = {}
"""Objects that outlive one program of a process."""


def host_memory(nbytes: int, file: int = -1) -> NDArray[np.int32]:
    """Memory of the host that the device may use, part of a file where one is given."""
    memory = np.frombuffer(mmap.mmap(file, nbytes), np.int32)
    check(driver.cuMemHostRegister(memory.ctypes.data, nbytes, 0))
    kept.setdefault("registered", []).append(memory)  # mapped as long as it is registered
    return memory


def new_stream(blocking: bool = False) -> int:
    return int(check(driver.cuStreamCreate(0 if blocking else 1)))


def device_memory(nbytes: int = NBYTES) -> int:
    return int(check(driver.cuMemAlloc(nbytes)))


def export(value: int, ordinal: int = 0, times: int = 1) -> None:
    """Make memory, fill it and hand over descriptors that stand for it."""
    use_device(ordinal)
    kept["memory"], handle = mapping(ordinal)
    assert fill(kept["memory"], value) == "SUCCESS"
    for _ in range(times):
        send(exported(handle))
    check(driver.cuMemRelease(handle))


def export_unshareable() -> str:
    use_device()
    handle = check(create(shareable=False))
    return name_of(driver.cuMemExportToShareableHandle(handle, descriptor_type(), 0))


def open_memory(ordinal: int = 0, granules: int = 1, user: int | None = None) -> Any:
    """The address of memory whose descriptor was handed over, or why there is none.

    Args:
        user: the device that gets access, if not ``ordinal``; -1 for none.
    """
    use_device(ordinal)
    descriptor, size = receive(), granules * GRANULE
    answer = driver.cuMemImportFromShareableHandle(descriptor, descriptor_type())
    os.close(descriptor)
    if answer[0]:
        return name_of(answer)
    address = reserve(size)
    mapped = name_of(driver.cuMemMap(address, size, 0, answer[1], 0))
    check(driver.cuMemRelease(answer[1]))
    if mapped == "SUCCESS" and user != -1:
        mapped = give_access(address, ordinal if user is None else user, size)
    return address if mapped == "SUCCESS" else mapped


def unmap(address: int | None = None) -> list[str]:
    """Let go of a mapping, of what was exported if of no other, and of its address."""
    address = kept.pop("memory") if address is None else address
    calls = (driver.cuMemUnmap, driver.cuMemAddressFree)
    return [name_of(call(address, GRANULE)) for call in calls]


def fill(address: int, value: int) -> str:
    answer = driver.cuMemsetD8Async(address, value, NBYTES, 0)
    return name_of(answer if answer[0] else driver.cuStreamSynchronize(0))


def read(address: int) -> Any:
    """The one byte that all of shared memory consists of, or why it cannot be read."""
    seen = np.zeros(NBYTES, np.uint8)
    answer = driver.cuMemcpyDtoH(seen.ctypes.data, address, NBYTES)
    return name_of(answer) if answer[0] else [*map(int, np.unique(seen))]


def place(address: int) -> list[int]:
    kinds: Any = driver.CUpointer_attribute
    kind = check(driver.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address))
    number = check(driver.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address))
    return [int(kind), int(number)]


def read_exported() -> Any:
    return read(kept["memory"])


def granules() -> list[int]:
    """Return the unit of shared memory, and the device memory that 3 MiB take and give back."""
    use_device()
    wanted, kinds = driver.CUmemAllocationProp(), driver.CUmemAllocationGranularity_flags
    free, _ = check(driver.cuMemGetInfo())
    address, size = reserve(2 * GRANULE), 2 * GRANULE
    handle = check(create(size))
    check(driver.cuMemMap(address, size, 0, handle, 0))
    check(driver.cuMemRelease(handle))
    between, _ = check(driver.cuMemGetInfo())
    check(driver.cuMemUnmap(address, size))
    after, _ = check(driver.cuMemGetInfo())
    granule = driver.cuMemGetAllocationGranularity(wanted, kinds.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
    return [int(check(granule)), free - between, free - after]


def produce(file: int, ordered: bool) -> None:
    """Fill memory again and again, and tell each time by a flag in a file.

    The second word of the file says how far the consumer is, the third one up to where there may
    be data.
    """
    export(0)
    kept["flags"] = host_memory(mmap.PAGESIZE, file)
    data = new_stream()
    kept["producer"] = threading.Thread(
        target=_produce, args=(data, data if ordered else new_stream())
    )
    kept["producer"].start()


def _produce(data: int, flag: int) -> None:
    use_device()
    flags = kept["flags"]
    for number in range(1, ROUNDS + 1):
        check(driver.cuStreamWaitValue32(data, flags.ctypes.data + 8, number, 0))
        check(driver.cuMemsetD8Async(kept["memory"], number, NBYTES, data))
        check(driver.cuStreamWriteValue32(flag, flags.ctypes.data, number, 0))
        # Not before the consumer has read it; and neither may be a round ahead of the other.
        check(driver.cuStreamWaitValue32(data, flags.ctypes.data + 4, number, 0))
        check(driver.cuStreamSynchronize(data))
        check(driver.cuStreamSynchronize(flag))


def consume(file: int, ordered: bool) -> int:
    """Count the times that the memory did not have what the flag said.

    Where flags are not ordered, data come when the memory was read: a flag that is early is seen to
    be so, however late the reader is.
    """
    memory, flags = open_memory(), np.frombuffer(mmap.mmap(file, mmap.PAGESIZE), np.int32)
    wrong = 0
    deadline = time.monotonic() + SECONDS
    for number in range(1, ROUNDS + 1):
        if ordered:
            flags[2] = number
        while flags[0] < number:
            assert time.monotonic() < deadline, "the flag did not come"
        wrong += read(memory) != [number]
        flags[2] = flags[1] = number
    return wrong
