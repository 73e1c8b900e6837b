"""Edges that outlive epochs: what becomes of the frames of each, and who may open one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from allfold_agent.edges.edge_request import EdgeRequest
from allfold_agent.groups.group import Group
from allfold_core.errors import LocalError, PeerLost, PeerMissing
from tests.support.fakes.local_groups import LocalGroups, local_groups, make_plan, no_outcome
from tests.support.waiting import wait_until

FIRST, SECOND, THIRD = 3, 4, 5
# Read by the reactor, and by the edge's own thread.
SIZES = pytest.mark.parametrize("numel", [5, 200_000], ids=["short", "long"])


@pytest.fixture
def two() -> Iterator[LocalGroups]:
    """Two nodes that have done an op, so that their edges are open."""
    with local_groups([[0], [1]]) as local:
        run(local, 0)
        yield local


def run(local: LocalGroups, seq: int, numel: int = 5) -> None:
    local.call_all(seq, [np.full(numel, 1.0), np.full(numel, 2.0)])
    for rank in local.ranks:
        assert rank.outcome() == (seq, None)
        assert (rank.result(seq) == 3.0).all()


def install(group: Group, epoch: int, first_seq: int) -> None:
    """Have one node take in an epoch with the same ranks."""
    group.install(make_plan([[0], [1]], epoch), first_seq)
    group.current.seat(f"session of {group.current.me}", group.current.me)


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
    wait_until(lambda: edge._next_number > received(local), "a frame is on its way")


def test_an_edge_goes_on_in_the_next_epochs_with_its_connection_and_its_numbers(
    two: LocalGroups,
) -> None:
    edges = [(group.edges.out(to), group.edges.open_in(to)) for group, to in ends(two)]
    connections = [out._connection for out, _ in edges]
    wait_until(partial(has_received, two, 1), "the frame of the first op is counted")
    for seq, epoch in ((1, SECOND), (2, THIRD)):
        two.install([[0], [1]], {0: 0, 1: 1}, first_seq=seq, epoch=epoch)
        run(two, seq)
        assert [group.outcomes.recent[-1].epoch for group in two.groups] == [epoch] * 2
        wait_until(partial(has_received, two, seq + 1), "its frame has the next number")
    assert edges == [(group.edges.out(to), group.edges.open_in(to)) for group, to in ends(two)]
    assert connections == [out._connection for out, _ in edges]
    assert two.connections == 2


def ends(local: LocalGroups) -> list[tuple[Group, str]]:
    return [(local.groups[0], "node1"), (local.groups[1], "node0")]


@SIZES
def test_frames_of_an_op_that_has_failed_are_read_away_and_later_ops_go_on(
    two: LocalGroups, numel: int
) -> None:
    """They were numbered before it failed, so the other node has to have them."""
    two.ranks[0].call(1, np.ones(numel))
    await_frames_at_the_receiver(two)
    for group in two.groups:
        group.fail(1, PeerMissing("too late", missing_ranks=[1]))
    assert isinstance(two.ranks[0].outcome()[1], PeerMissing)
    run(two, 2, numel)
    assert scrapped(two) >= 1
    wait_until(lambda: acknowledged(two) == received(two), "all frames are acknowledged")


@SIZES
@pytest.mark.parametrize("runs", [True, False], ids=["it runs in a newer one", "it does not run"])
def test_frames_of_an_attempt_that_was_given_up_are_read_away_and_later_ops_go_on(
    two: LocalGroups, numel: int, runs: bool
) -> None:
    two.ranks[0].call(1, np.ones(numel))
    await_frames_at_the_receiver(two)
    install(two.groups[1], SECOND, first_seq=1)
    if runs:
        two.ranks[1].call(1, np.ones(numel))
    wait_until(lambda: scrapped(two), "the frame is read away")
    if runs:
        assert no_outcome(two.ranks[1], 0.02), "the frame is none of this attempt"
        two.groups[1].fail(1, PeerLost("there is no other rank"))
        assert isinstance(two.ranks[1].outcome()[1], PeerLost)
    two.groups[0].fail(1, PeerLost("its attempt is given up"))
    assert isinstance(two.ranks[0].outcome()[1], PeerLost)
    install(two.groups[0], SECOND, first_seq=2)
    run(two, 2, numel)
    wait_until(lambda: acknowledged(two) == received(two), "all frames are acknowledged")


@SIZES
def test_frames_of_an_epoch_that_is_not_installed_yet_wait_for_it(
    two: LocalGroups, numel: int
) -> None:
    install(two.groups[0], SECOND, first_seq=1)
    two.ranks[0].call(1, np.full(numel, 1.0))
    await_frames_at_the_receiver(two)
    assert no_outcome(two.ranks[0], 0.05)
    install(two.groups[1], SECOND, first_seq=1)
    two.ranks[1].call(1, np.full(numel, 2.0))
    for rank in two.ranks:
        assert rank.outcome() == (1, None)
        assert (rank.result(1) == 3.0).all()
    assert scrapped(two) == 0


@SIZES
def test_what_waits_for_an_epoch_is_looked_at_again_when_it_is_installed(
    two: LocalGroups, numel: int
) -> None:
    """Not only when an op begins: here none does, as this one has failed."""
    two.groups[1].fail(1, PeerMissing("too late", missing_ranks=[1]))
    install(two.groups[0], SECOND, first_seq=1)
    two.ranks[0].call(1, np.ones(numel))
    await_frames_at_the_receiver(two)
    assert no_outcome(two.ranks[0], 0.05)
    assert scrapped(two) == 0, "it may be run in that epoch"
    install(two.groups[1], SECOND, first_seq=1)
    wait_until(lambda: scrapped(two), "the frame is read away")
    two.groups[0].fail(1, PeerMissing("too late", missing_ranks=[1]))


@SIZES
def test_an_op_of_the_epoch_before_is_received_although_a_newer_one_is_installed(
    two: LocalGroups, numel: int
) -> None:
    """Its local ranks had not called it then; they do so now."""
    two.ranks[0].call(1, np.full(numel, 1.0))
    await_frames_at_the_receiver(two)
    for group in two.groups:
        install(group, SECOND, first_seq=2)
    two.ranks[1].call(1, np.full(numel, 2.0))
    for rank in two.ranks:
        assert rank.outcome() == (1, None)
        assert (rank.result(1) == 3.0).all()
    assert scrapped(two) == 0
    run(two, 2)


@SIZES
def test_frames_of_an_op_that_only_some_local_ranks_have_called_wait_for_the_others(
    numel: int,
) -> None:
    with local_groups([[0], [1, 2]]) as local:
        local.call_all(0, [[1.0]] * 3)
        assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 3
        for rank in local.ranks[:2]:
            rank.call(1, np.full(numel, 1.0))
        await_frames_at_the_receiver(local)
        assert no_outcome(local.ranks[0], 0.02)
        local.ranks[2].call(1, np.full(numel, 1.0))
        for rank in local.ranks:
            assert rank.outcome() == (1, None)
            assert (rank.result(1) == 3.0).all()
        assert scrapped(local) == 0


def test_a_node_without_a_part_in_an_op_is_found_out_when_it_sends_for_it() -> None:
    with local_groups([[0], [1], [2]]) as local:
        local.call_all(0, [[1.0]] * 3)
        assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 3
        group, stranger = local.groups[0], local.groups[2]
        group.install(make_plan([[0], [1]], SECOND), first_seq=1)
        group.current.seat("session of 0", 0)
        stranger.install(make_plan([[0], [1], [2]], SECOND), first_seq=1)
        stranger.current.seat("session of 2", 2)
        local.ranks[0].call(1, [1.0])
        local.ranks[2].call(1, [1.0])
        wait_until(lambda: local.notes.suspicions, "it is suspected")
        assert local.notes.suspicions[0] == (
            1,
            "incoherent: op 1 got a frame of node node2, which has no part in it",
        )


# Who may open an edge


REQUEST = EdgeRequest("test", FIRST, "node0", "node1", incarnations=("life 0", "life 1"))
Change = Callable[[EdgeRequest], EdgeRequest]


def another_life_of(place: int) -> Change:
    lives = ("new", "life 1") if place == 0 else ("life 0", "new")
    return lambda request: replace(request, incarnations=lives)


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
