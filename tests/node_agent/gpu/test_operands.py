"""The choice of the device that reduces an op, and copies through the host, without any GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Barrier, BrokenBarrierError, Thread
from types import SimpleNamespace
from typing import Any

from allfold_agent.gpu.operands import GpuOperands, GpuRange, HostRange, Nowhere, Place
from allfold_core.dtypes import DType
from allfold_core.errors import GpuFailed
from allfold_core.operations import ReduceOp
from allfold_core.schedules.parts import End, Part, Piece
from allfold_core.schedules.schedule import Slice
from tests.support.fakes.counted_pool import CountedPool


class Device:
    """A GPU that reaches some others, and knows all kernels.

    Attributes:
        completions: of itself: ``waiting`` has who is to be told of the points that it marked.
    """

    is_stuck = False

    def __init__(self, ordinal: int, *reached: int) -> None:
        self.ordinal = ordinal
        self._reached = {ordinal, *reached}
        self.completions = self
        self.waiting: list[Callable[[Exception | None], None]] = []
        self.count = 0

    def reaches(self, other: Device) -> bool:
        return other.ordinal in self._reached

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def has(self, variant: object) -> bool:
        return True

    def wait_for(self, point: object) -> None:
        """The next work waits; this GPU does nothing anyway."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Nothing is copied."""

    def launch(self, *arguments: object) -> None:
        """Nothing is computed."""

    def mark(self) -> Any:
        return SimpleNamespace(device=self)

    def add(self, point: object, then: Callable[[Exception | None], None], seconds: float) -> None:
        self.waiting.append(then)


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
        if mapping is None:
            raise GpuFailed("there is no memory")
        return id(mapping)


def on(device: Device, nbytes: int = 4) -> Place:
    memory: Any = SimpleNamespace(device=device, address=0, allow=lambda user: None)
    return GpuRange(memory, 0, nbytes)


def operands(inputs: dict[int, Place], outputs: dict[int, Place], buffers: Any = None) -> Any:
    layout: Any = SimpleNamespace(place=lambda start: start)
    single = DType.FLOAT32
    sums: Any = SimpleNamespace(
        given=single,
        kept_type=single,
        reduce_op=ReduceOp.SUM,
        factor=1.0,
        divisor=0,
        itemsize=4,
        kept_itemsize=4,
    )
    pool: Any = buffers or Pool()
    pins: Any = Pins()
    return GpuOperands(layout, sums, inputs, outputs, buffers=pool, pins=pins, until=0.0)


HOST: Place = HostRange(None, 0, 0)


def test_an_op_is_folded_where_most_ranks_have_their_memory() -> None:
    first, second = Device(0), Device(1)
    ranks = {0: on(first), 2: on(second), 1: on(second)}
    assert operands(ranks, ranks)._device is second


def test_of_gpus_that_reach_each_other_that_of_the_lowest_rank_folds() -> None:
    first, second = Device(0, 1), Device(1, 0)
    ranks = {2: on(first), 1: on(second), 3: on(first)}
    assert operands(ranks, ranks)._device is second


def test_a_rank_that_only_gets_a_result_counts_as_well() -> None:
    first, second = Device(0), Device(1)
    inputs = {0: on(first), 1: HOST, 2: HOST}
    outputs = {0: HOST, 1: on(second), 2: on(second)}
    assert operands(inputs, outputs)._device is second


def test_results_are_no_inputs_unless_they_share_bytes() -> None:
    memory: Any = SimpleNamespace(device=Device(0), address=0)
    ranges = [GpuRange(memory, start, 8) for start in (0, 4, 8)]
    for other, apart in zip(ranges, (False, False, True), strict=True):
        assert operands({0: ranges[0]}, {0: other}).outputs_are_no_inputs() is apart
    assert operands({0: ranges[0]}, {0: on(Device(0), 8)}).outputs_are_no_inputs()


def test_threads_that_hand_out_at_once_have_one_detour() -> None:
    ranks = {0: on(Device(0))}
    shared, found = operands(ranks, ranks), list[int]()
    threads = [
        Thread(target=lambda: found.append(shared._detour(0, ranks[0], True))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 2
    assert len(set(found)) == 1


def pieces(count: int) -> list[Piece]:
    """Parts of one element, which each go from rank 0 to rank 0."""
    ends = (End(0, 0),)
    return [(Part(Slice(each, each + 1), ends, ends), each, each + 1) for each in range(count)]


def test_an_op_of_many_pieces_is_not_quick() -> None:
    ranks = {0: on(Device(0))}
    one = operands(ranks, ranks)
    assert one.is_quick(pieces(4))
    assert not one.is_quick(pieces(100)), "a launch may have to wait for room"


def test_what_cannot_be_given_is_told_when_all_gpus_are_done_with_what_they_were_given() -> None:
    first, second = Device(0), Device(1)
    ranks = {0: on(first), 1: on(second)}
    told: list[Exception | None] = []
    buffer: Any = SimpleNamespace(mapping=None)
    operands(ranks, ranks).hand_out(pieces(1), buffer, told.append)
    for device in (first, second):
        assert not told, "a GPU may still write to the memory of a rank"
        (then,) = device.waiting
        then(None)
    (error,) = told
    assert isinstance(error, GpuFailed)
    assert error.message == "there is no memory"


def hand_out_of_a_copy(pool: CountedPool) -> tuple[Any, Device, list[Exception | None]]:
    """A GPU is handing out a result by way of the host to one that it does not reach."""
    folding, other = Device(0), Device(1)
    ranks = {0: on(folding), 1: on(other), 2: on(folding)}
    ends = (End(0, 0), End(1, 0))
    op, told = operands(ranks, ranks, pool), list[Exception | None]()
    buffer: Any = SimpleNamespace(mapping=object())
    op.hand_out([(Part(Slice(0, 1), ends, ends), 0, 1)], buffer, told.append)
    folding.waiting.pop()(None)
    assert pool.held == 1
    return op, other, told


def test_memory_that_a_gpu_copies_from_is_given_back_when_it_has_done_so() -> None:
    """The op may have been given up before."""
    pool = CountedPool()
    op, copying, told = hand_out_of_a_copy(pool)
    op.release()
    assert pool.held == 1, "the GPU is still at work there"
    copying.waiting.pop()(None)
    assert pool.held == 0
    assert told == [None]


def test_memory_that_a_stuck_gpu_may_use_is_never_given_back() -> None:
    pool = CountedPool()
    op, copying, told = hand_out_of_a_copy(pool)
    op.release()
    copying.waiting.pop()(GpuFailed("it is stuck"))
    assert pool.held == 1
    assert isinstance(told[0], GpuFailed)


def test_a_gpu_is_given_no_work_of_an_op_that_was_given_up() -> None:
    pool, gpu = CountedPool(), Device(0)
    op, told = operands({0: on(gpu)}, {0: on(gpu)}, pool), list[Exception | None]()
    op.release()
    op.fold_locally(pieces(1), told.append)
    assert told == [None]
    assert gpu.waiting == []


def test_what_a_dead_rank_would_get_is_written_to_memory_of_nobody() -> None:
    """The one beside it gets the result."""
    pool, gpu = CountedPool(), Device(0)
    ranks: dict[int, Place] = {0: on(gpu), 1: Nowhere(4)}
    op, told = operands(ranks, ranks, pool), list[Exception | None]()
    ends = (End(0, 0), End(1, 0))
    buffer: Any = SimpleNamespace(mapping=object())
    op.hand_out([(Part(Slice(0, 1), ends, ends), 0, 1)], buffer, told.append)
    gpu.waiting.pop()(None)
    assert told == [None]
    op.release()
    assert pool.held == 0
