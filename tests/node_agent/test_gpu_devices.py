"""The agent's GPUs, on the driver without one: what they find, open, fold and let go of.

Everything runs in child processes, because a driver is loaded once. Ranks are processes as well.
"""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, Protocol, Unpack

import numpy as np
import pytest
from tests.support import fake_cuda
from tests.support.fake_cuda.processes import Process, receive, send, serve
from tests.support.require import requires
from tests.support.waiting import wait_until

from allfold_agent.gpu import proof as proof_module
from allfold_agent.gpu.device import Device, Point, RankMemory
from allfold_agent.gpu.gpus import Gpus
from allfold_agent.gpu.kernels import Variant
from allfold_agent.mapped import Mapped
from allfold_agent.watch import Watch
from allfold_core.dtypes import DType
from allfold_core.errors import GpuFailed, InvalidArgument
from allfold_core.operations import ReduceOp

with suppress(ImportError):  # each test says that it needs them
    from cuda.bindings import driver
    from tests.support.fake_cuda.arrays import check
    from tests.support.fake_cuda.mappings import GRANULE, exported, mapping, use_device

MODULE = "tests.node_agent.test_gpu_devices"
SECONDS = 30.0
NUMEL = 1003
NBYTES = 4 * NUMEL
SINGLE = DType.FLOAT32
SUM_OF_TWO = Variant(SINGLE, SINGLE, SINGLE, ReduceOp.SUM, 2)

# ------------------------------------------------------------------------------- what ranks run

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


# --------------------------------------------------------------------------- what the agent runs


def find(wanted: bool) -> dict[str, Any]:
    """What there is, by UUID, and why there is none."""
    gpus = kept["gpus"] = Gpus(wanted, Watch("test"))
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
    """What is mapped of shared memory, before and after all of it is dropped."""
    before, devices = mapped_files(), [memory.device for memory in kept["opened"]]
    kept["opened"].clear()
    for device in devices:
        await_releases(device)
    return [before, mapped_files()]


def await_releases(device: Device) -> None:
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
    """Whether one device reaches another, and what comes of it when it gets access."""
    one, other = (memory.device for memory in kept["opened"])
    reached = [one.reaches(one), one.reaches(other), other.reaches(one)]
    with one.current():
        try:
            opened(1).allow(one)
        except GpuFailed as error:
            return [*reached, error.message]
        return [*reached, float(values(opened(1).address)[0])]


def pinned_memory() -> tuple[Mapped, Any]:
    """Mapped memory and an array of it."""
    memory = Mapped(mmap.mmap(-1, NBYTES))
    return memory, np.frombuffer(memory.memory, np.float32)


def await_point(device: Device, point: Point) -> None:
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
    """Whether the kernel is known, before and after the first launch."""
    device = opened(number).device
    before = device.has(SUM_OF_TWO)
    fold(number)
    return [before, device.has(SUM_OF_TWO)]


def collect_in_another_context() -> list[float]:
    """Launch on one device, while a point of another is dropped in its context."""
    one, other = (memory.device for memory in kept["opened"])
    for _ in range(5):
        with other.current():
            point: Point | None = other.mark()
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
    """What those hear who wait for a device: of the work, and that it hangs."""
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
    """Whether memory has the same address for all devices, always."""
    pins, memory = kept["gpus"].pins, pinned_memory()[0]
    found = [pins.address(memory, opened(each).device) for each in range(devices)] * 2
    return [address == found[0] for address in found]


def pin_again() -> bool:
    """Whether memory at an address can be registered that other memory was registered at."""
    pins, device = kept["gpus"].pins, opened(0).device
    before = Mapped(mmap.mmap(-1, NBYTES))
    address = pins.address(before, device)
    del before
    await_releases(device)
    elsewhere: list[Mapped] = []
    while len(elsewhere) < 100:
        memory = Mapped(mmap.mmap(-1, NBYTES))
        if memory.address == address:
            return bool(pins.address(memory, device) == address)
        elsewhere.append(memory)
    raise AssertionError("the kernel does not use the address again")


def unpinned_first() -> list[str]:
    """What happens to memory that is dropped, in order."""
    events: list[str] = []

    class Seen(mmap.mmap):
        def __del__(self) -> None:
            events.append("unmapped")

    pins, device = kept["gpus"].pins, opened(0).device
    memory = Mapped(Seen(-1, NBYTES))
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


# ------------------------------------------------------------------------------------------- tests


class Start(Protocol):
    def __call__(self, **settings: Unpack[fake_cuda.Settings]) -> Process: ...


@pytest.fixture(autouse=True)
def _components() -> None:
    for each in ("g++", "cuda-bindings", "nvrtc"):
        requires(each)


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[Process] = []

    def _start(**settings: Unpack[fake_cuda.Settings]) -> Process:
        processes.append(Process(MODULE, fake_cuda.environment(**settings)))
        return processes[-1]

    yield _start
    for process in processes:
        with process:
            pass


def uuids(agent: Process) -> list[str]:
    return [*agent.run(find, wanted=True)["named"]]


def opens(agent: Process, rank: Process, value: float, ordinal: int = 0) -> None:
    """Let the agent, which has found its devices, open memory of a rank."""
    proof = rank.run(share, value=value, ordinal=ordinal)
    rank.hand_on(agent)
    uuid = agent.run(known)[ordinal]
    assert agent.run(open_memory, uuid=uuid, proof=proof) is None


def test_devices_are_found_by_their_uuid(start: Start) -> None:
    with start(devices=2) as agent, start(devices=2, visible="1") as other:
        found = agent.run(find, wanted=True)
        assert [*found["named"].values()] == [[0, "Fake GPU 0"], [1, "Fake GPU 1"]]
        assert found["reason"] == ""
        assert found["welcome"]["gpus"] == {
            uuid: name for uuid, (_, name) in found["named"].items()
        }
        second = [*found["named"]][1]
        assert other.run(find, wanted=True)["named"] == {second: [0, "Fake GPU 1"]}


def test_a_gpu_without_kernels_is_left_out(start: Start) -> None:
    with start(devices=2, old_device=0) as agent, start(old_device=0) as other:
        assert [*agent.run(find, wanted=True)["named"].values()] == [[1, "Fake GPU 1"]]
        found = other.run(find, wanted=True)
    assert found["named"] == {}
    assert "newer, not for sm_61" in found["welcome"]["no_gpu"]


def test_who_wants_no_gpu_gets_none(start: Start) -> None:
    with start() as agent:
        found = agent.run(find, wanted=False)
    assert found["named"] == {}
    assert found["welcome"] == {
        "gpus": {},
        "no_gpu": "the agent folds on no GPU: ALLFOLD_AGENT_GPU says so",
    }


def test_without_a_visible_device_the_driver_says_why(start: Start) -> None:
    with start(visible="") as agent:
        found = agent.run(find, wanted=True)
    assert found["named"] == {}
    assert found["reason"] == "the NVIDIA driver shows no GPU"


def test_without_a_driver_there_is_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("this is no library")
    settings = fake_cuda.environment() | {"LD_LIBRARY_PATH": str(tmp_path)}
    with Process(MODULE, settings) as agent:
        found = agent.run(find, wanted=True)
    assert found["named"] == {}
    assert "there is no NVIDIA driver" in found["reason"]


def test_memory_of_a_rank_is_opened_if_it_has_what_the_rank_says(start: Start) -> None:
    with start() as agent, start() as rank:
        (uuid,) = uuids(agent)
        opens(agent, rank, 7)
        assert agent.run(contents, number=0) == 7
        rank.run(share, value=8)
        rank.hand_on(agent)
        refusal = agent.run(open_memory, uuid=uuid, proof="00" * 16)
        assert "stands for other memory" in refusal
        wait_until(lambda: agent.run(mapped_files) == 1, "what was refused is not mapped any more")


def test_what_is_no_memory_of_a_known_gpu_is_refused(start: Start, tmp_path: Path) -> None:
    with start() as agent, start() as rank:
        (uuid,) = uuids(agent)
        before = agent.run(descriptors)
        proof = rank.run(share, value=7)
        rank.hand_on(agent)
        assert "does not fold on" in agent.run(open_memory, uuid="00" * 16, proof=proof)
        rank.run(share, value=7)
        rank.hand_on(agent)
        refusal = agent.run(open_memory, uuid=uuid, proof=proof, size=2 * GRANULE)
        assert "cuMemMap failed" in refusal
        with (tmp_path / "file").open("w+b") as file:
            file.truncate(GRANULE)
            agent.hand(file.fileno())
        refusal = agent.run(open_memory, uuid=uuid, proof=proof)
        assert "cuMemImportFromShareableHandle failed" in refusal
        wait_until(lambda: agent.run(mapped_files) == 0, "nothing is mapped any more")
        assert agent.run(descriptors) == before


def test_memory_of_a_gpu_that_only_the_rank_sees_is_refused(start: Start) -> None:
    with start(devices=2, visible="0") as agent, start(devices=2) as rank:
        (uuid,) = uuids(agent)
        proof = rank.run(share, value=1, ordinal=1)
        rank.hand_on(agent)
        refusal = agent.run(open_memory, uuid=uuid, proof=proof)
        assert "cuMemImportFromShareableHandle failed with CUDA_ERROR_INVALID_DEVICE" in refusal


def test_memory_that_the_agent_cannot_look_at_is_refused_and_not_kept(start: Start) -> None:
    with start(register=False) as agent, start() as rank:
        (uuid,) = uuids(agent)
        proof = rank.run(share, value=1)
        rank.hand_on(agent)
        refusal = agent.run(open_memory, uuid=uuid, proof=proof)
        assert "cuMemHostRegister failed with CUDA_ERROR_NOT_PERMITTED" in refusal
        wait_until(lambda: agent.run(mapped_files) == 0, "nothing is mapped any more")


def test_memory_that_the_gpu_does_not_come_to_is_refused_and_kept(start: Start) -> None:
    with start(hang_device_after=0) as agent, start() as rank:
        (uuid,) = uuids(agent)
        proof = rank.run(share, value=1)
        rank.hand_on(agent)
        refusal = agent.run(open_memory, uuid=uuid, proof=proof, patience=0.05)
        assert "Fake GPU 0 is busy" in refusal
        assert agent.run(mapped_files) == 1, "the GPU may still read it"


def test_a_machine_that_shares_no_memory_is_refused(start: Start) -> None:
    with start(ipc=False) as agent, start() as rank:
        (uuid,) = uuids(agent)
        proof = rank.run(share, value=1)
        rank.hand_on(agent)
        refusal = agent.run(open_memory, uuid=uuid, proof=proof)
        assert "CUDA_ERROR_NOT_SUPPORTED" in refusal


def test_memory_of_a_dead_rank_stays_until_it_is_dropped(start: Start) -> None:
    with start() as agent, start() as rank, start() as other:
        uuids(agent)
        before = agent.run(descriptors)
        opens(agent, rank, 5)
        opens(agent, other, 6)
        rank.kill()
        assert agent.run(contents, number=0) == 5
        assert agent.run(fold, number=0) == [0, 0]
        assert agent.run(drop_all) == [2, 0]
        assert other.run(shared) == 6
        assert agent.run(descriptors) == before


def test_a_gpu_folds_memory_of_a_rank_and_of_the_host(start: Start) -> None:
    with start() as agent, start() as rank:
        uuids(agent)
        opens(agent, rank, 7)
        assert agent.run(has_folded, number=0) == [False, True]
        assert agent.run(fold, number=0, launches=5) == [0, 0]


def test_a_gpu_may_use_memory_of_another_that_it_reaches(start: Start) -> None:
    with start(devices=2) as agent, start(devices=2) as rank, start(devices=2) as other:
        uuids(agent)
        opens(agent, rank, 2)
        opens(agent, other, 3, ordinal=1)
        assert agent.run(allow_others) == [True, True, True, 3.0]


def test_a_gpu_that_does_not_reach_another_may_not_use_its_memory(start: Start) -> None:
    with start(devices=2, peers="none") as agent, start(devices=2) as rank:
        uuids(agent)
        opens(agent, rank, 2)
        opens(agent, rank, 3, ordinal=1)
        *reached, refusal = agent.run(allow_others)
        assert reached == [True, False, False]
        assert "cuMemSetAccess failed" in refusal


def test_a_point_may_be_dropped_while_another_gpu_is_at_work(start: Start) -> None:
    with start(devices=2) as agent, start(devices=2) as rank:
        uuids(agent)
        opens(agent, rank, 2)
        opens(agent, rank, 3, ordinal=1)
        assert agent.run(collect_in_another_context) == [0, 0, 0, 0]


def test_a_hung_gpu_is_noticed(start: Start) -> None:
    with start(hang_device_after=3) as agent, start() as rank:
        uuids(agent)
        opens(agent, rank, 2)  # two operations are to look at the proof
        assert agent.run(points_end) == [None, "TimeoutError"]


def test_memory_of_the_host_is_registered_once_for_all_gpus(start: Start) -> None:
    with start(devices=2) as agent, start(devices=2) as rank:
        uuids(agent)
        opens(agent, rank, 2)
        opens(agent, rank, 3, ordinal=1)
        assert agent.run(pin_twice, devices=2) == [True] * 4


def test_memory_at_an_address_that_was_registered_can_be_registered(start: Start) -> None:
    with start() as agent, start() as rank:
        uuids(agent)
        opens(agent, rank, 2)
        assert agent.run(pin_again)


def test_memory_is_unregistered_before_it_is_unmapped(start: Start) -> None:
    with start() as agent, start() as rank:
        uuids(agent)
        opens(agent, rank, 2)
        assert agent.run(unpinned_first) == ["unregistered", "unmapped"]


if __name__ == "__main__":
    serve(globals())
