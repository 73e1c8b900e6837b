"""Where an op is folded, and the memory that is copied through the host, without any GPU."""

from __future__ import annotations

from contextlib import suppress
from threading import Barrier, BrokenBarrierError, Thread
from types import SimpleNamespace
from typing import Any

from allfold_agent.gpu.job import GpuJob, GpuRange, HostRange, Place


class Device:
    """A GPU that reaches some others."""

    def __init__(self, ordinal: int, *reached: int) -> None:
        self.ordinal = ordinal
        self._reached = {ordinal, *reached}

    def reaches(self, other: Device) -> bool:
        return other.ordinal in self._reached


class Pool:
    """Gives memory to all who ask for it at the same time."""

    def __init__(self) -> None:
        self._meet = Barrier(2)

    def take(self, nbytes: int) -> Any:
        with suppress(BrokenBarrierError):
            self._meet.wait(0.3)
        return SimpleNamespace(mapping=object())


class Pins:
    def address(self, mapping: object, gpu: Device) -> int:
        return id(mapping)


def on(device: Device, nbytes: int = 4) -> Place:
    memory: Any = SimpleNamespace(device=device, address=0)
    return GpuRange(memory, 0, nbytes)


def job(inputs: dict[int, Place], outputs: dict[int, Place]) -> Any:
    nothing: Any = None
    buffers: Any = Pool()
    pins: Any = Pins()
    return GpuJob(nothing, nothing, inputs, outputs, buffers=buffers, pins=pins, until=0.0)


HOST: Place = HostRange(None, 0, 0)


def test_an_op_is_folded_where_most_ranks_have_their_memory() -> None:
    first, second = Device(0), Device(1)
    ranks = {0: on(first), 2: on(second), 1: on(second)}
    assert job(ranks, ranks)._device is second


def test_of_gpus_that_reach_each_other_that_of_the_lowest_rank_folds() -> None:
    first, second = Device(0, 1), Device(1, 0)
    ranks = {2: on(first), 1: on(second), 3: on(first)}
    assert job(ranks, ranks)._device is second


def test_a_rank_that_only_gets_a_result_counts_as_well() -> None:
    first, second = Device(0), Device(1)
    inputs = {0: on(first), 1: HOST, 2: HOST}
    outputs = {0: HOST, 1: on(second), 2: on(second)}
    assert job(inputs, outputs)._device is second


def test_results_are_no_inputs_unless_they_share_bytes() -> None:
    memory: Any = SimpleNamespace(device=Device(0), address=0)
    ranges = [GpuRange(memory, start, 8) for start in (0, 4, 8)]
    for other, apart in zip(ranges, (False, False, True), strict=True):
        assert job({0: ranges[0]}, {0: other}).outputs_are_no_inputs() is apart
    assert job({0: ranges[0]}, {0: on(Device(0), 8)}).outputs_are_no_inputs()


def test_threads_that_hand_out_at_once_have_one_detour() -> None:
    ranks = {0: on(Device(0))}
    shared, found = job(ranks, ranks), list[int]()
    threads = [
        Thread(target=lambda: found.append(shared._detour(0, ranks[0], True))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 2
    assert len(set(found)) == 1
