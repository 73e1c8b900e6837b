"""Arenas for tensors on a GPU: the way they are on, their fences, and that nothing of them stays.

Everything runs in child processes on the driver without a GPU, with an agent that only listens.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol, Unpack
from unittest import mock

import numpy as np
import pytest
from tests.support import fake_cuda
from tests.support.fake_cuda.processes import Process, serve
from tests.support.require import requires

from allfold import _tensors
from allfold._arena import GRANULE, Block
from allfold._calls.call import Call
from allfold._cuda import device as device_module
from allfold._cuda.arrays import CudaArray, empty
from allfold._cuda.device import Device, ordinal_of
from allfold._cuda.gpu import Agent, Gpu
from allfold._cuda.memory import DeviceMemory, PinnedMemory
from allfold._cuda.paths import VARIABLE
from allfold._cuda.staging import CudaStaged
from allfold_core.errors import AllfoldError, ArenaExhausted, GpuFailed, InvalidArgument
from allfold_core.local_wire import FENCE_WORD, Fence

with suppress(ImportError):  # each test says that it needs them
    from cuda.bindings import driver
    from tests.support.fake_cuda.arrays import check

MODULE = "tests.client_sdk.test_cuda_arena"
SECONDS = 30.0
FIRST = 32 << 20
"""The first segment on a GPU, in bytes."""
NO_GPU = "the agent folds on no GPU"

# ---------------------------------------------------------------- what the child processes run

kept: dict[str, Any] = {}


class Listener:
    """What a session tells the agent; says no where a test wants it.

    Attributes:
        words: the segments in the host's memory, as the agent sees them.
        shared: (number, size, UUID) of those on a GPU.
    """

    def __init__(self, *, refuses: bool = False, sees: bool = True) -> None:
        self.refuses = refuses
        self.words: dict[int, mmap.mmap] = {}
        self.shared: list[tuple[int, int, str]] = []
        gpus = {uuid: f"GPU {uuid}" for uuid in uuids()} if sees else {}
        self.agent = Agent(gpus, NO_GPU, count(), self.share, self.share_gpu)

    def share(self, number: int, size: int, descriptor: int) -> None:
        assert os.fstat(descriptor).st_size == size
        self.words[number] = mmap.mmap(descriptor, mmap.PAGESIZE)

    def share_gpu(self, number: int, size: int, uuid: str, descriptor: int, proof: bytes) -> None:
        if self.refuses:
            raise InvalidArgument("the agent says no")
        assert len(proof) >= 16
        assert os.pread(descriptor, len(proof), 0) == proof
        assert os.fstat(descriptor).st_size == size
        self.shared.append((number, size, uuid))

    def sees_passed(self, fence: Fence) -> bool:
        memory = self.words[fence.word.segment]
        return fence.is_passed(*FENCE_WORD.unpack_from(memory, fence.word.offset))

    def close(self) -> None:
        for memory in self.words.values():
            memory.close()


class Lines(logging.Handler):
    """What is logged: level and text."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append([record.levelname, record.getMessage()])


def uuids() -> list[str]:
    if driver.cuInit(0)[0]:
        return []
    newest = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
    numbers = range(check(driver.cuDeviceGetCount()))
    return [bytes(check(newest(each)).bytes).hex() for each in numbers]


def logged() -> Lines:
    lines, logger = Lines(), logging.getLogger("allfold")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    logger.propagate = False
    return lines


def open_gpu(refuses: bool = False, sees: bool = True, ordinal: int = 0) -> dict[str, Any]:
    """The way, and what is logged of it."""
    lines, listener = logged(), Listener(refuses=refuses, sees=sees)
    kept["listener"] = listener
    gpu = kept["gpu"] = Gpu(ordinal, listener.agent)
    return {
        "path": gpu.path.value,
        "why": gpu.why,
        "logged": lines.lines,
        "shares": gpu.shares_memory,
        "shared": listener.shared,
        "uuids": uuids(),
    }


def opened() -> tuple[Gpu, Listener]:
    if "gpu" not in kept:
        open_gpu()
    return kept["gpu"], kept["listener"]


def use_for_copies(gpu: Gpu, nbytes: int) -> tuple[Block, PinnedMemory, Any]:
    """A block of the arena, and page-locked memory with an array of it."""
    memory = PinnedMemory(gpu.device, GRANULE)
    assert memory.bytes is not None
    return gpu.staging.allocate(nbytes), memory, memory.bytes[:nbytes]


def await_passed(listener: Listener, fence: Fence) -> None:
    deadline = time.monotonic() + SECONDS
    while not listener.sees_passed(fence):
        assert time.monotonic() < deadline, "the GPU does not pass the fence"


def fences(rounds: int) -> list[bool]:
    """Whether all was copied when the agent saw each fence passed; they are counted from 1."""
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
    staged = CudaStaged(gpu, Call(inputs=views, outputs=views, in_place=True), 1)
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
    show = staged.bring_home()
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
    """What is said to whoever wants to see a result on a stream that records a graph."""
    gpu, _ = opened()
    _, staged = staged_list(gpu, 1000)
    show = staged.bring_home()
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


def free_memory() -> int:
    with kept["gpu"].device.current():
        free, _ = check(driver.cuMemGetInfo())
    return int(free)


def arrays() -> dict[str, bool]:
    """What becomes of the memory of arrays."""
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


def held() -> dict[str, int]:
    """What this process has: memory of the GPU, descriptors, mappings."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "arenas": sum("allfold-arena" in line for line in maps),
        "shared": sum("fake_cuda_of" in line for line in maps),
    }


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
    """What this process has, after each round of opening, use and end."""
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
    """What is said when the GPU has no memory for another segment, and that the arena goes on."""
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
    """What happens when the agent cannot open a later segment."""
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
    with Device(1 - device).current():
        found.append(ordinal_of(address))
    with gpu.device.current():
        found.append(ordinal_of(address))
    assert not int(check(driver.cuCtxGetCurrent()))
    return found


def stuck() -> list[Any]:
    """Whether a device that hangs is noticed in time."""
    gpu, _ = opened()
    with gpu.turn() as device:
        gpu.fence()
        return [device.finished_within(0.05)]


def spoiled() -> list[str]:
    """What those hear who use a GPU that has come to grief."""
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


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except GpuFailed as error:
        return error.message
    return "nothing"


# ------------------------------------------------------------------------------------------- tests


class Start(Protocol):
    def __call__(self, path: str = "", **settings: Unpack[fake_cuda.Settings]) -> Process: ...


@pytest.fixture(autouse=True)
def _components() -> None:
    for each in ("g++", "cuda-bindings"):
        requires(each)


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[Process] = []

    def _start(path: str = "", **settings: Unpack[fake_cuda.Settings]) -> Process:
        variables = fake_cuda.environment(**settings) | {VARIABLE: path}
        processes.append(Process(MODULE, variables))
        return processes[-1]

    yield _start
    for process in processes:
        with process:
            pass


def test_the_agent_opens_the_memory_of_a_gpu_that_it_sees(start: Start) -> None:
    with start() as process:
        found = process.run(open_gpu)
    assert found["path"] == "ipc"
    assert found["shares"]
    assert found["shared"] == [[1, FIRST, found["uuids"][0]]]
    (line,) = found["logged"]
    assert line == ["INFO", f"tensors on cuda:0: path ipc, because {found['why']}"]


def test_it_is_the_memory_of_the_gpu_that_is_asked_for(start: Start) -> None:
    with start(devices=2) as process:
        found = process.run(open_gpu, ordinal=1)
    assert [uuid for _, _, uuid in found["shared"]] == [found["uuids"][1]]
    assert "cuda:1" in found["logged"][0][1]


PINNED = {
    "the user says so": ({}, "pinned", {}, f"{VARIABLE} says so"),
    "the agent sees no GPU": ({}, "", {"sees": False}, NO_GPU),
    "the agent cannot open it": ({}, "", {"refuses": True}, "with the agent: the agent says no"),
    "the agent cannot, though asked": ({}, "ipc", {"refuses": True}, "the agent says no"),
    "the GPU has no memory left": ({"memory_mb": 16}, "", {}, "no memory for 32 MiB more"),
}
HOST = {
    "the user says so": ({}, "host", f"{VARIABLE} says so"),
    "nothing can be page-locked": ({"register": False}, "", "cuMemHostRegister failed with"),
    "streams write no words": ({"stream_words": False}, "", "cuStreamWriteValue32 failed with"),
    "there is no GPU": ({"visible": ""}, "", "the NVIDIA driver shows no GPU"),
}


@pytest.mark.parametrize(("settings", "path", "agent", "why"), PINNED.values(), ids=[*PINNED])
def test_the_gpu_copies_to_the_host_where(
    start: Start,
    settings: fake_cuda.Settings,
    path: str,
    agent: dict[str, bool],
    why: str,
) -> None:
    with start(path, **settings) as process:
        found = process.run(open_gpu, **agent)
        assert process.run(fences, rounds=3) == [True] * 3
        refusal = process.run(empty_without_an_arena)
    assert found["path"] == "pinned"
    assert not found["shares"]
    assert why in found["why"]
    assert found["why"] in refusal
    (line,) = found["logged"]
    assert line == ["WARNING", f"tensors on cuda:0: path pinned, because {found['why']}"]


@pytest.mark.parametrize(("settings", "path", "why"), HOST.values(), ids=[*HOST])
def test_torch_copies_to_the_host_where(
    start: Start, settings: fake_cuda.Settings, path: str, why: str
) -> None:
    with start(path, **settings) as process:
        found = process.run(open_gpu)
    assert found["path"] == "host"
    assert why in found["why"]
    (line,) = found["logged"]
    assert line == ["WARNING", f"tensors on cuda:0: path host, because {found['why']}"]


def test_a_way_that_there_is_not_is_refused(start: Start) -> None:
    with start("fast") as process:
        assert VARIABLE in process.run(open_invalid)


@pytest.mark.parametrize("path", ["ipc", "pinned"])
def test_a_fence_is_passed_after_what_was_copied_before_it(start: Start, path: str) -> None:
    with start(path, delay_us=5000) as process:
        assert process.run(fences, rounds=15) == [True] * 15


def test_fences_are_passed_one_after_the_other(start: Start) -> None:
    with start(delay_us=1000) as process:
        assert process.run(fences_are_passed_in_order, rounds=50)


def test_fences_go_on_behind_the_end_of_32_bits(start: Start) -> None:
    with start() as process:
        values, passed = process.run(wrap_round)
    assert values == [(1 << 32) - 2, (1 << 32) - 1, 1, 2]
    assert passed == [True, True, True, True, False]


def test_arrays_give_their_memory_back(start: Start) -> None:
    with start() as process:
        found = process.run(arrays)
    assert [what for what, holds in found.items() if not holds] == []


def test_memory_of_the_gpu_is_freed_with_the_arena_and_the_last_array(start: Start) -> None:
    with start() as process:
        with_arena, with_array, with_nothing = process.run(close_with_an_array)
    assert with_array == with_nothing - FIRST
    assert with_arena == with_array - FIRST  # where copies go


@pytest.mark.parametrize("stream", ["default", "own"])
def test_memory_is_freed_after_the_work_that_uses_it(start: Start, stream: str) -> None:
    with start(delay_us=3000) as process:
        assert process.run(drop_memory_in_use, stream=stream) == ["CUDA_SUCCESS", 0]


def test_nothing_stays_when_a_gpu_is_opened_and_closed_again_and_again(start: Start) -> None:
    with start() as process:
        first, *others = process.run(many_gpus, rounds=6)
    assert first["arenas"] == first["shared"] == 0
    assert others == [first] * 5


@pytest.mark.parametrize(("kind", "taken"), [("device", 4 * GRANULE), ("pinned", 0)])
def test_memory_that_is_dropped_leaves_nothing(start: Start, kind: str, taken: int) -> None:
    with start() as process:
        took, size, left, is_clean = process.run(share_by_hand, kind=kind)
    assert took == taken
    assert size >= 3 * GRANULE + 1
    assert (left, is_clean) == (0, True)


@pytest.mark.parametrize("device", [0, 1])
def test_the_gpu_of_an_array_is_known_in_any_thread(start: Start, device: int) -> None:
    with start(devices=2) as process:
        assert process.run(ordinal_in_a_thread, device=device) == [device] * 3


def test_a_full_gpu_is_named_and_what_is_freed_can_be_used(start: Start) -> None:
    with start(memory_mb=100) as process:
        found = process.run(exhaust)
    assert "cuda:0 (Fake GPU 0)" in found["message"]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in found["message"]
    assert found["segments"] == 3
    assert found["leak"] == 0


def test_a_segment_that_the_agent_refuses_is_given_back(start: Start) -> None:
    with start() as process:
        assert process.run(refused_later) == ["InvalidArgument", True, True]


def test_memory_of_an_array_is_reused_after_the_last_copy_to_it(start: Start) -> None:
    with start(delay_us=20_000) as process:
        assert process.run(reuse_before_the_last_copy, nbytes=1 << 16) == [True, True]


def test_a_stream_that_records_a_graph_waits_for_no_result(start: Start) -> None:
    with start() as process:
        said = process.run(wait_while_a_graph_is_recorded)
    assert "records a CUDA graph" in said


def test_a_gpu_that_hangs_holds_up_its_end_once_and_its_memory_is_kept(start: Start) -> None:
    operations, patience = 100, 0.05
    with start(hang_device_after=operations) as process:
        found = process.run(close_stuck, operations=operations, patience=patience)
        process.kill()
    assert found["waits"] == [patience, 0.0, 0.0]
    assert found["segments"] == 3
    is_kept = ["ERROR", "memory is kept that a GPU may still use: cuda:0 does not finish its work"]
    assert found["logged"] == [is_kept] * 3


def test_a_gpu_that_hangs_is_noticed(start: Start) -> None:
    with start("pinned", hang_device_after=1) as process:
        assert process.run(stuck) == [False]
        process.kill()


def test_a_gpu_that_has_come_to_grief_says_so_at_every_call(start: Start) -> None:
    with start() as process:
        answers = process.run(spoiled)
    assert all("failed with CUDA_ERROR_ILLEGAL_ADDRESS" in each for each in answers)


if __name__ == "__main__":
    serve(globals())
