"""The driver without a GPU finds the mistakes that it is there for.

Everything runs in child processes: a driver is loaded once, and some of its errors stay.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Unpack

import pytest

from tests.node_agent.gpu import driver_programs as programs
from tests.node_agent.gpu import sharing_programs as sharing
from tests.support.fakes import fake_cuda
from tests.support.fakes.fake_cuda.processes import Process
from tests.support.require import requires

with suppress(ImportError):  # each test says that it needs them
    from tests.support.fakes.fake_cuda.mappings import GRANULE, give_access

KERNEL_SOURCE = """
template <int INPUTS>
struct Arguments {
    unsigned long long numel;
    float* output;
    const float* inputs[INPUTS];
};

extern "C" __global__ void ALLFOLD_NAME(const Arguments<ALLFOLD_INPUTS> arguments) {
    const unsigned first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (unsigned i = first; i < arguments.numel; i += step)
        arguments.output[i] = arguments.inputs[0][i] + arguments.inputs[1][i];
}
"""


class Start(Protocol):
    def __call__(self, **settings: Unpack[fake_cuda.Settings]) -> Process: ...


@pytest.fixture(autouse=True)
def _components() -> None:
    requires("g++")
    requires("cuda-bindings")


@pytest.fixture
def shared_file() -> Iterator[int]:
    """One page of memory that all processes see."""
    file = os.memfd_create("flags")
    os.truncate(file, mmap.PAGESIZE)
    yield file
    os.close(file)


@pytest.fixture
def start(shared_file: int, tmp_path: Path) -> Start:
    """Start a process with a kernel of our own."""
    (tmp_path / "sum.cu").write_text(KERNEL_SOURCE)

    def _start(**settings: Unpack[fake_cuda.Settings]) -> Process:
        values = fake_cuda.environment(**settings)
        header = values["FAKE_CUDA_SOURCES"].split(":")[1]
        values["FAKE_CUDA_SOURCES"] = f"{tmp_path / 'sum.cu'}:{header}"
        return Process(programs.__name__, values, (shared_file,))

    return _start


def test_the_bindings_load_it_and_name_what_it_does_not_have(start: Start) -> None:
    with start() as process:
        result, version, missing = process.run(programs.versions)
    assert (result, version) == ("CUDA_SUCCESS", 12090)
    assert "cuCtxGetCacheConfig" in missing


def test_all_processes_agree_on_the_names_of_devices(start: Start) -> None:
    with start(devices=3) as one, start(devices=3, visible="2,0,9,1") as other:
        names = one.run(programs.devices)
        assert len(set(names)) == 3
        assert other.run(programs.devices) == [names[2], names[0]]


def test_a_missing_wait_shows_as_old_data(start: Start) -> None:
    with start(delay_us=2000) as process:
        assert process.run(programs.stale_copies, waits=True) == 0
        assert process.run(programs.stale_copies, waits=False) > 0


def test_the_default_stream_waits_for_blocking_streams_alone(start: Start) -> None:
    with start(delay_us=2000) as process:
        assert process.run(programs.stale_copies_of_the_default_stream, blocking=True) == 0
        assert process.run(programs.stale_copies_of_the_default_stream, blocking=False) > 0


def test_a_wait_is_for_what_was_recorded_before_it(start: Start) -> None:
    with start() as process:
        assert process.run(programs.late_event)


def test_the_host_cannot_touch_device_memory(start: Start) -> None:
    with start() as process:
        with pytest.raises(EOFError):
            process.run(programs.touch)
        assert process.end() == -signal.SIGSEGV


def test_a_kernel_that_writes_behind_the_end_crashes(start: Start) -> None:
    with start() as process:
        with pytest.raises(EOFError):
            process.run(programs.behind_the_end)
        assert process.end() == -signal.SIGSEGV


def test_wrong_calls_are_refused_by_the_right_name(start: Start) -> None:
    with start() as process:
        assert process.run(programs.misuse) == {
            "behind the end": "INVALID_VALUE",
            "freed": "INVALID_VALUE",
            "freed twice": "INVALID_VALUE",
            "not the start": "INVALID_VALUE",
            "half registered": "INVALID_VALUE",
            "a host's address": "INVALID_VALUE",
            "too much": "OUT_OF_MEMORY",
            "nothing": "INVALID_VALUE",
            "destroyed stream": "INVALID_HANDLE",
            "event as a stream": "INVALID_HANDLE",
            "made up": "INVALID_HANDLE",
            "registered twice": "HOST_MEMORY_ALREADY_REGISTERED",
            "not registered": "HOST_MEMORY_NOT_REGISTERED",
            "not mapped": "INVALID_VALUE",
            "flag not registered": "INVALID_VALUE",
            "flag at an odd place": "INVALID_VALUE",
            "part of a granule": "INVALID_VALUE",
            "more than there is": "OUT_OF_MEMORY",
            "reserved in part": "INVALID_VALUE",
            "mapped twice": "INVALID_VALUE",
            "mapped nowhere": "INVALID_VALUE",
            "released": "INVALID_VALUE",
            "released twice": "INVALID_VALUE",
            "still mapped": "INVALID_VALUE",
            "unmapped in part": "INVALID_VALUE",
            "freed as if allocated": "INVALID_VALUE",
            "unmapped as if mapped": "INVALID_VALUE",
            "unknown kernel": "NOT_FOUND",
            "elsewhere": "INVALID_CONTEXT",
            "destroyed context": "CONTEXT_IS_DESTROYED",
            "set again": "INVALID_CONTEXT",
        }


def test_copies_of_pageable_memory_are_done_on_return(start: Start) -> None:
    with start(delay_us=5000) as process:
        assert process.run(programs.pageable_copies)


def test_tensors_keep_what_they_are_given(start: Start) -> None:
    with start() as process:
        assert process.run(programs.tensors)


def test_memory_is_shared_by_its_descriptor(start: Start) -> None:
    with start() as owner, start() as user:
        owner.run(sharing.export, value=7, times=2)
        owner.hand_on(user)
        owner.hand_on(user)
        one, other = user.run(sharing.open_memory), user.run(sharing.open_memory)
        assert one != other
        assert user.run(sharing.read, address=one) == [7]
        assert user.run(sharing.place, address=one) == [2, 0]
        assert user.run(sharing.fill, address=other, value=8) == "SUCCESS"
        assert user.run(sharing.read, address=one) == [8]
        assert owner.run(sharing.read_exported) == [8]
        assert user.run(sharing.unmap, address=one) == ["SUCCESS", "SUCCESS"]
        assert user.run(sharing.read, address=one) == "INVALID_VALUE"
        assert user.run(sharing.read, address=other) == [8]


def test_shared_memory_stays_when_its_owner_lets_go_of_it(start: Start) -> None:
    with start() as owner, start() as user, start() as late:
        owner.run(sharing.export, value=5, times=2)
        owner.hand_on(user)
        address = user.run(sharing.open_memory)
        assert owner.run(sharing.unmap) == ["SUCCESS", "SUCCESS"]
        assert user.run(sharing.read, address=address) == [5]
        owner.hand_on(late)
        assert late.run(sharing.read, address=late.run(sharing.open_memory)) == [5]


def test_shared_memory_outlives_its_owner(start: Start) -> None:
    with start() as owner, start() as user, start() as late:
        owner.run(sharing.export, value=9, times=2)
        owner.hand_on(user)
        address = user.run(sharing.open_memory)
        owner.kill()
        assert user.run(sharing.read, address=address) == [9]
        owner.hand_on(late)
        assert late.run(sharing.read, address=late.run(sharing.open_memory)) == [9]


def test_memory_is_not_exported_unless_it_was_made_for_that(start: Start) -> None:
    with start() as owner:
        assert owner.run(sharing.export_unshareable) == "INVALID_VALUE"


def test_no_more_is_mapped_than_there_is(start: Start) -> None:
    with start() as owner, start() as user:
        owner.run(sharing.export, value=1, times=2)
        owner.hand_on(user)
        owner.hand_on(user)
        assert user.run(sharing.open_memory, granules=2) == "INVALID_VALUE"
        assert isinstance(user.run(sharing.open_memory), int)


def test_any_other_file_is_no_memory(start: Start, shared_file: int) -> None:
    with start() as user:
        user.hand(shared_file)
        assert user.run(sharing.open_memory) == "INVALID_VALUE"


def test_mapped_memory_cannot_be_used_without_access(start: Start) -> None:
    with start() as owner, start() as user:
        owner.run(sharing.export, value=1)
        owner.hand_on(user)
        address = user.run(sharing.open_memory, user=-1)
        assert user.run(sharing.read, address=address) == "INVALID_VALUE"
        assert user.run(sharing.fill, address=address, value=2) == "INVALID_VALUE"
        assert user.run(give_access, address=address, ordinal=0) == "SUCCESS"
        assert user.run(sharing.read, address=address) == [1]


def test_memory_of_another_device_needs_peer_access(start: Start) -> None:
    with (
        start(devices=2) as owner,
        start(devices=2) as user,
        start(devices=2, peers="none") as lone,
    ):
        owner.run(sharing.export, value=3, ordinal=1, times=3)
        for process in (user, lone, lone):
            owner.hand_on(process)
        address = user.run(sharing.open_memory, ordinal=0)
        assert user.run(sharing.place, address=address) == [2, 1]
        assert user.run(sharing.read, address=address) == [3]
        assert lone.run(sharing.open_memory, ordinal=0) == "PEER_ACCESS_UNSUPPORTED"
        assert lone.run(sharing.read, address=lone.run(sharing.open_memory, ordinal=1)) == [3]


def test_what_a_machine_does_not_allow_is_refused(start: Start) -> None:
    forbidden: fake_cuda.Settings = {"ipc": False, "register": False, "memory_mb": 16}
    with start() as owner, start(**forbidden) as process:
        owner.run(sharing.export, value=1)
        owner.hand_on(process)
        assert process.run(sharing.open_memory) == "NOT_SUPPORTED"
        assert process.run(programs.refused, call="register") == "NOT_PERMITTED"
        assert process.run(programs.refused, call="allocate") == "OUT_OF_MEMORY"
    with start(stream_words=False) as process:
        assert process.run(programs.refused, call="word") == "NOT_SUPPORTED"


def test_shared_memory_is_counted_as_long_as_it_is_mapped(start: Start) -> None:
    with start() as process:
        assert process.run(sharing.granules) == [GRANULE, 2 * GRANULE, 0]


def test_a_device_has_a_context_while_somebody_retains_it(start: Start) -> None:
    with start() as process:
        assert process.run(programs.contexts_in_use) == [0, 1, 0]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("work", ["copy", "fill", "kernel"])
def test_to_unmap_memory_in_use_spoils_the_process(start: Start, work: str, waits: bool) -> None:
    with start(delay_us=0) as process:
        answers = process.run(programs.unmapped_too_early, work=work, waits=waits)
        assert answers == ["SUCCESS", "ILLEGAL_ADDRESS", "ILLEGAL_ADDRESS"]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_flag_comes_after_the_data_of_its_own_stream_alone(
    start: Start, shared_file: int, ordered: bool
) -> None:
    with start(delay_us=10_000) as owner, start() as user:
        owner.run(sharing.produce, file=shared_file, ordered=ordered)
        owner.hand_on(user)
        wrong = user.run(sharing.consume, file=shared_file, ordered=ordered)
        assert wrong == (0 if ordered else sharing.ROUNDS)


@pytest.mark.parametrize("own_device", [0, 1])
def test_a_kernel_folds_memory_of_processes_and_of_the_host(start: Start, own_device: int) -> None:
    with start(devices=2) as owner, start(devices=2) as user:
        owner.run(sharing.export, value=1)
        owner.hand_on(user)
        assert user.run(programs.kernel_sum, own_device=own_device) == [0.0]


@pytest.mark.parametrize("compiles", [False, True])
def test_the_kernel_of_the_agent_runs_on_it(compiles: bool) -> None:
    if compiles:
        requires("nvrtc")
    with Process(programs.__name__, fake_cuda.environment()) as process:
        assert process.run(programs.real_fold, compiles=compiles) == [0.0, 0.0]


MISTAKES = [
    *("freed", "made up", "pageable", "unregistered"),
    *("other device", "mapped for another device", "mapped for none"),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_bad_address_in_a_kernel_spoils_the_process(start: Start, mistake: str) -> None:
    with start(devices=2) as process:
        assert process.run(programs.kernel_errors, mistake=mistake) == ["ILLEGAL_ADDRESS"]


def test_a_hung_device_does_nothing_more_and_the_process_can_end(start: Start) -> None:
    with start(hang_device_after=1) as process:
        assert process.run(programs.hung) == ["SUCCESS", "NOT_READY"]
        assert process.end() == 0
