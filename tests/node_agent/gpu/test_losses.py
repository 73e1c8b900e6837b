"""A group that loses a member while a GPU has work of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from allfold_agent.execution.op import Arrival, Op
from allfold_agent.gpu.completions import Completions, FencePoller
from allfold_agent.gpu.gpus import Pins
from allfold_agent.gpu.operands import GpuRange, Nowhere
from allfold_agent.groups.epoch import NodeResources
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.neighbours import Neighbours
from allfold_agent.groups.results import ResultShares
from allfold_agent.runtime.buffers import BufferPool
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.threads import WorkerPool
from allfold_agent.traffic.pacer import Pacer
from allfold_core.dtypes import DType
from allfold_core.errors import Evicted
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.protocol.rank_messages import OpMessage, Region
from tests.support.fakes.local_groups import make_plan
from tests.support.fakes.local_rank import session_of
from tests.support.waiting import never

SECONDS = 10.0


class Point:
    """Work of a GPU that is done when a test says so."""

    def __init__(self) -> None:
        self.done = Event()

    def is_reached(self) -> bool:
        return self.done.is_set()


class OnItsWay:
    """An executor whose results a GPU is handing out."""

    def __init__(self) -> None:
        self.graph = SimpleNamespace(sends={})
        self.then: list[Callable[[], None]] = []

    def fail(self, then: Callable[[], None]) -> None:
        self.then.append(then)

    def release(self) -> None:
        """Nothing is held."""


@pytest.fixture
def group() -> Iterator[NodeGroup]:
    """Of a node with two ranks, and another node."""
    reactor, workers = Reactor("test"), WorkerPool(1)
    nothing: Any = create_autospec(Neighbours, instance=True)
    resources = NodeResources(
        "node0",
        workers=workers,
        buffers=BufferPool(1 << 20, never),
        dial=nothing,
        reactor=reactor,
        edge_reactor=reactor,
        pins=Pins(),
        fetch=nothing,
        retention=ResultShares(),
        pacer=Pacer("node0", "", 0, never),
    )
    yield NodeGroup(make_plan([[0, 1], [2]]), resources, nothing)
    workers.close()
    reactor.close()


def test_a_loss_waits_for_no_gpu_and_so_for_no_thread_that_waits_for_it(group: NodeGroup) -> None:
    poller = FencePoller("test")
    completions, point = Completions(poller), Point()
    lost, done = (group.current.new_op(seq) for seq in (1, 2))
    done.ended = True  # its last results are on their way
    lost.executor = OnItsWay()  # type: ignore[assignment]
    group.table.in_flight |= {1: lost, 2: done}
    has_lock, told = Event(), Event()

    def finish(error: Exception | None) -> None:
        """The GPU is done with the second op; its ranks are told, which takes the group's lock."""
        has_lock.wait(SECONDS)
        group.runs.end(done, error)
        told.set()

    def lose() -> None:
        with group.table.lock:
            has_lock.set()
            group.evict(Evicted("the group goes on without node0"))

    completions.add(point, finish, SECONDS)
    point.done.set()
    losing = Thread(target=lose, daemon=True)
    losing.start()
    losing.join(SECONDS)
    assert not losing.is_alive(), "the loss waits for a GPU"
    assert told.wait(SECONDS), "nobody is told of the second op"
    poller.close()


def op_on_gpu(group: NodeGroup) -> Op:
    """An all-reduce that a rank on a GPU has called, and the rank beside it has not."""
    device: Any = SimpleNamespace(ordinal=0, reaches=lambda other: True)
    memory: Any = SimpleNamespace(device=device, address=0)
    print_ = Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.FLOAT32, (8,), -1, "direct")
    place, data = Region(0, 0), GpuRange(memory, 0, 32)
    message = OpMessage(0, 0, SECONDS, place, place, print_.pack())
    rank: Any = None
    spec = group.current.spec_of(message)
    op = group.current.new_op(0)
    arrival = Arrival(0, rank, 0, message, spec, data, data, 0.0, 0.0)
    op.add(session_of(0), arrival, arrival)
    return op


def test_a_result_that_is_fetched_for_a_rank_on_a_gpu_needs_no_memory_of_the_dead_one_beside_it(
    group: NodeGroup,
) -> None:
    op = op_on_gpu(group)
    assert group.current.runner.prepare_result(op) == 32
    assert op.gpu_operands is not None
    assert op.gpu_operands._outputs == {0: op.arrivals[0].target, 1: Nowhere(32)}


def test_an_attempt_on_a_gpu_that_is_given_up_lets_go_of_its_memory(group: NodeGroup) -> None:
    op = op_on_gpu(group)
    group.current.runner.prepare_result(op)
    operands, ended = op.gpu_operands, Event()
    assert operands is not None
    group.current.runner.cancel(op, ended.set, forward=False)
    assert ended.is_set()
    assert operands._released
