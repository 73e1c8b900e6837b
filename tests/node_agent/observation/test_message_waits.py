"""For whom sends and receives wait: ranks that owe a message, and ranks that wait themselves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import monotonic
from typing import Any

import pytest

from allfold_agent.observation.message_waits import MessageWaits, Wait
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.protocol.rank_messages import Message
from tests.support.fakes.local_groups import LocalGroups, local_groups
from tests.support.waiting import wait_until

ZEROS = [0.0] * 3
IN_OP = Wait("op 7,", 0.0, 7, patience=3.0)


class Watched:
    """Ranks 0 and 1 on the first node, rank 2 on the second, and what their observers see."""

    def __init__(self, local: LocalGroups) -> None:
        self.ranks = local.ranks
        self._links = local.links
        self._waits = [(MessageWaits(group), group.current.ranks) for group in local.groups]
        self._heard = 0
        self._later = 0.0
        for group, (waits, _) in zip(local.groups, self._waits, strict=True):
            group.on_observed = partial(self._hear, waits)

    def _hear(self, waits: MessageWaits, node: str, body: dict[str, Any]) -> None:
        waits.hear(node, body["messages"], monotonic() + self._later)
        self._heard += 1

    def look(
        self,
        node: int,
        seconds: float = 12.0,
        in_ops: tuple[int, ...] = (),
        awaited: tuple[int, ...] = (),
    ) -> dict[int, Wait]:
        """Return who is waited for on a node, so many seconds from now.

        Args:
            in_ops: the ranks that wait in an op.
            awaited: the ranks that the op waits for.
        """
        self._later = seconds
        now = monotonic() + seconds
        found: dict[int, Wait] = {}
        for _ in self.ranks:  # so that they hear of what others have heard
            for index, (waits, ranks) in enumerate(self._waits):
                op_waits = {rank: IN_OP for rank in awaited if rank in ranks}
                seen = waits.look(now, set(in_ops) & set(ranks), op_waits)
                found = seen if index == node else found
            wait_until(self._have_heard, "the observers have told each other")
        return found

    def _have_heard(self) -> bool:
        kinds = [kind for *_, kind in self._links.sent]
        return self._heard == kinds.count(LinkMessageType.OBSERVED)


@pytest.fixture
def watched() -> Iterator[Watched]:
    with local_groups([[0, 1], [2]]) as local:
        yield Watched(local)


@pytest.mark.parametrize(("caller", "peer", "node"), [(0, 1, 0), (0, 2, 1), (2, 1, 0)])
def test_a_receive_waits_for_the_rank_that_has_not_sent(
    watched: Watched, caller: int, peer: int, node: int
) -> None:
    watched.ranks[caller].exchange(Message.RECV, 0, ZEROS, peer, tag=7)
    found = watched.look(node)
    assert list(found) == [peer]
    assert found[peer].subject == (
        f"recv(float32[3], from rank {peer}, tag 7) of rank {caller} in group 'test'"
    )
    assert not found[peer].waits_itself
    assert found[peer].patience == 10.0


@pytest.mark.parametrize(("caller", "peer", "node"), [(0, 1, 0), (0, 2, 1), (2, 1, 0)])
def test_a_send_waits_for_the_rank_that_has_not_received(
    watched: Watched, caller: int, peer: int, node: int
) -> None:
    watched.ranks[caller].exchange(Message.SEND, 0, ZEROS, peer)
    found = watched.look(node)
    assert list(found) == [peer]
    assert found[peer].subject.startswith(f"send(float32[3], to rank {peer}, tag 0) of rank")


def test_a_message_that_has_come_waits_for_nobody(watched: Watched) -> None:
    watched.ranks[0].exchange(Message.SEND, 0, [1.0], 2)
    watched.ranks[2].exchange(Message.RECV, 0, [0.0], 0)
    assert watched.ranks[2].outcome() == (watched.ranks[0].outcome()[0], None)
    assert watched.look(0) == watched.look(1) == {}


def test_other_nodes_are_not_told_of_what_has_just_begun(watched: Watched) -> None:
    watched.ranks[0].exchange(Message.RECV, 0, ZEROS, 2)
    assert watched.look(1, seconds=0.0) == {}


def test_a_rank_that_waits_for_another_one_is_not_late(watched: Watched) -> None:
    """Rank 0 waits for 1, and 1 for 2: only rank 2 can go on."""
    watched.ranks[0].exchange(Message.RECV, 0, ZEROS, 1)
    watched.ranks[1].exchange(Message.RECV, 0, ZEROS, 2)
    assert watched.look(0)[1].waits_itself
    assert not watched.look(1)[2].waits_itself


def test_a_rank_that_waits_in_a_collective_is_not_late(watched: Watched) -> None:
    watched.ranks[0].exchange(Message.RECV, 0, ZEROS, 1)
    assert watched.look(0, in_ops=(1,))[1].waits_itself


@pytest.mark.parametrize(("one", "other", "node"), [(0, 1, 0), (0, 2, 1)])
def test_ranks_that_wait_for_each_other_are_named_with_both_calls(
    watched: Watched, one: int, other: int, node: int
) -> None:
    """Two receives with nothing under way, as after a mistake in the order of calls or a tag."""
    watched.ranks[one].exchange(Message.RECV, 0, ZEROS, other, tag=1)
    watched.ranks[other].exchange(Message.RECV, 0, ZEROS, one, tag=2)
    wait = watched.look(node)[other]
    assert not wait.waits_itself
    assert wait.subject == (
        f"recv(float32[3], from rank {other}, tag 1) of rank {one} in group 'test', while rank "
        f"{other} waits in recv(float32[3], from rank {one}, tag 2),"
    )


@pytest.mark.parametrize("last", [1, 2])
def test_where_an_op_waits_for_a_receiver_the_sender_is_late_as_soon(
    watched: Watched, last: int
) -> None:
    """An op waits for rank 0, which waits for another one, on its node or elsewhere."""
    watched.ranks[0].exchange(Message.RECV, 0, ZEROS, last)
    in_op = 3 - last
    assert watched.look(0, in_ops=(in_op,), awaited=(0, last))[0].waits_itself
    assert watched.look(last // 2, in_ops=(in_op,), awaited=(0, last))[last] == IN_OP
    found = watched.look(last // 2, in_ops=(in_op,), awaited=(0,))
    assert found[last].subject.startswith(f"recv(float32[3], from rank {last}, tag 0) of rank 0")
    assert found[last].patience < 10.0


def test_the_last_of_a_chain_over_nodes_is_late_where_an_op_waits_for_the_first(
    watched: Watched,
) -> None:
    """Rank 0 waits for 1, which waits for 2."""
    watched.ranks[0].exchange(Message.RECV, 0, ZEROS, 1)
    watched.ranks[1].exchange(Message.RECV, 0, ZEROS, 2)
    assert watched.look(0, awaited=(0,))[1].waits_itself
    last = watched.look(1, awaited=(0,))[2]
    assert (last.waits_itself, last.patience < 10.0) == (False, True)


def test_ranks_that_wait_for_each_other_while_an_op_waits_for_both_are_late_as_soon(
    watched: Watched,
) -> None:
    watched.ranks[0].exchange(Message.RECV, 0, ZEROS, 1)
    watched.ranks[1].exchange(Message.RECV, 0, ZEROS, 0)
    found = watched.look(0, in_ops=(2,), awaited=(0, 1))
    assert sorted(found) == [0, 1]
    for wait in found.values():
        assert "while rank" in wait.subject
        assert (wait.waits_itself, wait.patience < 10.0) == (False, True)


def test_a_rank_that_receives_from_any_other_is_kept_by_nobody(watched: Watched) -> None:
    watched.ranks[0].exchange(Message.RECV, 0, ZEROS, ANY_SOURCE)
    assert watched.look(0, awaited=(0,)) == {0: IN_OP}
    watched.ranks[1].exchange(Message.RECV, 0, ZEROS, 0)
    watched.ranks[2].exchange(Message.RECV, 0, ZEROS, 0)
    assert not watched.look(0)[0].waits_itself


def test_a_receive_and_an_op_that_wait_for_each_other_are_found_out(watched: Watched) -> None:
    """Rank 0 receives from 2, which waits in an op that rank 0 has not called."""
    watched.ranks[0].exchange(Message.RECV, 0, ZEROS, 2)
    wait = watched.look(1, in_ops=(1, 2), awaited=(0,))[2]
    assert (wait.waits_itself, wait.patience) == (False, 10.0)


def test_what_another_node_says_no_more_is_forgotten(watched: Watched) -> None:
    watched.ranks[0].exchange(Message.RECV, 0, ZEROS, 2)
    assert list(watched.look(1)) == [2]
    watched.ranks[2].exchange(Message.SEND, 0, ZEROS, 0)
    assert watched.ranks[2].outcome()[1] is None
    assert watched.ranks[0].outcome()[1] is None
    assert watched.look(1, seconds=15.0) == {}
