"""Calls that wait for the GPU of their rank; the clock runs, but nothing waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from time import monotonic
from unittest.mock import create_autospec

import pytest

from allfold_agent.gpu.completions import FencePoller
from allfold_agent.gpu.gpus import Gpus
from allfold_agent.local.deferred_calls import DeferredCalls
from allfold_agent.local.memberships import Registrar
from allfold_agent.local.rank_connection import CallMessage, LocalMembership, RankConnection
from allfold_agent.local.server import LocalServer
from allfold_agent.local.state_transfers import StateTransfers
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.threads import WorkerPool
from allfold_core.dtypes import DType
from allfold_core.errors import PeerLost
from allfold_core.protocol.rank_messages import (
    FIRST_PAIR,
    Fence,
    Message,
    OpMessage,
    P2PMessage,
    Region,
    pack_hold,
)
from tests.support.fakes.local_groups import local_groups
from tests.support.waiting import DEADLINE_SECONDS, wait_until

PLACE = Region(0, 0)


class Gpu:
    """The GPU of one rank, as the fence poller and the rank's connection show it.

    Attributes:
        passed: the fence that its work has reached.
        submitted: the calls that have begun, and when the rank made them.
        doubted: the ops that the nodes were asked to judge.
    """

    def __init__(self) -> None:
        self.passed = 0
        self.submitted: list[tuple[CallMessage, float]] = []
        self.doubted: list[int] = []
        self._waits: list[tuple[Callable[[], bool], Callable[[Exception | None], None]]] = []
        self.process = create_autospec(RankConnection, instance=True)
        self.process.deferred = deque()
        self.process.memberships = {0: create_autospec(LocalMembership, instance=True)}
        group = self.process.memberships[0].group
        group.failed_call.return_value = None
        group.evicted = None
        group.deadlines.waits_for.return_value = ""
        group.runs.doubt.side_effect = lambda doubts: self.doubted.extend(
            each.seq for each in doubts
        )
        self.process.is_closed = False
        self.process.has_passed.side_effect = lambda fence: fence.value <= self.passed
        self.reactor = create_autospec(Reactor, instance=True)
        self.reactor.call.side_effect = lambda function: function()
        self.poller = create_autospec(FencePoller, instance=True)
        self.poller.when.side_effect = lambda condition, then, _: self._waits.append(
            (condition, then)
        )
        self.calls = DeferredCalls(
            self.reactor,
            self.poller,
            lambda _process, message, called: self.submitted.append((message, called)),
        )

    def reach(self, fence: int) -> None:
        """Let the GPU's work pass a fence, and the poller see it."""
        self.passed = fence
        waits, self._waits = self._waits, []
        for condition, then in waits:
            if condition():
                then(None)
            else:
                self._waits.append((condition, then))


def call(seq: int, fence: int, timeout: float = 60.0) -> OpMessage:
    return OpMessage(0, seq, timeout, PLACE, PLACE, b"", Fence(PLACE, fence))


def send(timeout: float, fence: int) -> P2PMessage:
    dtype, fenced = DType.FLOAT32.code, Fence(PLACE, fence)
    return P2PMessage(Message.SEND, 0, FIRST_PAIR, timeout, 1, 0, dtype, PLACE, 4, fenced)


def test_a_call_begins_with_its_own_timeout_and_the_time_at_which_the_rank_called() -> None:
    """So the time that its rank waits for the GPU is part of its timeout once, and not twice."""
    gpu = Gpu()
    before = monotonic()
    gpu.calls.add(gpu.process, call(0, fence=1))
    after = monotonic()
    gpu.reach(1)
    [(message, called)] = gpu.submitted
    assert message == call(0, fence=1)
    assert before <= called <= after


def test_the_time_that_a_rank_waits_for_its_gpu_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 s, 40 are over: a collective counts from its call, a message has what is left."""
    gpu = Gpu()
    server = LocalServer(
        str(tmp_path / "agent.sock"),
        create_autospec(Registrar, instance=True),
        {"node": "test"},
        reactor=gpu.reactor,
        workers=create_autospec(WorkerPool, instance=True),
        poller=gpu.poller,
        gpus=Gpus(False, gpu.poller),
        transfers=create_autospec(StateTransfers, instance=True),
    )
    called = monotonic() - 40.0
    monkeypatch.setattr("allfold_agent.local.deferred_calls.monotonic", lambda: called)
    for message in (call(0, fence=1), send(60.0, fence=1)):
        server._call(gpu.process, message)
    gpu.reach(1)
    server.close()
    group = gpu.process.memberships[0].group
    ((*_, begun, since), _) = group.calls.submit.call_args
    assert (begun, since) == (call(0, fence=1), called)
    ((*_, sent), _) = group.calls.submit_message.call_args
    assert 0.0 < sent.timeout <= 20.0


def test_calls_begin_in_the_order_in_which_the_process_made_them() -> None:
    gpu = Gpu()
    for seq, fence in enumerate((2, 1, 3)):
        gpu.calls.add(gpu.process, call(seq, fence))
    gpu.reach(1)
    assert gpu.submitted == []
    gpu.reach(2)
    assert [message.seq for message, _ in gpu.submitted] == [0, 1]
    gpu.reach(3)
    assert [message.seq for message, _ in gpu.submitted] == [0, 1, 2]


def test_a_call_whose_gpu_is_late_is_judged_and_begins_when_the_gpu_comes() -> None:
    gpu = Gpu()
    gpu.calls.add(gpu.process, call(0, fence=1, timeout=0.0))
    gpu.reach(0)
    assert gpu.doubted == [0]
    assert gpu.submitted == []
    gpu.reach(1)
    assert [message.seq for message, _ in gpu.submitted] == [0]


@pytest.mark.parametrize("late", [call(0, fence=1, timeout=0.0), send(0.0, fence=1)])
def test_a_call_whose_gpu_is_late_is_not_judged_while_nothing_can_be_decided(
    late: CallMessage,
) -> None:
    gpu = Gpu()
    group = gpu.process.memberships[0].group
    group.deadlines.waits_for.return_value, group.deadlines.held_for.return_value = (
        "node b, which is silent",
        7.0,
    )
    gpu.calls.add(gpu.process, late)
    gpu.reach(0)
    assert gpu.doubted == []
    told = pack_hold(0, "node b, which is silent", 7.0)
    gpu.process.send.assert_called_once_with(told)  # so that the rank's own patience moves, too
    gpu.reach(1)
    assert [message.seq for message, _ in gpu.submitted] == [late.seq]


def test_the_look_at_a_call_does_not_wait_for_the_lock_of_its_group() -> None:
    """The thread that looks also completes what GPUs have done, for all groups."""
    with local_groups([[0]]) as local:
        gpu, group = Gpu(), local.groups[0]
        gpu.process.memberships[0].group = group
        gpu.calls.add(gpu.process, call(0, fence=1))
        look = Thread(target=gpu.reach, args=(0,))
        with group.table.lock:
            look.start()
            look.join(DEADLINE_SECONDS)
            waits = look.is_alive()
        look.join()
        assert not waits
        local.fail(0, PeerLost("a rank is lost"))

        def refused() -> bool:
            gpu.reach(0)
            return not gpu.process.deferred

        wait_until(refused, "its op has failed")


def test_a_call_whose_op_has_failed_meanwhile_tells_its_rank_of_the_epoch_that_follows() -> None:
    """Else its next call, with the older view, would fail the next op of all as well."""
    gpu = Gpu()
    with local_groups([[0, 1], [2]]) as local:
        rank = local.ranks[0]
        gpu.process.memberships = {0: LocalMembership(rank.session, rank.group)}
        gpu.calls.add(gpu.process, call(0, fence=1))
        local.ranks[1].call(0, [1.0])
        local.lose(2)
        local.fail(0, PeerLost("its ranks cannot do it"))
        gpu.reach(0)
        ((refusal,), _) = gpu.process.send_outcome.call_args
        assert (refusal.seq, refusal.kind, refusal.epoch) == (0, Message.FAILED, 1)
        assert not rank.group.deferred


def test_a_process_that_defers_calls_without_end_is_refused_one_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allfold_agent.local.deferred_calls.MAX_OPEN_CALLS", 3)
    gpu = Gpu()
    for seq in range(4):
        gpu.calls.add(gpu.process, call(seq, fence=1))
    ((refusal,), _) = gpu.process.send_outcome.call_args
    seq, body = refusal.seq, refusal.body
    assert seq == 3
    assert "3 calls of this process wait for its GPU" in (body or {})["message"]
    (session, abandoned, _), _ = gpu.process.memberships[0].group.calls.abandon.call_args
    assert (session, abandoned) == (gpu.process.memberships[0].session, 3), "on all nodes"
    gpu.reach(1)
    assert [message.seq for message, _ in gpu.submitted] == [0, 1, 2]


def test_a_late_send_of_a_rank_that_is_not_in_the_new_epoch_is_refused() -> None:
    gpu = Gpu()
    with local_groups([[0, 1], [2]]) as local:
        rank = local.ranks[0]
        gpu.process.memberships = {0: LocalMembership(rank.session, rank.group)}
        local.lose(0)
        gpu.calls.add(gpu.process, send(0.0, fence=1))
        gpu.reach(0)
    ((refusal,), _) = gpu.process.send_outcome.call_args
    seq, body = refusal.seq, refusal.body
    assert seq == FIRST_PAIR
    assert "the GPU of rank 0 has not come to the call within 0 s" in (body or {})["message"]
