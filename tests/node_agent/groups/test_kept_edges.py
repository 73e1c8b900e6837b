"""Edges that outlive epochs: what becomes of the frames of each, and who may open one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from allfold_agent.edges.opening import EdgeRequest
from allfold_agent.groups.group import NodeGroup
from allfold_core.errors import LocalError, PeerMissing, PeerSentIncoherentTensor
from allfold_core.protocol.frames import FrameHeader, FrameType
from allfold_core.protocol.peer_link import LinkMessageType
from tests.support.fakes.local_groups import LocalGroups, local_groups, make_plan
from tests.support.fakes.local_rank import no_outcome
from tests.support.waiting import wait_until

OPENING = 3
RANKS = [[0], [1, 2, 3]]
# Received with its header, and in many pieces.
SIZES = pytest.mark.parametrize("numel", [5, 200_000], ids=["short", "long"])


@pytest.fixture
def two() -> Iterator[LocalGroups]:
    """Two nodes that have done an op, so that their edges are open; losses shrink the group."""
    with local_groups(RANKS, plan=make_plan(RANKS, on_loss="shrink")) as local:
        run(local, 0)
        yield local


def run(local: LocalGroups, seq: int, numel: int = 5, ranks: int = 4) -> None:
    """Have the first ranks do an op."""
    for rank in local.ranks[:ranks]:
        rank.call(seq, np.full(numel, 1.0))
    assert_done(local, seq, ranks)


def assert_done(local: LocalGroups, seq: int, ranks: int) -> None:
    for rank in local.ranks[:ranks]:
        assert rank.outcome() == (seq, None)
        assert (rank.result(seq) == ranks).all()
        assert rank.told[seq].participants == ranks


def received(local: LocalGroups) -> int:
    """The number of frames of node 0 that node 1 has dealt with."""
    return local.groups[1].edges.open_in("node0").received


def has_received(local: LocalGroups, frames: int) -> bool:
    return received(local) == frames


def scrapped(local: LocalGroups) -> int:
    return local.groups[1].edges.open_in("node0").counters.scrapped_frames


def acknowledged(local: LocalGroups) -> int:
    return local.groups[0].edges.out("node1").acknowledged()


def await_frames_at_the_receiver(local: LocalGroups) -> None:
    """Until node 0 has sent something that node 1 does not take."""
    edge = local.groups[0].edges.out("node1")
    wait_until(lambda: edge._frames.next_number > received(local), "a frame is on its way")


def test_an_edge_goes_on_in_the_next_epochs_with_its_connection_and_its_numbers(
    two: LocalGroups,
) -> None:
    edges = [(group.edges.out(to), group.edges.open_in(to)) for group, to in ends(two)]
    connections = [out._connection for out, _ in edges]
    wait_until(partial(has_received, two, 1), "the frame of the first op is counted")
    for epoch, left in ((1, 3), (2, 2)):
        two.lose(left)
        run(two, epoch, ranks=left)
        assert [group.outcomes.recent[-1].epoch for group in two.groups] == [epoch] * 2
        wait_until(partial(has_received, two, epoch + 1), "its frame has the next number")
    assert edges == [(group.edges.out(to), group.edges.open_in(to)) for group, to in ends(two)]
    assert connections == [out._connection for out, _ in edges]
    assert two.connections == 2


def ends(local: LocalGroups) -> list[tuple[NodeGroup, str]]:
    return [(local.groups[0], "node1"), (local.groups[1], "node0")]


@SIZES
def test_frames_of_an_op_that_has_failed_are_read_away_and_later_ops_go_on(
    two: LocalGroups, numel: int
) -> None:
    """They were numbered before it failed, so the other node has to have them."""
    two.ranks[0].call(1, np.ones(numel))
    await_frames_at_the_receiver(two)
    two.fail(1, PeerMissing("too late", missing_ranks=[1]))
    assert isinstance(two.ranks[0].outcome()[1], PeerMissing)
    run(two, 2, numel)
    assert scrapped(two) >= 1
    wait_until(lambda: acknowledged(two) == received(two), "all frames are acknowledged")


@SIZES
def test_frames_of_an_attempt_that_was_given_up_are_read_away_and_the_op_is_redone(
    two: LocalGroups, numel: int
) -> None:
    for rank in two.ranks[:2]:
        rank.call(1, np.ones(numel))
    await_frames_at_the_receiver(two)
    two.lose(3)
    wait_until(lambda: scrapped(two), "the frame is read away")
    assert no_outcome(two.ranks[1], 0.02), "it is none of the new attempt"
    two.ranks[2].call(1, np.ones(numel))
    assert_done(two, 1, 3)
    run(two, 2, numel, ranks=3)
    wait_until(lambda: acknowledged(two) == received(two), "all frames are acknowledged")


@SIZES
def test_frames_of_an_epoch_that_is_not_installed_yet_wait_for_it(
    two: LocalGroups, numel: int
) -> None:
    two.links.hold(LinkMessageType.INSTALL)
    two.ranks[3].end()
    wait_until(lambda: two.groups[0].current.ordinal == 1, "one node has installed it")
    for rank in two.ranks[:3]:
        rank.call(1, np.ones(numel))
    await_frames_at_the_receiver(two)
    assert no_outcome(two.ranks[0], 0.05)
    two.links.release()
    assert_done(two, 1, 3)
    assert scrapped(two) == 0


@SIZES
def test_an_op_of_the_epoch_before_is_received_although_a_newer_one_is_installed(
    two: LocalGroups, numel: int
) -> None:
    """A rank that has died since had called it, and its memory is still mapped."""
    for rank in (two.ranks[0], *two.ranks[2:]):
        rank.call(1, np.ones(numel))
    await_frames_at_the_receiver(two)
    two.lose(3)
    two.ranks[1].call(1, np.ones(numel))
    assert_done(two, 1, 4)
    assert scrapped(two) == 0
    run(two, 2, ranks=3)


@SIZES
def test_frames_of_an_op_that_only_some_local_ranks_have_called_wait_for_the_others(
    two: LocalGroups, numel: int
) -> None:
    for rank in two.ranks[:3]:
        rank.call(1, np.ones(numel))
    await_frames_at_the_receiver(two)
    assert no_outcome(two.ranks[0], 0.02)
    two.ranks[3].call(1, np.ones(numel))
    assert_done(two, 1, 4)
    assert scrapped(two) == 0


def test_a_node_without_a_part_in_an_op_is_found_out_when_it_sends_for_it() -> None:
    ranks = [[0], [1], [2]]
    with local_groups(ranks, plan=make_plan(ranks, on_loss="shrink")) as local:
        group = local.groups[0]
        local.lose(2)
        local.ranks[0].call(0, [1.0])
        header = FrameHeader(FrameType.DATA, group.current.packed_stamp, 0, 0, 0, 4, 0, 0)
        assert group.edges.open_in("node2") is not None
        assert group._edges.sink_for("node2", header) is None
        for rank in local.ranks[:2]:
            if rank is local.ranks[1]:  # once it is found out: else the op may end before
                rank.call(0, [1.0])
            _, error = rank.outcome()
            assert isinstance(error, PeerSentIncoherentTensor)
            assert error.message == "op 0 got a frame of node node2, which has no part in it"


# Who may open an edge


LIVES = (f"life 0.{OPENING}", f"life 1.{OPENING}")
REQUEST = EdgeRequest("test", OPENING, "node0", "node1", lives=LIVES)
Change = Callable[[EdgeRequest], EdgeRequest]


def another_life_of(place: int) -> Change:
    lives = ("new", LIVES[1]) if place == 0 else (LIVES[0], "new")
    return lambda request: replace(request, lives=lives)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (another_life_of(0), "restarted"),
        (another_life_of(1), "restarted"),
        (lambda request: replace(request, src="node2"), "no edge from node2 to node1"),
        (lambda request: replace(request, dst="node7"), "no edge from node0 to node7"),
    ],
)
def test_an_edge_is_refused_to_who_is_not_meant(
    two: LocalGroups, change: Change, named: str
) -> None:
    with pytest.raises(LocalError, match=named) as caught:
        two.groups[0].serve_edge(change(REQUEST))
    assert caught.value.details["http_status"] == 409
    assert two.groups[0].serve_edge(REQUEST) is two.groups[0].edges.out("node1")
