"""Programs of child processes that check that the fake driver behaves like a real one."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allfold_agent.gpu import kernels
from allfold_core.dtypes import DType
from allfold_core.operations import ReduceOp
from tests.node_agent.gpu import sharing_programs
from tests.node_agent.gpu.sharing_programs import (
    KERNEL,
    NBYTES,
    NUMEL,
    ROUNDS,
    SECONDS,
    device_memory,
    host_memory,
    kept,
    new_stream,
    open_memory,
)
from tests.support.fakes.fake_cuda.processes import serve

with suppress(ImportError):  # each test says that it needs them
    from cuda.bindings import driver

    from tests.support.fakes.fake_cuda.arrays import FakeTensor, check
    from tests.support.fakes.fake_cuda.mappings import (
        GRANULE,
        create,
        give_access,
        mapping,
        name_of,
        reserve,
        use_device,
    )


def versions() -> list[Any]:
    """Return a caller's first answers; the last one is of a function that does not exist."""
    answers = [driver.cuInit(0)[0].name, driver.cuDriverGetVersion()[1]]
    try:
        driver.cuCtxGetCacheConfig()
    except RuntimeError as error:
        return [*answers, str(error)]
    return answers


def devices() -> list[str]:
    """Their UUIDs in the order in which this process numbers them."""
    check(driver.cuInit(0))
    numbers = range(check(driver.cuDeviceGetCount()))
    newest = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
    return [bytes(check(newest(each)).bytes).hex() for each in numbers]


def stale_copies(waits: bool) -> int:
    """Count the times that a stream read what another one had not written yet."""
    use_device()
    writer, reader = new_stream(), new_stream()
    event = check(driver.cuEventCreate(0))
    memory, seen = device_memory(), host_memory(NBYTES)
    stale = 0
    for number in range(ROUNDS):
        check(driver.cuMemsetD8Async(memory, number, NBYTES, writer))
        check(driver.cuEventRecord(event, writer))
        if waits:
            check(driver.cuStreamWaitEvent(reader, event, 0))
        check(driver.cuMemcpyAsync(seen.ctypes.data, memory, NBYTES, reader))
        check(driver.cuStreamSynchronize(reader))
        stale += not (seen.view(np.uint8) == number).all()
        check(driver.cuEventSynchronize(event))
    return stale


def stale_copies_of_the_default_stream(blocking: bool) -> int:
    """The same, where the reader is the legacy default stream."""
    use_device()
    writer = new_stream(blocking)
    memory, seen = device_memory(), host_memory(NBYTES)
    stale = 0
    for number in range(ROUNDS):
        check(driver.cuMemsetD8Async(memory, number, NBYTES, writer))
        check(driver.cuMemcpyAsync(seen.ctypes.data, memory, NBYTES, 0))
        check(driver.cuStreamSynchronize(0))
        stale += not (seen.view(np.uint8) == number).all()
        check(driver.cuStreamSynchronize(writer))
    return stale


def late_event() -> bool:
    """Tell if a wait is for the record before it, and not for one that comes later."""
    use_device()
    first, second = new_stream(), new_stream()
    event, flag = check(driver.cuEventCreate(0)), host_memory(mmap.PAGESIZE)
    check(driver.cuStreamWaitEvent(second, event, 0))  # never recorded: nothing to wait for
    check(driver.cuStreamWaitValue32(first, flag.ctypes.data, 1, 0))
    check(driver.cuEventRecord(event, first))
    check(driver.cuStreamSynchronize(second))
    early = name_of(driver.cuEventQuery(event)) == "NOT_READY"
    flag[0] = 1
    check(driver.cuEventSynchronize(event))
    return early and name_of(driver.cuStreamQuery(first)) == "SUCCESS"


def touch() -> None:
    """Write to device memory from the host, which must end the process."""
    use_device()
    ctypes.memset(device_memory(), 0, 1)


def misuse() -> dict[str, str]:
    """Return the driver's errors by the mistake of each call."""
    context = use_device()
    stream, event = new_stream(), check(driver.cuEventCreate(0))
    memory, pinned, pageable = device_memory(), host_memory(NBYTES), np.zeros(NUMEL, np.int32)
    host, device = pinned.ctypes.data, memory + NBYTES // 2
    freed, gone = device_memory(), new_stream()
    (mapped, _), handle = mapping(), check(create())
    check(driver.cuMemFree(freed))
    check(driver.cuStreamDestroy(gone))
    check(driver.cuMemRelease(handle))
    answers = {
        "behind the end": driver.cuMemcpyAsync(device, host, NBYTES, stream),
        "freed": driver.cuMemcpyAsync(freed, host, NBYTES, stream),
        "freed twice": driver.cuMemFree(freed),
        "not the start": driver.cuMemFree(device),
        "half registered": driver.cuMemcpyAsync(memory, host + NBYTES // 2, NBYTES, stream),
        "a host's address": driver.cuMemcpyHtoD(pageable.ctypes.data, host, NBYTES),
        "too much": driver.cuMemAlloc(1 << 40),
        "nothing": driver.cuMemAlloc(0),
        "destroyed stream": driver.cuStreamSynchronize(gone),
        "event as a stream": driver.cuStreamSynchronize(int(event)),
        "made up": driver.cuEventRecord(4096, stream),
        "registered twice": driver.cuMemHostRegister(host, NBYTES, 0),
        "not registered": driver.cuMemHostUnregister(pageable.ctypes.data),
        "not mapped": driver.cuMemHostRegister(4096, NBYTES, 0),
        "flag not registered": driver.cuStreamWriteValue32(stream, pageable.ctypes.data, 1, 0),
        "flag at an odd place": driver.cuStreamWriteValue32(stream, host + 1, 1, 0),
        "part of a granule": create(NBYTES),
        "more than there is": create(1 << 40),
        "reserved in part": driver.cuMemAddressReserve(NBYTES, 0, 0, 0),
        "mapped twice": driver.cuMemMap(mapped, GRANULE, 0, check(create()), 0),
        "mapped nowhere": driver.cuMemMap(memory, GRANULE, 0, check(create()), 0),
        "released": driver.cuMemMap(reserve(), GRANULE, 0, handle, 0),
        "released twice": driver.cuMemRelease(handle),
        "still mapped": driver.cuMemAddressFree(mapped, GRANULE),
        "unmapped in part": driver.cuMemUnmap(mapped, GRANULE // 2),
        "freed as if allocated": driver.cuMemFree(mapped),
        "unmapped as if mapped": driver.cuMemUnmap(memory, NBYTES),
        "unknown kernel": driver.cuModuleGetFunction(check(driver.cuModuleLoadData(b"x")), b"fold"),
    }
    thread = threading.Thread(target=lambda: answers.update(elsewhere=driver.cuMemAlloc(1)))
    thread.start()
    thread.join(SECONDS)
    check(driver.cuDevicePrimaryCtxRelease(0))
    answers["destroyed context"] = driver.cuMemAlloc(1)
    answers["set again"] = driver.cuCtxSetCurrent(context)
    return {what: name_of(answer) for what, answer in answers.items()}


def pageable_copies() -> bool:
    """Tell if such copies are done when the call returns, and new memory has garbage in it."""
    use_device()
    memory, stream = device_memory(), new_stream()
    given, seen = np.arange(NUMEL, dtype=np.int32), np.zeros(NUMEL, np.int32)
    check(driver.cuMemcpyDtoHAsync(seen.ctypes.data, memory, NBYTES, stream))
    garbage = bool((seen.view(np.uint8) == 0xCD).all())
    check(driver.cuMemcpyHtoDAsync(memory, given.ctypes.data, NBYTES, 0))
    check(driver.cuMemcpyDtoHAsync(seen.ctypes.data, memory, NBYTES, 0))
    return garbage and bool((seen == given).all())


def tensors() -> bool:
    """Tell if the arrays that other tests use keep what they are given."""
    given = np.arange(12).reshape(3, 4)
    tensor = FakeTensor((3, 4), np.int64, own_stream=True).put(given)
    described = tensor.__cuda_array_interface__
    empty, plain = FakeTensor(0), FakeTensor(5, np.float16)
    same = (tensor.get() == given).all() and empty.get().shape == (0,)
    tensor.free()
    return bool(same and described["stream"] > 2 and plain.__cuda_array_interface__["stream"] == 1)


def contexts_in_use() -> list[int]:
    """Return if a device has a context: before and while it is retained, and afterwards."""
    check(driver.cuInit(0))
    states = [check(driver.cuDevicePrimaryCtxGetState(0))[1]]
    use_device()
    states.append(check(driver.cuDevicePrimaryCtxGetState(0))[1])
    check(driver.cuDevicePrimaryCtxRelease(0))
    return [*states, check(driver.cuDevicePrimaryCtxGetState(0))[1]]


def unmapped_too_early(work: str, waits: bool) -> list[str]:
    """Return the errors of calls after memory was unmapped that pending work still needs.

    Args:
        waits: whether all of the work is, and not only some that is behind what is under way.
    """
    use_device()
    stream, (address, _), flag = new_stream(), mapping(), host_memory(mmap.PAGESIZE)
    seen = kept["seen"] = host_memory(GRANULE)
    if waits:
        check(driver.cuStreamWaitValue32(stream, flag.ctypes.data, 1, 0))
    for _ in range(1 if waits else 20 * ROUNDS):
        if work == "kernel":
            launch([address, address], address, stream, numel=GRANULE // 4)
        elif work == "copy":
            check(driver.cuMemcpyAsync(seen.ctypes.data, address, GRANULE, stream))
        else:
            check(driver.cuMemsetD8Async(address, 1, GRANULE, stream))
    answers = [name_of(driver.cuMemUnmap(address, GRANULE))]
    flag[0] = 1
    return [*answers, name_of(driver.cuStreamSynchronize(stream)), name_of(driver.cuMemAlloc(1))]


def launch(inputs: list[int], output: int, stream: int = 0, numel: int = NUMEL) -> None:
    if "kernel" not in kept:
        module = check(driver.cuModuleLoadData(b"not read"))
        kept["kernel"] = check(driver.cuModuleGetFunction(module, KERNEL.encode()))
    _launch(np.array([numel, output, *inputs], np.uint64), stream)


def _launch(arguments: NDArray[np.uint64], stream: int) -> None:
    taken = arguments.copy()
    pointers = np.array([taken.ctypes.data], np.uint64)
    shape = (3, 1, 1, 32, 1, 1)
    check(driver.cuLaunchKernel(kept["kernel"], *shape, 0, stream, pointers.ctypes.data, 0))
    taken[:] = 0  # the call has taken them


def kernel_sum(own_device: int) -> list[float]:
    """Fold memory of another process, of this one and of the host into this one's."""
    address = open_memory(own_device)
    given = FakeTensor(NUMEL, device=own_device).put(np.arange(NUMEL))
    target = FakeTensor(NUMEL, device=own_device)
    host = host_memory(NBYTES).view(np.float32)
    host[:] = 0.5
    launch([given.address, address], target.address)
    launch([target.address, host.ctypes.data], target.address)
    other = np.frombuffer(bytes([1] * 4), np.float32)[0]
    errors = target.get() - (np.arange(NUMEL, dtype=np.float32) + other + np.float32(0.5))
    return [float(np.abs(errors).max())]


def real_fold(compiles: bool) -> list[float]:
    """Return the result of the agent's own kernel for three ranks' tensors, two of which get it."""
    context = use_device()
    numel = 1003
    given = [FakeTensor(numel).put(np.arange(numel) + rank) for rank in range(3)]
    single = DType.FLOAT32
    variant = kernels.Variant(single, single, single, ReduceOp.MEAN, 3, divided=True)
    image = kernels.compile_image(variant, "sm_90") if compiles else b"not read"
    check(driver.cuCtxSetCurrent(context))
    module = check(driver.cuModuleLoadData(np.frombuffer(image + b"\0", np.uint8).ctypes.data))
    kept["kernel"] = check(driver.cuModuleGetFunction(module, variant.name.encode()))
    if compiles:
        assert name_of(driver.cuModuleGetFunction(module, KERNEL.encode())) == "NOT_FOUND"
    addresses = [tensor.address for tensor in given]
    packed = kernels.arguments(variant, addresses, addresses[1:], numel, divisor=3.0)
    _launch(np.frombuffer(packed, np.uint64), 0)
    errors = [tensor.get() - (np.arange(numel) + 1) for tensor in given[1:]]
    return [float(np.abs(each).max()) for each in errors]


def kernel_errors(mistake: str) -> list[str]:
    """Return the errors of later calls after a kernel got a bad address."""
    context = use_device()
    stream, memory = new_stream(), device_memory()
    pinned = host_memory(NBYTES)
    if mistake == "other device":
        use_device(1)
        bad = device_memory()
        check(driver.cuCtxSetCurrent(context))
    elif mistake in ("mapped for another device", "mapped for none"):
        bad = reserve()
        check(driver.cuMemMap(bad, GRANULE, 0, check(create()), 0))
        if mistake != "mapped for none":
            assert give_access(bad, 1) == "SUCCESS"
    else:
        bad = {"pageable": np.zeros(NUMEL).ctypes.data, "made up": memory + (1 << 40)}.get(
            mistake, device_memory()
        )
    if mistake == "freed":
        check(driver.cuMemFree(bad))
    if mistake == "unregistered":
        bad = pinned.ctypes.data
        check(driver.cuMemHostUnregister(bad))
    launch([memory, memory], memory, stream)
    check(driver.cuStreamSynchronize(stream))
    launch([memory, bad], memory, stream)
    calls: list[Callable[[], tuple[Any, ...]]] = [
        lambda: driver.cuStreamSynchronize(stream),
        lambda: driver.cuStreamQuery(0),
        lambda: driver.cuMemAlloc(1),
        lambda: driver.cuMemFree(memory),
    ]
    return sorted({name_of(call()) for call in calls})


def behind_the_end() -> None:
    """A kernel writes more than there is memory."""
    use_device()
    memory = device_memory()
    launch([memory, memory], memory, numel=NUMEL + 128)
    check(driver.cuCtxSynchronize())


def hung() -> list[str]:
    """One of two operations is done; the process must be able to end nevertheless."""
    use_device()
    stream, flags = new_stream(), host_memory(mmap.PAGESIZE)
    events = [check(driver.cuEventCreate(0)) for _ in range(2)]
    for event in events:
        check(driver.cuEventRecord(event, stream))
    check(driver.cuEventSynchronize(events[0]))
    check(driver.cuStreamWriteValue32(new_stream(), flags.ctypes.data, 1, 0))
    deadline = time.monotonic() + 0.1  # what must not happen cannot be awaited
    while time.monotonic() < deadline:
        assert flags[0] == 0
    return [name_of(driver.cuEventQuery(event)) for event in events]


def refused(call: str) -> str:
    use_device()
    if call == "word":
        flag = host_memory(mmap.PAGESIZE)
        return name_of(driver.cuStreamWriteValue32(new_stream(), flag.ctypes.data, 1, 0))
    if call == "register":
        memory = np.frombuffer(mmap.mmap(-1, NBYTES), np.int32)
        return name_of(driver.cuMemHostRegister(memory.ctypes.data, NBYTES, 0))
    free, total = check(driver.cuMemGetInfo())
    check(driver.cuMemAlloc(free - 1))
    assert total == free
    return name_of(driver.cuMemAlloc(1))


if __name__ == "__main__":
    serve(vars(sharing_programs) | globals())
