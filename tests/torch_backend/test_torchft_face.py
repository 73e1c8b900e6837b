"""The process group for torchft, with one that stands in; `make test-clients` has the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from allfold_core.errors import PeerLost, PeerMissing
from tests.support.fakes.fake_agent import FakeAgent
from tests.support.waiting import wait_until
from tests.torch_backend.reconfiguring import options

FACE = "allfold.torchft"
TIMEOUT = timedelta(seconds=30)
OPENING = timedelta(seconds=3)


class Wrapper(dist.ProcessGroup):
    """The part of torchft's wrapper of process groups that ours uses."""

    _pg: Any

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._timeout = timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _handle_id(self) -> str:
        return "own"

    def barrier(self, opts: Any = None) -> Any:
        return self._wrap_work(self._pg.barrier(opts), opts)  # type: ignore[attr-defined]


def rendezvous(opts: Any, own: str) -> SimpleNamespace:
    """The store and ranks of a quorum, as torchft reads them from the handles."""
    return SimpleNamespace(
        store_addr=f"host:1/{opts.uuid}",
        rank=opts.handles.index(own),
        world_size=len(opts.handles),
    )


@pytest.fixture
def group(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The process group of a replica, which is in no quorum yet."""
    store = HashStore()

    def client(address: str, timeout: timedelta) -> PrefixStore:
        assert timeout == OPENING
        return PrefixStore(address, store)

    module, ddp, groups = (ModuleType(f"torchft{each}") for each in ("", ".ddp", ".process_group"))
    vars(groups).update(
        ProcessGroupWrapper=Wrapper, create_store_client=client, _rendezvous=rendezvous
    )
    vars(ddp).update(DistributedDataParallel=object)
    vars(module).update(ddp=ddp, process_group=groups)
    for each in (module, ddp, groups):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.delitem(sys.modules, FACE, raising=False)
    made = import_module(FACE).ProcessGroupAllfold(TIMEOUT, OPENING)
    monkeypatch.delitem(sys.modules, FACE)
    yield made
    agent.__exit__()
    made.shutdown()


Enter = Callable[..., tuple[dict[str, Any], Any]]


@pytest.fixture
def enter(agent: FakeAgent, group: Any, thread: ThreadPoolExecutor) -> Enter:
    """Enter a quorum alone; return what the agent was asked for, and what the call returns."""

    def enter(call: Callable[..., Any], *arguments: Any, number: int = 0) -> Any:
        done: Future[Any] = thread.submit(call, *arguments)
        if not number:
            agent.greet()
        asked = agent.seat(number=number)
        return asked, done.result(10)

    return enter


def test_a_quorum_has_a_group_of_its_own_which_opens_soon_or_not_at_all(
    group: Any, enter: Enter
) -> None:
    first, _ = enter(group.configure, "host:1/quorum/1", "replica", 0, 1)
    assert (first["rank"], first["world_size"]) == (0, 1)
    assert (first["timeout"], first["init_timeout"]) == (30, 3)
    assert (first["on_loss"], first["min_world"]) == ("raise", 1)
    second, _ = enter(group.configure, "host:1/quorum/2", "replica", 0, 1, number=1)
    assert first["group"].startswith("torchft-")
    assert second["group"].startswith("torchft-")
    assert second["group"] != first["group"]


def test_newer_releases_name_the_replicas_by_their_handles(
    agent: FakeAgent, group: Any, enter: Enter
) -> None:
    asked, work = enter(group.reconfigure, options(7, ["own"]))
    assert (asked["rank"], asked["world_size"]) == (0, 1)
    assert work.wait()
    op = group.barrier()
    agent.finish_op()
    assert op.wait()


def test_the_first_error_of_an_op_is_that_of_the_quorum(
    agent: FakeAgent, group: Any, enter: Enter
) -> None:
    assert group.errored() is None
    enter(group.configure, "host:1/quorum/1", "replica", 0, 1)
    assert group.errored() is None
    for error in (PeerLost("rank 1 is lost"), PeerMissing("rank 2 has not called it")):
        work = group.barrier()
        agent.conclude(agent.next_op(), error=error)
        wait_until(work.is_completed, "the outcome is here")
        with pytest.raises(type(error)):
            work.wait()
    found = group.errored()
    assert isinstance(found, PeerLost)
    assert "torchft does this step again" in str(found)
    enter(group.configure, "host:1/quorum/2", "replica", 0, 1, number=1)
    assert group.errored() is None, "nothing is wrong with the quorum of now"
