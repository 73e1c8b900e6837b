"""A group that loses a member while a GPU has work of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from allfold_agent.gpu.completions import Completions
from allfold_agent.gpu.fence_poller import FencePoller
from allfold_agent.gpu.pins import Pins
from allfold_agent.groups.epoch import NodeResources
from allfold_agent.groups.group import Group
from allfold_agent.runtime.buffers import BufferPool
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.workers import WorkerPool
from allfold_core.errors import PeerLost
from tests.support.fakes.local_groups import make_plan
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
def group() -> Iterator[Group]:
    reactor, workers = Reactor("test"), WorkerPool(1)
    nothing: Any = SimpleNamespace(report_lost=None)
    resources = NodeResources(
        "node0",
        workers=workers,
        buffers=BufferPool(1 << 20, never),
        dial=nothing,
        reactor=reactor,
        pins=Pins(),
        fetch=nothing,
    )
    yield Group(make_plan([[0], [1]]), resources, nothing)
    workers.close()
    reactor.close()


def test_a_loss_waits_for_no_gpu_and_so_for_no_thread_that_waits_for_it(group: Group) -> None:
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
        group.end(done, error)
        told.set()

    def lose() -> None:
        with group.table.lock:
            has_lock.set()
            group.break_(PeerLost("node1 is gone"))

    completions.add(point, finish, SECONDS)
    point.done.set()
    losing = Thread(target=lose, daemon=True)
    losing.start()
    losing.join(SECONDS)
    assert not losing.is_alive(), "the loss waits for a GPU"
    assert told.wait(SECONDS), "nobody is told of the second op"
    poller.close()
