"""A thread that cannot be started fails its op, not the edge: later ops go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import numpy as np
import pytest

from allfold_core.errors import AllfoldError, ServiceError
from allfold_core.protocol.rank_messages import FIRST_PAIR, Message
from tests.support.fakes.local_groups import LocalGroups, local_groups
from tests.support.waiting import wait_until


@contextmanager
def no_thread(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], bool]) -> Iterator[None]:
    """No thread whose name ``fails`` accepts can be started."""
    start = Thread.start

    def refuse(thread: Thread, *args: Any) -> None:
        if fails(thread.name):
            raise RuntimeError("can't start new thread")
        start(thread, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        yield


def all_fail(local: LocalGroups, seq: int) -> None:
    """All ranks hear what the node without threads has said."""
    for rank in local.ranks:
        failed, error = rank.outcome()
        assert failed == seq
        assert isinstance(error, ServiceError)
        assert "cannot start the thread 'allfold-" in error.message
        assert "ulimit -u" in error.message, "what to do about it"


@pytest.mark.parametrize("name", ["dial-test-node1-node0", "dial-test-node2-node0"])
def test_a_thread_that_cannot_start_fails_its_op_and_the_edges_stay_usable(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_groups([[0], [1], [2]]) as local:
        with no_thread(monkeypatch, lambda each: each == f"allfold-{name}"):
            local.call_all(0, [np.ones(5)] * 3)
            all_fail(local, 0)
        local.call_all(1, [np.full(5, 2.0)] * 3)
        for rank in local.ranks:
            assert rank.outcome() == (1, None)
            assert rank.result(1).tolist() == [6.0] * 5


def test_a_message_without_a_thread_fails_alone_and_the_next_one_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with local_groups([[0], [1]]) as local:
        giver, taker = local.ranks
        with no_thread(monkeypatch, lambda each: each.startswith("allfold-dial-")):
            for number, (rank, way, peer) in enumerate(
                ((giver, Message.SEND, 1), (taker, Message.RECV, 0))
            ):
                rank.exchange(way, number, [1.0], peer)
                seq, error = rank.outcome()
                assert seq == FIRST_PAIR + number
                assert isinstance(error, ServiceError)
                assert "cannot start the thread" in error.message
        assert not any(group.waiting for group in local.groups)
        giver.exchange(Message.SEND, 5, [3.0], 1)
        taker.exchange(Message.RECV, 5, [0.0], 0)
        assert giver.outcome() == taker.outcome() == (FIRST_PAIR + 5, None)
        assert taker.result(FIRST_PAIR + 5) == [3.0]


def test_a_peer_that_has_no_thread_for_an_edge_at_the_moment_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers, so it is not lost, however long this takes."""
    refusals: list[AllfoldError] = []
    with local_groups([[0], [1]]) as local:
        group = local.groups[0]
        serve = group.serve_edge

        def busy(*arguments: Any) -> Any:
            if len(refusals) < 5:
                refusals.append(ServiceError("the node agent cannot start a thread"))
                raise refusals[-1]
            return serve(*arguments)

        monkeypatch.setattr(group, "serve_edge", busy)
        local.call_all(0, [[1.0], [2.0]])
        assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2
        assert len(refusals) == 5
        assert local.rounds == 0


def test_an_edge_that_breaks_while_there_is_no_thread_is_opened_again_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[str] = []

    def fails(name: str) -> bool:
        if name.startswith("allfold-dial-"):
            refused.append(name)
            return True
        return False

    with local_groups([[0], [1]]) as local:
        local.call_all(0, [[1.0], [2.0]])
        assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2
        with no_thread(monkeypatch, fails):
            local.break_connections()
            wait_until(lambda: len(set(refused)) == 2, "both edges are to be opened again")
            local.call_all(1, [[3.0], [4.0]])
        assert [rank.outcome() for rank in local.ranks] == [(1, None)] * 2
        assert local.rounds == 0
