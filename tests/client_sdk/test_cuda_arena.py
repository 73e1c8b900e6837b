"""Arenas for tensors on a GPU: the way they are on, their fences, and that nothing of them stays.

Everything runs in child processes on the driver without a GPU, with an agent that only listens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol, Unpack

import pytest

from allfold._arena import GRANULE
from allfold._process.settings import VARIABLE
from tests.client_sdk import cuda_arena_programs
from tests.client_sdk.cuda_arena_gpu import FIRST, NO_GPU, open_gpu
from tests.client_sdk.cuda_arena_programs import (
    arrays,
    close_stuck,
    close_with_an_array,
    drop_memory_in_use,
    empty_without_an_arena,
    exhaust,
    fences,
    fences_are_passed_in_order,
    many_gpus,
    open_invalid,
    ordinal_in_a_thread,
    refused_later,
    reuse_before_the_last_copy,
    share_by_hand,
    spoiled,
    stuck,
    wait_while_a_graph_is_recorded,
    wrap_round,
)
from tests.support.fakes import fake_cuda
from tests.support.fakes.fake_cuda.processes import Process
from tests.support.require import requires

with suppress(ImportError):  # each test says that it needs them
    pass


MODULE = cuda_arena_programs.__name__


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


def test_a_gpu_that_has_failed_says_so_at_every_call(start: Start) -> None:
    with start() as process:
        answers = process.run(spoiled)
    assert all("failed with CUDA_ERROR_ILLEGAL_ADDRESS" in each for each in answers)
