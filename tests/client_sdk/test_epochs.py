"""A rank's number and its world change where the program waits for an outcome, and nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allfold
from allfold_core.errors import AgentLost, InvalidArgument, PeerLost, PeerMissing
from allfold_core.protocol.rank_messages import MAX_MESSAGE, P2PMessage
from tests.support.fakes.fake_agent import FakeAgent
from tests.support.waiting import wait_until

LOST = PeerLost("rank 1 is lost")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path) as agent:
        yield agent
        agent.__exit__()
        allfold.shutdown()


@pytest.fixture
def group(agent: FakeAgent) -> allfold.Group:
    """This process is rank 2 of 4."""
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(
            allfold.init, rank=2, world_size=4, group="g", agent=agent.path, init_timeout=10.0
        )
        agent.greet()
        agent.seat()
        return opening.result(10)


def seen(group: allfold.Group) -> tuple[int, int, int]:
    return group.epoch, group.rank, group.world_size


def test_a_group_is_in_its_first_epoch_until_an_outcome_carries_another(
    agent: FakeAgent, group: allfold.Group
) -> None:
    assert seen(group) == (0, 2, 4)
    work = group.barrier(async_op=True)
    assert (work.epoch, work.participants) == (None, None)
    op = agent.next_op()
    assert op.view == 0
    agent.announce(1, rank=1, world_size=3)
    agent.conclude(op, epoch=1, participants=3)
    wait_until(work.is_completed, "there is an outcome")
    assert (work.epoch, work.participants) == (1, 3)
    assert seen(group) == (0, 2, 4), "the program has not waited for it"
    work.wait()
    assert seen(group) == (1, 1, 3)


def test_an_error_that_carries_a_newer_epoch_changes_the_ranks_as_it_is_raised(
    agent: FakeAgent, group: allfold.Group
) -> None:
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(group.all_reduce, np.ones(1))
        op = agent.next_op()
        agent.announce(1, rank=1, world_size=3)
        agent.conclude(op, epoch=1, error=LOST)
        with pytest.raises(PeerLost, match="rank 1 is lost"):
            failing.result(10)
    assert seen(group) == (1, 1, 3)
    work = group.barrier(async_op=True)
    assert agent.next_op().view == 1
    assert work.participants is None


def test_epochs_are_entered_in_the_order_in_which_the_program_waits(
    agent: FakeAgent, group: allfold.Group
) -> None:
    """Not in that of the outcomes; and never backwards."""
    works = [group.barrier(async_op=True) for _ in range(4)]
    ops = [agent.next_op() for _ in works]
    agent.announce(1, rank=1, world_size=3)
    agent.announce(2, rank=0, world_size=2)
    for op, epoch in zip(reversed(ops), (0, 2, 1, 0), strict=True):
        agent.conclude(op, epoch=epoch)
    worlds = []
    for work in works:
        work.wait()
        worlds.append(seen(group))
    assert worlds == [(0, 2, 4), (1, 1, 3), (2, 0, 2), (2, 0, 2)]


def test_ops_that_are_settled_to_make_room_change_nothing_before_they_are_waited_for(
    agent: FakeAgent, group: allfold.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold._channel.MAX_OPEN_OPS", 1)
    first = group.barrier(async_op=True)
    agent.announce(1, rank=1, world_size=3)
    agent.conclude(agent.next_op(), epoch=1)
    group.barrier(async_op=True)
    assert agent.next_op().view == 0
    assert seen(group) == (0, 2, 4)
    first.wait()
    assert seen(group) == (1, 1, 3)


def test_roots_and_peers_are_numbers_of_the_epoch_that_the_rank_is_in(
    agent: FakeAgent, group: allfold.Group
) -> None:
    work = group.barrier(async_op=True)
    agent.announce(1, rank=1, world_size=3)
    agent.conclude(agent.next_op(), epoch=1)
    group.broadcast(np.ones(1), root=3, async_op=True)
    assert agent.next_op().view == 0
    work.wait()
    with pytest.raises(InvalidArgument, match="root 3 is not a rank of group 'g'"):
        group.broadcast(np.ones(1), root=3)
    assert agent.abandoned()["call"] == "broadcast"
    group.send(np.ones(1), 2, async_op=True)
    assert agent.connected is not None
    message = P2PMessage.unpack(agent.connected.recv(MAX_MESSAGE))
    assert (message.view, message.peer) == (1, 2)


def test_ranks_that_lose_one_while_they_look_for_the_source_look_again(
    agent: FakeAgent, group: allfold.Group
) -> None:
    """The first search says who brought a tensor in the numbers of before."""
    with ThreadPoolExecutor(1) as pool:
        broadcast = pool.submit(group.broadcast, np.ones(1))
        search = agent.next_op()
        agent.announce(1, rank=1, world_size=3)
        agent.conclude(search, epoch=1, participants=3)
        again = agent.next_op()
        assert (search.view, again.view) == (0, 1)
        assert again.fingerprint != search.fingerprint, "it has a place for each of three ranks"
        agent.conclude(again, epoch=1, participants=3)
        broadcast_itself = agent.next_op()
        assert broadcast_itself.view == 1
        agent.conclude(broadcast_itself, epoch=1)
        broadcast.result(10)


def test_sub_groups_of_the_same_numbers_in_another_epoch_have_other_names(
    agent: FakeAgent, group: allfold.Group
) -> None:
    before = group.membership.subgroup_name((0, 1))
    work = group.barrier(async_op=True)
    agent.announce(1, rank=1, world_size=3)
    agent.conclude(agent.next_op(), epoch=1)
    work.wait()
    assert group.membership.subgroup_name((0, 1)) != before


def test_an_agent_that_says_that_the_group_recovers_is_not_given_up(
    agent: FakeAgent, group: allfold.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("allfold._handles.work.GRACE_SECONDS", 0.1)
    for module in ("_handles.work", "_epochs"):
        monkeypatch.setattr(f"allfold.{module}.monotonic", lambda: now)
    work = group.barrier(timeout=1.0, async_op=True)
    op = agent.next_op()
    now = 1.5
    assert work.is_overdue()
    with ThreadPoolExecutor(1) as pool:
        agent.hold(1.0)
        waiting = pool.submit(work.wait)
        wait_until(lambda: group.membership.epochs.held_at == now, "it is told to be patient")
        assert not work.is_overdue()
        agent.conclude(op)
        waiting.result(10)
    work = group.barrier(timeout=1.0, async_op=True)
    now += 5.0
    with pytest.raises(AgentLost, match="gave no outcome"):
        work.wait()


def test_a_wait_with_a_time_limit_ends_then_though_the_group_recovers(
    agent: FakeAgent, group: allfold.Group
) -> None:
    work = group.barrier(async_op=True)
    agent.hold(1.0)
    with pytest.raises(PeerMissing, match=r"timed out after 0\.01 s; it is still in flight"):
        work.wait(timeout=0.01)


def test_a_long_recovery_is_explained_once_and_its_end_is_said(
    agent: FakeAgent, group: allfold.Group, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="allfold")
    for seconds in (1, 4.9, 5, 6, 7, 1, 6, 7):
        agent.hold(seconds)
    agent.hold(7, number=9)  # of a group that this process is not in
    work = group.barrier(async_op=True)
    agent.conclude(agent.next_op())
    work.wait()
    assert [record.getMessage() for record in caplog.records] == [
        "group 'g' waits for node-b to answer, for 5 s now",
        "group 'g' goes on, after 7 s",
        "group 'g' waits for node-b to answer, for 6 s now",
        "group 'g' goes on, after 7 s",
    ]


@pytest.mark.parametrize("name", ["boundary", "edge"])
def test_a_boundary_is_passed_by_its_name_and_by_its_deprecated_one(
    agent: FakeAgent, group: allfold.Group, name: str
) -> None:
    work = group.barrier(async_op=True)
    agent.conclude(agent.next_op(), boundary=1)
    work.wait()
    with ThreadPoolExecutor(1) as pool:
        passing = pool.submit(getattr(group, name), timeout=10.0)
        agent.announce(1, rank=2, world_size=5)
        arrival = agent.pass_boundary(epoch=1)
        assert passing.result(10)
    assert (arrival["seq"], arrival["boundary"]) == (1, 1)
    assert seen(group) == (1, 2, 5)
    assert not getattr(group, name)(), "nobody waits"


def test_a_group_that_shrinks_says_so(
    agent: FakeAgent, group: allfold.Group, caplog: pytest.LogCaptureFixture
) -> None:
    work = group.barrier(async_op=True)
    agent.announce(1, rank=1, world_size=3)
    agent.conclude(agent.next_op(), epoch=1)
    work.wait()
    assert "group 'g' has 3 of its 4 ranks left: this process, rank 2 until now, is rank 1" in (
        caplog.messages
    )


def test_what_the_loss_of_a_rank_means_is_told_when_the_rank_joins(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLFOLD_ON_LOSS", "shrink")
    monkeypatch.setenv("ALLFOLD_MIN_WORLD", "2")
    with ThreadPoolExecutor(1) as pool:
        arguments: list[dict[str, Any]] = [{}, {"on_loss": "raise", "min_world": 3}]
        for number, given in enumerate(arguments):
            joining = pool.submit(
                allfold.init, rank=0, world_size=3, group=f"g{number}", agent=agent.path, **given
            )
            if not number:
                agent.greet()
            request = agent.seat(number)
            joining.result(10)
            said = {"on_loss": "shrink", "min_world": 2, **given}
            assert request.items() >= said.items()


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"on_loss": "ignore"}, "on_loss is one of raise, shrink, got 'ignore'"),
        ({"min_world": 0}, "min_world is a number of ranks from 1 to 3"),
        ({"min_world": 4}, "min_world is a number of ranks from 1 to 3, the world size; got 4"),
    ],
)
def test_a_loss_that_cannot_be_handled_so_is_refused_before_anything_is_sent(
    given: dict[str, Any], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match=refusal):
        allfold.init(rank=0, world_size=3, agent="/nowhere", **given)
    ((name, value),) = given.items()
    monkeypatch.setenv(f"ALLFOLD_{name.upper()}", str(value))
    with pytest.raises(InvalidArgument, match=f"ALLFOLD_{name.upper()} is"):
        allfold.init(rank=0, world_size=3, agent="/nowhere")
