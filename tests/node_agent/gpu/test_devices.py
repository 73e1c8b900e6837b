"""The agent's GPUs, on the driver without one: what they find, open, fold and let go of.

Everything runs in child processes, because a driver is loaded once. Ranks are processes as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Unpack

import pytest

from tests.node_agent.gpu import device_programs
from tests.node_agent.gpu.device_programs import (
    allow_others,
    collect_in_another_context,
    contents,
    descriptors,
    drop_all,
    find,
    fold,
    has_folded,
    known,
    mapped_files,
    open_memory,
    pin_again,
    pin_twice,
    points_end,
    share,
    shared,
    unpinned_first,
)
from tests.support.fakes import fake_cuda
from tests.support.fakes.fake_cuda.processes import Process
from tests.support.require import requires
from tests.support.waiting import wait_until

with suppress(ImportError):  # each test says that it needs them
    from tests.support.fakes.fake_cuda.mappings import GRANULE


MODULE = device_programs.__name__


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
