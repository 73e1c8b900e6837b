"""Programs of child processes that use arenas on a GPU."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import numpy as np

from allfold import _tensors
from allfold._arena import GRANULE
from allfold._calls.call import RankCall
from allfold._cuda import device as device_module
from allfold._cuda.device import CudaDevice, ordinal_of
from allfold._cuda.gpu import CudaArray, Gpu, empty
from allfold._cuda.memory import DeviceMemory, PinnedMemory
from allfold._staging.cuda import CudaStaged
from allfold_core.errors import AllfoldError, ArenaExhausted, InvalidArgument
from allfold_core.protocol.rank_messages import Fence
from tests.client_sdk.cuda_arena_gpu import (
    FIRST,
    SECONDS,
    await_passed,
    free_memory,
    held,
    kept,
    logged,
    open_gpu,
    opened,
    refusal,
    use_for_copies,
)
from tests.support.fakes.fake_cuda.processes import serve

with suppress(ImportError):  # each test says that it needs them
    from cuda.bindings import driver

    from tests.support.fakes.fake_cuda.arrays import check


def fences(rounds: int) -> list[bool]:
    """Tell, per fence from 1 on, if all was copied when the agent saw it passed."""
    gpu, listener = opened()
    block, memory, seen = use_for_copies(gpu, 4096)
    results = []
    for number in range(1, rounds + 1):
        with gpu.turn() as device:
            check(driver.cuMemsetD8Async(block.address, number, 4096, device.stream))
            device.copy(memory.address, block.address, 4096)
            fence = gpu.fence()
        await_passed(listener, fence)
        results.append(bool((seen == number).all() and fence.value == number))
    memory.close()
    return results


def fences_are_passed_in_order(rounds: int) -> bool:
    gpu, listener = opened()
    with gpu.turn():
        given = [gpu.fence() for _ in range(rounds)]
    deadline = time.monotonic() + SECONDS
    while not listener.sees_passed(given[-1]):
        assert time.monotonic() < deadline, "the GPU does not pass the fence"
        passed = [listener.sees_passed(fence) for fence in reversed(given)]
        assert passed == sorted(passed), "one was passed before an earlier one"
    return len({fence.word for fence in given}) == 1 and all(map(listener.sees_passed, given))


def wrap_round() -> list[Any]:
    """The values around the end of 32 bits, and which of them the agent sees passed at the end."""
    gpu, listener = opened()
    gpu._passed = (1 << 32) - 3
    with gpu.turn():
        given = [gpu.fence() for _ in range(4)]
    await_passed(listener, given[-1])
    later = Fence(given[-1].word, given[-1].value + 1)
    passed = [listener.sees_passed(fence) for fence in (*given, later)]
    return [[fence.value for fence in given], passed]


class OnStream:
    """An array as a library has it that works on a stream of its own."""

    def __init__(self, array: CudaArray, stream: int) -> None:
        self._array = array
        self.shape = array.shape
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream}


def staged_list(gpu: Gpu, nbytes: int) -> tuple[int, CudaStaged]:
    """A list of arrays, which is copied where a single one is not, and the address of the first."""
    with gpu.device.current():
        stream = int(check(driver.cuStreamCreate(1)))
    listed = [CudaArray(gpu, (nbytes,), np.uint8) for _ in range(2)]
    views = tuple(_tensors.view(OnStream(each, stream)) for each in listed)
    staged = CudaStaged(gpu, RankCall(inputs=views, outputs=views, in_place=True), 1)
    return listed[0].__cuda_array_interface__["data"][0], staged


def reuse_before_the_last_copy(nbytes: int) -> list[Any]:
    """Drop a result that is still to be copied; whether a new array has its memory, unspoiled."""
    gpu, listener = opened()
    address, staged = staged_list(gpu, nbytes)
    await_passed(listener, staged.fence)
    busy = gpu.staging.allocate(1)
    with gpu.turn() as device:
        for _ in range(20):  # each takes its time
            check(driver.cuMemsetD8Async(busy.address, 0, 1, device.stream))
    show = staged.copy_out()
    staged.free()
    show()
    del staged, show
    gc.collect()
    array = CudaArray(gpu, (nbytes,), np.uint8)
    found = [array.__cuda_array_interface__["data"][0] == address]
    given, got = np.full(nbytes, 7, np.uint8), np.empty(nbytes, np.uint8)
    with gpu.device.current():
        check(driver.cuMemcpyHtoDAsync(address, given.ctypes.data, nbytes, 0))
        check(driver.cuStreamSynchronize(0))
        check(driver.cuStreamSynchronize(gpu.device.stream))
        check(driver.cuMemcpyDtoH(got.ctypes.data, address, nbytes))
    return [*found, bool((got == given).all())]


def wait_while_a_graph_is_recorded() -> str:
    """Return the error of waiting for a result on a stream that records a graph."""
    gpu, _ = opened()
    _, staged = staged_list(gpu, 1000)
    show = staged.copy_out()
    try:
        with mock.patch.object(device_module, "is_recording", lambda _: True):
            show()
    except InvalidArgument as error:
        show()
        return error.message
    return "nothing"


def close_stuck(operations: int, patience: float) -> dict[str, Any]:
    """Leave a GPU that does nothing any more after so many operations.

    Returns the memory that was there, for how long each piece was waited for, and what is logged.
    """
    lines = logged()
    gpu, listener = opened()
    del lines.lines[:]
    CudaArray(gpu, (1000,), np.float32)
    device = gpu.device
    with gpu.turn():
        for _ in range(operations):
            gpu.fence()
    waits, wait = [], device.finished_within

    def waited(seconds: float, stream: Any = None) -> bool:
        waits.append(seconds)
        return wait(seconds, stream)

    with (
        mock.patch.object(device, "finished_within", waited),
        mock.patch.object(device, "_patience", patience),
    ):
        gpu.close()
        gc.collect()
    return {
        "segments": len(listener.shared) + len(listener.words),
        "waits": waits,
        "logged": lines.lines,
    }


def arrays() -> dict[str, bool]:
    """Check the memory of arrays: where it lies, and when it is free again."""
    gpu, listener = opened()
    first = CudaArray(gpu, (3, 4), np.float32)
    address, _ = first.__cuda_array_interface__["data"]
    second = CudaArray(gpu, (5,), np.int64)
    apart = second.__cuda_array_interface__["data"][0]
    found = {
        "interface": first.__cuda_array_interface__["shape"] == first.shape == (3, 4)
        and first.__cuda_array_interface__["typestr"] == "<f4"
        and first.dtype == np.float32,
        "apart": abs(apart - address) >= 48,
        "located": gpu.arrays.locate(address, 48) is not None,
        "elsewhere": gpu.arrays.locate(1 << 20, 48) is None,
    }
    del first
    gc.collect()
    again = CudaArray(gpu, (12,), np.float32)
    found["given back"] = again.__cuda_array_interface__["data"][0] == address
    found["one segment"] = len(listener.shared) == 2  # the other is for copies
    found["none for nothing"] = empty(gpu, (0, 3), "float32").shape == (0, 3)
    large = CudaArray(gpu, (FIRST + 1,), np.uint8)
    found["grows"] = len(listener.shared) == 3
    del large, again
    gc.collect()
    CudaArray(gpu, (FIRST + 1,), np.uint8)
    found["grows once"] = len(listener.shared) == 3
    return found


def close_with_an_array() -> list[Any]:
    """Free memory of a GPU: with an arena and an array, after its end, and without the array."""
    gpu, listener = opened()
    device = gpu.device
    array: CudaArray | None = CudaArray(gpu, (1000,), np.float32)
    free = [free_memory()]
    gpu.close()
    listener.close()
    kept.clear()
    assert array is not None
    address, _ = array.__cuda_array_interface__["data"]
    kept["gpu"] = gpu
    target = np.empty(1000, np.float32)
    with device.current():  # it can still be used
        check(driver.cuMemcpyDtoH(target.ctypes.data, address, target.nbytes))
    free.append(free_memory())
    array = None
    gc.collect()
    free.append(free_memory())
    return free


def drop_memory_in_use(stream: str) -> list[Any]:
    """Drop memory that work on the default stream, or on ours, has still to come to.

    Returns what has become of the work, and whether the memory has gone in the end.
    """
    gpu, _ = opened()
    block, memory, _ = use_for_copies(gpu, 4096)
    device = gpu.device
    gpu.close()
    with device.current():
        for _ in range(20):
            on = 0 if stream == "default" else device.stream
            check(driver.cuMemcpyAsync(memory.address, block.address, 4096, on))
    kept.clear()
    del block, gpu
    gc.collect()
    with device.current():
        answer = str(driver.cuCtxSynchronize()[0].name)
    memory.close()
    return [answer, held()["shared"]]


def many_gpus(rounds: int) -> list[dict[str, int]]:
    """Return the counts of :func:`held` after each round of opening, use and end."""
    found = []
    for number in range(rounds):
        open_gpu(refuses=number % 2 == 1)
        gpu, listener = opened()
        with gpu.turn():
            fence = gpu.fence()
        with suppress(InvalidArgument):
            empty(gpu, (10,), np.float32)
        await_passed(listener, fence)
        gpu.close()
        listener.close()
        kept.clear()
        del gpu, listener, fence
        found.append(held())
    return found


def exhaust() -> dict[str, Any]:
    """Return the error of a GPU without memory for another segment, and that the arena goes on."""
    gpu, listener = opened()
    before = held()
    arrays_: list[CudaArray] = []
    try:
        while len(arrays_) < 100:
            arrays_.append(CudaArray(gpu, (FIRST // 2,), np.uint8))
    except ArenaExhausted as error:
        message = error.message
    segments = len(listener.shared)
    arrays_.pop()
    gc.collect()
    CudaArray(gpu, (FIRST // 2,), np.uint8)
    return {
        "message": message,
        "segments": segments,
        "leak": held()["descriptors"] - before["descriptors"],
    }


def refused_later() -> list[Any]:
    """Return the effects of an agent that cannot open a later segment."""
    gpu, listener = opened()
    free, before = free_memory(), held()
    listener.refuses = True
    try:
        CudaArray(gpu, (FIRST + 1,), np.uint8)
    except AllfoldError as error:
        answer = type(error).__name__
    gc.collect()
    return [answer, free_memory() == free, held() == before]


def share_by_hand(kind: str) -> list[Any]:
    """Make and drop memory: what it took of the GPU, and what is left."""
    gpu, _ = opened()
    free, before = free_memory(), held()
    made = (DeviceMemory if kind == "device" else PinnedMemory)(gpu.device, 3 * GRANULE + 1)
    taken = free - free_memory()
    if isinstance(made, DeviceMemory):
        os.close(made.descriptor)
    size = made.size
    made.close()
    del made
    return [taken, size, free - free_memory(), held() == before]


def open_invalid() -> str:
    try:
        open_gpu()
    except InvalidArgument as error:
        return error.message
    raise AssertionError("it was opened")


def empty_without_an_arena() -> str:
    gpu, _ = opened()
    try:
        empty(gpu, (3,), "float32")
    except InvalidArgument as error:
        return error.message
    raise AssertionError("there was an arena")


def ordinal_in_a_thread(device: int) -> list[int]:
    """The number of the device of an array, in threads that use this one, another and none."""
    open_gpu(ordinal=device)
    gpu, _ = opened()
    address, _ = CudaArray(gpu, (10,), np.float32).__cuda_array_interface__["data"]
    found = [ordinal_of(address)]
    with CudaDevice(1 - device).current():
        found.append(ordinal_of(address))
    with gpu.device.current():
        found.append(ordinal_of(address))
    assert not int(check(driver.cuCtxGetCurrent()))
    return found


def stuck() -> list[Any]:
    """Tell if a device that hangs is noticed in time."""
    gpu, _ = opened()
    with gpu.turn() as device:
        gpu.fence()
        return [device.finished_within(0.05)]


def spoiled() -> list[str]:
    """Return the errors of every use of a GPU after it has failed."""
    gpu, _ = opened()
    block, memory, _ = use_for_copies(gpu, 4096)
    with gpu.turn() as device:
        for _ in range(20):
            device.copy(memory.address, block.address, 4096)
        check(driver.cuMemUnmap(block.owner.address, FIRST))
        calls: list[Callable[[], object]] = [
            lambda: device.finished_within(SECONDS),
            lambda: device.copy(memory.address, memory.address, 1),
            gpu.fence,
            device.mark,
        ]
        return [refusal(call) for call in calls]


if __name__ == "__main__":
    serve(globals())
