"""A process group that is reconfigured, with an agent that answers when the test says so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import ErrorType, HashStore

from allfold.torch._creation import create
from allfold.torch._process_group import ProcessGroup
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    MismatchError,
    OrchestratorUnreachable,
    PeerLost,
    PeerMissing,
    RegisterNotFirstOperation,
)
from tests.support.fakes.fake_agent import FakeAgent
from tests.support.waiting import wait_until
from tests.torch_backend.reconfiguring import options

TIMEOUT = timedelta(seconds=30)
LOST = PeerLost("rank 1 is lost")
LATE = PeerMissing("rank 1 has not called it")


@pytest.fixture
def group(agent: FakeAgent) -> Iterator[ProcessGroup]:
    """Rank 0 of a job that was started with 2 ranks; it has no group yet."""
    group = create(HashStore(), 0, 2, TIMEOUT, enable_reconfigure=True)
    yield group
    agent.__exit__()
    group.shutdown()


@pytest.fixture
def opened(agent: FakeAgent, group: ProcessGroup, thread: ThreadPoolExecutor) -> ProcessGroup:
    """The same, and alone in its first group."""
    done = _reconfigure(thread, group, 1)
    agent.greet()
    agent.seat()
    done.result(10)
    return group


def _reconfigure(
    thread: ThreadPoolExecutor, group: ProcessGroup, uuid: int, *others: str
) -> Future[Any]:
    handles = [group.get_reconfigure_handle(), *others]
    return thread.submit(lambda: group.reconfigure(options(uuid, handles)).wait())


def _fail(agent: FakeAgent, error: AllfoldError) -> None:
    agent.conclude(agent.next_op(), error=error)


def test_it_has_no_group_before_it_is_reconfigured(group: ProcessGroup) -> None:
    assert group.supports_reconfigure is True, "an attribute, as torch reads it"
    assert (group.rank(), group.size()) == (group.getRank(), group.getSize()) == (0, 2)
    assert group.get_error() == ErrorType.SUCCESS
    for call in (group.barrier, lambda: group.allreduce([torch.ones(1)]), lambda: group.group):
        with pytest.raises(RegisterNotFirstOperation, match=r"call torch\.distributed\._reconf"):
            call()


def test_the_first_group_has_the_ranks_of_the_handles(
    agent: FakeAgent, group: ProcessGroup, thread: ThreadPoolExecutor
) -> None:
    first = create(HashStore(), 1, 2, TIMEOUT, enable_reconfigure=True)
    handles = [first.get_reconfigure_handle(), group.get_reconfigure_handle()]
    done = thread.submit(group.reconfigure, options(5, handles, timedelta(seconds=7)))
    agent.greet()
    asked = agent.seat()
    assert (asked["rank"], asked["world_size"]) == (1, 2)
    assert asked["group"].startswith("torch-5-")
    assert (asked["timeout"], asked["init_timeout"]) == (30, 7)
    assert (asked["on_loss"], asked["min_world"]) == ("raise", 1)
    work = done.result(10)
    assert work.wait()
    assert work.get_future().done()
    assert (group.rank(), group.size()) == (1, 2)


def test_a_refused_reconfiguration_leaves_the_group_as_it_was(
    agent: FakeAgent, opened: ProcessGroup
) -> None:
    own = opened.get_reconfigure_handle()
    other = create(HashStore(), 1, 2, TIMEOUT, enable_reconfigure=True).get_reconfigure_handle()
    for uuid, handles, refusal in (
        (1, [own], "uuid 1 was already used"),
        (2, [other], "in none of the handles"),
        (2, [own, own], "several handles"),
        (2, [own, "gloo:0:-1:0:"], "no handle of a rank on Allfold"),
    ):
        with pytest.raises(InvalidArgument, match=refusal):
            opened.reconfigure(options(uuid, handles))
    work = opened.barrier()
    agent.finish_op()
    assert work.wait()


def test_what_is_in_flight_fails_at_once_for_whoever_waits_for_it(
    agent: FakeAgent, opened: ProcessGroup, thread: ThreadPoolExecutor
) -> None:
    work = opened.barrier()
    op = agent.next_op()
    with ThreadPoolExecutor(1) as waiting:
        waiter = waiting.submit(work.wait)
        done = _reconfigure(thread, opened, 2)
        agent.conclude(op, error=LOST)
        agent.see_off()
        assert isinstance(waiter.exception(10), PeerLost)
        agent.seat(number=1)
        done.result(10)
    assert opened.get_error() == ErrorType.SUCCESS, "nothing is wrong with the group of now"


def test_the_connection_and_its_memory_stay_from_group_to_group(
    agent: FakeAgent, opened: ProcessGroup, thread: ThreadPoolExecutor
) -> None:
    session = opened.group.membership.session
    done = _reconfigure(thread, opened, 2)
    agent.see_off()
    agent.seat(number=1)
    done.result(10)
    assert opened.group.membership.session is session
    done = thread.submit(opened.shutdown)
    agent.see_off()
    done.result(10)
    assert session.connection.lost is not None, "closed with the process group"


def test_the_next_group_does_not_wait_until_the_seat_of_the_last_one_is_free(
    agent: FakeAgent, opened: ProcessGroup, thread: ThreadPoolExecutor
) -> None:
    done = _reconfigure(thread, opened, 2)
    leave = agent.next_leave()
    agent.seat(number=1)
    done.result(10)
    assert not leave["lost"], "nothing was in flight"
    work = opened.barrier()
    agent.free_seat(leave)
    agent.finish_op()
    assert work.wait()


def test_the_next_group_has_the_timeout_that_was_set_and_registers_with_that_of_all_ranks(
    agent: FakeAgent, opened: ProcessGroup, thread: ThreadPoolExecutor
) -> None:
    opened.set_timeout(timedelta(seconds=3))
    done = _reconfigure(thread, opened, 2)
    agent.see_off()
    assert agent.seat(number=1)["timeout"] == 30
    done.result(10)
    opened.barrier()
    assert agent.next_op().timeout == 3


def test_after_a_failed_attempt_calls_say_so_and_the_next_one_keeps_the_order(
    agent: FakeAgent, opened: ProcessGroup, thread: ThreadPoolExecutor
) -> None:
    before = opened.get_reconfigure_handle().split(":")
    done = _reconfigure(thread, opened, 2)
    agent.see_off()
    agent.refuse_seat(OrchestratorUnreachable("nobody answers"))
    assert isinstance(done.exception(10), OrchestratorUnreachable)
    with pytest.raises(RegisterNotFirstOperation, match="could not be reconfigured"):
        opened.barrier()
    after = opened.get_reconfigure_handle().split(":")
    assert after[:-1] == before[:-1], "still that rank of that group"
    assert after[-1] == "1,2", "and the uuid is used"
    done = _reconfigure(thread, opened, 3)
    agent.seat(number=1)
    done.result(10)
    opened.barrier()
    agent.finish_op()


def test_an_abort_can_be_followed_by_a_reconfiguration(
    agent: FakeAgent, opened: ProcessGroup, thread: ThreadPoolExecutor
) -> None:
    done = thread.submit(opened.abort)
    agent.see_off()
    done.result(10)
    with pytest.raises(RegisterNotFirstOperation, match="was aborted"):
        opened.barrier()
    assert opened.get_error() == ErrorType.SUCCESS
    done = _reconfigure(thread, opened, 2)
    agent.seat(number=1)
    done.result(10)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LATE, ErrorType.TIMEOUT),
        (LOST, ErrorType.REMOTE_ERROR),
        (MismatchError("shapes differ"), ErrorType.SUCCESS),
    ],
    ids=["timeout", "loss", "mismatch"],
)
def test_the_kind_of_an_error_is_known_before_anybody_waits_for_the_op(
    agent: FakeAgent, opened: ProcessGroup, error: AllfoldError, kind: ErrorType
) -> None:
    work = opened.barrier()
    _fail(agent, error)
    wait_until(work.is_completed, "the outcome is here")
    assert opened.get_error() == kind
    with pytest.raises(type(error)):
        work.wait()
    assert opened.get_error() == kind


def test_the_error_of_the_agents_end_is_one_of_the_communicator(
    agent: FakeAgent, opened: ProcessGroup
) -> None:
    work = opened.barrier()
    agent.next_op()
    agent.__exit__()
    wait_until(work.is_completed, "the outcome is here")
    assert opened.get_error() == ErrorType.COMM_ERROR


def test_abort_hooks_are_called_once_at_the_first_error_while_nobody_waits(
    agent: FakeAgent, opened: ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    called, gone = Event(), Event()
    calls: list[str] = []

    def first() -> None:
        calls.append("first")
        raise ValueError("of the hook's own")

    opened.register_abort_hook(0, first)
    opened.register_abort_hook(1, called.set)
    opened.register_abort_hook(2, gone.set)
    opened.unregister_abort_hook(2)
    opened.unregister_abort_hook(3)
    works = [opened.barrier(), opened.barrier()]
    with caplog.at_level(logging.ERROR, "allfold"):
        _fail(agent, LATE)
        _fail(agent, LATE)
        assert called.wait(10)
    for work in works:
        with pytest.raises(PeerMissing):
            work.wait()
    assert calls == ["first"]
    assert not gone.is_set()
    assert "an abort hook of group" in caplog.text


def test_abort_hooks_are_not_called_for_what_the_group_survives_nor_for_ones_own_abort(
    agent: FakeAgent, opened: ProcessGroup, thread: ThreadPoolExecutor
) -> None:
    calls: list[int] = []
    opened.register_abort_hook(0, lambda: calls.append(0))
    work = opened.barrier()
    _fail(agent, MismatchError("shapes differ"))
    with pytest.raises(MismatchError):
        work.wait()
    work = opened.barrier()
    op = agent.next_op()
    done = thread.submit(opened.abort)
    agent.see_off()
    agent.conclude(op, error=LOST)
    done.result(10)
    with pytest.raises(PeerLost):
        work.wait()
    assert calls == []


def test_the_error_of_a_loss_says_that_the_group_can_be_reconfigured(
    agent: FakeAgent, opened: ProcessGroup
) -> None:
    work = opened.barrier()
    _fail(agent, LOST)
    with pytest.raises(PeerLost, match=r"until torch\.distributed\._reconfigure is called"):
        work.wait()
