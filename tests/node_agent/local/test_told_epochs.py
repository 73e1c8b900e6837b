"""A rank is told of an epoch once, before the first outcome that carries it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from allfold_agent.local.rank_connection import LocalMembership, RankConnection
from allfold_core.errors import Evicted, PeerLost
from allfold_core.protocol.rank_messages import MAX_MESSAGE, Message, Outcome, unpack_json
from tests.support.fakes.local_groups import LocalGroups, local_groups

NUMBER = 3


class Told:
    """A rank of a group, and the socket at which it hears its agent."""

    def __init__(self, local: LocalGroups) -> None:
        self.lose = local.lose
        self.session = local.ranks[1].session
        self.wants_room = 0
        ours, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.connection = RankConnection(ours, self._want_write)
        self.connection.memberships[NUMBER] = LocalMembership(self.session, local.groups[0])

    def _want_write(self, _: RankConnection) -> None:
        self.wants_room += 1

    def send(self, seq: int, ordinal: int) -> None:
        self.connection.send_outcome(Outcome(Message.DONE, NUMBER, seq, ordinal, 2))

    def heard(self) -> Iterator[str | tuple[int, ...]]:
        """The messages that have arrived: epochs with rank and world, and the ops with outcomes."""
        while True:
            try:
                data = self.socket.recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            if data[0] == Message.EPOCH:
                body = unpack_json(data)
                assert (body["number"], body["nodes"]) == (NUMBER, 1)
                yield body["epoch"], body["rank"], body["world_size"]
            else:
                yield f"op {Outcome.unpack(data).seq}"


@pytest.fixture
def told() -> Iterator[Told]:
    with local_groups([[0, 1, 2, 3]]) as local:
        told = Told(local)
        yield told
        told.connection.close()
        told.socket.close()


def test_a_rank_is_told_of_an_epoch_once_and_just_before_it_needs_it(told: Told) -> None:
    told.send(0, 0)
    told.lose(0)
    told.send(1, 0)
    assert [*told.heard()] == ["op 0", "op 1"]
    told.send(2, 1)
    told.send(3, 1)
    assert [*told.heard()] == [(1, 0, 3), "op 2", "op 3"]


def test_a_rank_is_told_of_older_epochs_too_whose_outcomes_may_come_later(told: Told) -> None:
    told.lose(3)
    told.lose(0)
    told.lose(2)
    told.send(2, 2)
    told.send(1, 1)
    assert [*told.heard()] == [(1, 1, 3), (2, 0, 2), "op 2", "op 1"]


def test_a_rank_is_not_told_of_an_epoch_that_it_is_not_in(told: Told) -> None:
    told.lose(1)
    told.send(0, 1)
    assert [*told.heard()] == ["op 0"]


def test_an_epoch_waits_for_room_in_the_socket_together_with_the_outcome(told: Told) -> None:
    told.lose(0)
    sent = 0
    while not told.wants_room:
        told.send(sent, 0)
        sent += 1
    told.send(sent, 1)
    first = [*told.heard()]
    assert told.connection.flush()
    assert [*first, *told.heard()][-3:] == [f"op {sent - 1}", (1, 0, 3), f"op {sent}"]


def test_outcomes_carry_the_epoch_of_the_op_and_how_many_took_part() -> None:
    with local_groups([[0, 1], [2]]) as local:
        local.call_all(0, [[1.0]] * 3)
        for rank in local.ranks:
            assert rank.outcome() == (0, None)
            assert (rank.told[0].epoch, rank.told[0].participants) == (0, 3)
        local.lose(0)
        survivors = local.ranks[1:]
        for rank in survivors:
            rank.call(1, [1.0])
            assert isinstance(rank.outcome()[1], PeerLost)
            assert (rank.told[1].epoch, rank.told[1].participants) == (1, 0)
        for rank in survivors:
            rank.call(2, [1.0])
            rank.call(3, [1.0], strategy="ring")
        for rank in survivors:
            assert {rank.outcome()[0], rank.outcome()[0]} == {2, 3}
            assert (rank.told[2].epoch, rank.told[2].participants) == (1, 2)
        rank = survivors[0]
        rank.group.evict(Evicted("gone"))
        rank.call(4, [1.0])
        assert rank.outcome()[0] == 4
        assert (rank.told[4].epoch, rank.told[4].participants) == (1, 0)
