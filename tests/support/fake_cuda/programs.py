"""What child processes run to see whether the driver without a GPU behaves like a real one."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.support.fake_cuda.processes import receive, send, serve

from allfold_agent.gpu import kernels
from allfold_core.dtypes import DType
from allfold_core.operations import ReduceOp

with suppress(ImportError):  # each test says that it needs them
    from cuda.bindings import driver
    from tests.support.fake_cuda.arrays import FakeTensor, check
    from tests.support.fake_cuda.mappings import (
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
"""What outlives one program of a process."""


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


def versions() -> list[Any]:
    """What a caller sees first; the last one is a function that is not there."""
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
    """How often a stream read what another one had not written yet."""
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
    """Whether a wait is for the record before it, and not for one that comes later."""
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
    """What no host code may do."""
    use_device()
    ctypes.memset(device_memory(), 0, 1)


def misuse() -> dict[str, str]:
    """What the driver says to calls that are wrong, by what is wrong about them."""
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
    """Whether they are done when the call returns, and new memory has garbage in it."""
    use_device()
    memory, stream = device_memory(), new_stream()
    given, seen = np.arange(NUMEL, dtype=np.int32), np.zeros(NUMEL, np.int32)
    check(driver.cuMemcpyDtoHAsync(seen.ctypes.data, memory, NBYTES, stream))
    garbage = bool((seen.view(np.uint8) == 0xCD).all())
    check(driver.cuMemcpyHtoDAsync(memory, given.ctypes.data, NBYTES, 0))
    check(driver.cuMemcpyDtoHAsync(seen.ctypes.data, memory, NBYTES, 0))
    return garbage and bool((seen == given).all())


def tensors() -> bool:
    """Whether the arrays that other tests use keep what they are given."""
    given = np.arange(12).reshape(3, 4)
    tensor = FakeTensor((3, 4), np.int64, own_stream=True).put(given)
    described = tensor.__cuda_array_interface__
    empty, plain = FakeTensor(0), FakeTensor(5, np.float16)
    same = (tensor.get() == given).all() and empty.get().shape == (0,)
    tensor.free()
    return bool(same and described["stream"] > 2 and plain.__cuda_array_interface__["stream"] == 1)


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
    """What memory is shared in units of, and what of the device 3 MiB of it take and give back."""
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


def contexts_in_use() -> list[int]:
    """Whether a device has a context, before and while it is retained, and afterwards."""
    check(driver.cuInit(0))
    states = [check(driver.cuDevicePrimaryCtxGetState(0))[1]]
    use_device()
    states.append(check(driver.cuDevicePrimaryCtxGetState(0))[1])
    check(driver.cuDevicePrimaryCtxRelease(0))
    return [*states, check(driver.cuDevicePrimaryCtxGetState(0))[1]]


def unmapped_too_early(work: str, waits: bool) -> list[str]:
    """What calls say when memory goes that work is still to come for.

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


def produce(file: int, ordered: bool) -> None:
    """Fill memory again and again, and tell each time by a flag in a file.

    The second word of the file says how far the consumer is.
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
        check(driver.cuMemsetD8Async(kept["memory"], number, NBYTES, data))
        check(driver.cuStreamWriteValue32(flag, flags.ctypes.data, number, 0))
        # Not before the consumer has read it; and neither may be a round ahead of the other.
        check(driver.cuStreamWaitValue32(data, flags.ctypes.data + 4, number, 0))
        check(driver.cuStreamSynchronize(data))
        check(driver.cuStreamSynchronize(flag))


def consume(file: int) -> int:
    """How often the memory did not have what the flag said."""
    memory, flags = open_memory(), np.frombuffer(mmap.mmap(file, mmap.PAGESIZE), np.int32)
    wrong = 0
    deadline = time.monotonic() + SECONDS
    for number in range(1, ROUNDS + 1):
        while flags[0] < number:
            assert time.monotonic() < deadline, "the flag did not come"
        wrong += read(memory) != [number]
        flags[1] = number
    return wrong


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
    """What the agent's own kernel makes of three ranks' tensors, for two of them."""
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
    """What later calls say after a kernel got a bad address."""
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
    serve(globals())
