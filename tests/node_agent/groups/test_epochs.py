"""A group over its epochs: which ops run in which, and whose numbers count."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.registry import GroupRegistry
from allfold_core.errors import InvalidArgument, PeerLost, PeerMissing, RegisterNotFirstOperation
from allfold_core.operations import Kind, ReduceOp
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.protocol.rank_messages import FIRST_PAIR, Message, Region
from allfold_core.survival.reports import Doubt, Reason
from tests.support.fakes.local_groups import LocalGroups, local_groups, make_plan
from tests.support.fakes.local_rank import SECONDS

OPENING, LATER = 3, 4


@pytest.fixture
def shrunk() -> Iterator[LocalGroups]:
    """Three ranks, of which the first has ended after it had called an op with its neighbour."""
    with local_groups([[0, 1], [2]]) as local:
        for rank in local.ranks[:2]:
            rank.call(0, [1.0 + rank.rank])
        local.lose(0)
        yield local


@pytest.fixture
def aware(shrunk: LocalGroups) -> LocalGroups:
    """The same, when those who are left have heard of it and know their new numbers."""
    shrunk.ranks[2].call(0, [4.0])
    assert [rank.outcome() for rank in shrunk.ranks] == [(0, None)] * 3
    for rank in shrunk.ranks[1:]:
        rank.call(1, [1.0])
        assert isinstance(rank.outcome()[1], PeerLost)
    return shrunk


def test_an_op_that_a_rank_has_called_before_it_ended_is_done_with_it(
    shrunk: LocalGroups,
) -> None:
    shrunk.ranks[2].call(0, [4.0])
    for rank in shrunk.ranks:
        assert rank.outcome() == (0, None)
        assert rank.result(0) == [7.0]
        assert (rank.told[0].epoch, rank.told[0].participants) == (0, 3)
    assert [group.outcomes.recent[-1].epoch for group in shrunk.groups] == [0, 0]


def test_ranks_whose_node_has_missed_a_round_enter_the_epoch_of_its_error_like_the_others() -> None:
    with local_groups([[0, 3], [1, 4], [2]]) as local:
        local.links.hold(LinkMessageType.INSTALL)
        for rank in local.ranks[:3]:
            rank.call(0, [1.0])
        local.ranks[3].end()
        first, *others = local.ranks[:3]
        assert isinstance(first.outcome()[1], PeerLost)
        local.links.drop()  # only the leader has the decision
        local.lose(4)
        for rank in others:
            assert isinstance(rank.outcome()[1], PeerLost)
        assert [rank.told[0].epoch for rank in local.ranks[:3]] == [1, 1, 1]
        for rank in others:
            assert rank.group.epochs[1].has(rank.session)
            assert rank.group.current.ordinal == 2


def test_the_first_op_after_a_loss_fails_alike_and_the_next_one_is_done_by_those_left(
    shrunk: LocalGroups,
) -> None:
    _, stayer, other = shrunk.ranks
    other.call(0, [4.0])
    assert stayer.outcome() == other.outcome() == (0, None)
    stayer.call(1, [2.0])
    errors = [stayer.outcome()]
    other.call(1, [4.0])
    errors.append(other.outcome())
    for rank, (seq, error) in zip((stayer, other), errors, strict=True):
        assert (seq, type(error), rank.view) == (1, PeerLost, 1)
        assert error is not None
        assert error.message == (
            "group 'test' has lost rank 0 on node node0, which ended without leaving the group; "
            "2 of 3 ranks are left"
        )
    for rank, value in ((stayer, 2.0), (other, 4.0)):
        rank.call(2, [value], op=ReduceOp.MEAN)
    for rank in (stayer, other):
        assert rank.outcome() == (2, None)
        assert rank.result(2) == [3.0], "the mean of two"
        assert (rank.told[2].epoch, rank.told[2].participants) == (1, 2)
    assert [group.outcomes.recent[-1].epoch for group in shrunk.groups] == [1, 1]


def test_a_rank_is_recorded_by_its_number_in_the_epoch_of_the_op(aware: LocalGroups) -> None:
    _, stayer, other = aware.ranks
    for rank in (stayer, other):
        rank.call(2, [1.0])
    assert {stayer.outcome(), other.outcome()} == {(2, None)}
    assert set(aware.groups[1].outcomes.recent[-1].arrivals) == {1}
    assert [group.lanes.records.last_called() for group in aware.groups] == [{0: 2}, {1: 2}]


def test_a_root_is_a_rank_of_the_view_of_those_who_call(aware: LocalGroups) -> None:
    _, stayer, other = aware.ranks
    for rank, value in ((stayer, 5.0), (other, 6.0)):
        rank.run(2, Kind.BROADCAST, [value], 1, 1, root=1, strategy="centralized")
    assert stayer.outcome() == other.outcome() == (2, None)
    assert stayer.result(2) == [6.0], "of rank 1, which was rank 2"


def test_messages_go_by_the_numbers_of_the_new_epoch(aware: LocalGroups) -> None:
    _, stayer, other = aware.ranks
    stayer.exchange(Message.SEND, 0, [8.0], 1)
    other.exchange(Message.RECV, 0, [0.0], 0)
    assert stayer.outcome() == other.outcome() == (FIRST_PAIR, None)
    assert other.result(FIRST_PAIR) == [8.0]
    assert other.sources[FIRST_PAIR] == 0


@pytest.mark.parametrize("kind", [Message.OP, Message.SEND, Message.RECV])
@pytest.mark.parametrize(
    ("view", "said"),
    [(1, "not a rank of epoch 1 of group 'test'"), (9, "group 'test' has no epoch 9")],
)
def test_a_call_with_a_view_that_the_rank_cannot_have_is_refused(
    shrunk: LocalGroups, kind: Message, view: int, said: str
) -> None:
    rank = shrunk.ranks[0]
    rank.view = view
    if kind is Message.OP:
        rank.call(1, [1.0])
    else:
        rank.exchange(kind, 1, [1.0], 1)
    seq, error = rank.outcome()
    assert seq == (1 if kind is Message.OP else FIRST_PAIR + 1)
    assert isinstance(error, InvalidArgument)
    assert said in error.message


def test_a_rank_that_the_others_take_for_gone_hears_so(shrunk: LocalGroups) -> None:
    rank = shrunk.ranks[0]
    rank.call(1, [1.0])
    seq, error = rank.outcome()
    assert (seq, type(error)) == (1, PeerLost)
    said = "rank 0 is not in group 'test' any more: it ended without leaving the group"
    assert error is not None
    assert error.message == said


def test_a_verdict_names_ranks_by_their_numbers_in_the_epoch_of_the_op(
    shrunk: LocalGroups,
) -> None:
    shrunk.groups[0].runs.doubt([Doubt(0, Reason.DEADLINE, 1.0)])
    first = shrunk.ranks[1].outcome()[1]
    shrunk.ranks[2].call(0, [4.0])
    late = shrunk.ranks[2].outcome()[1]
    for error in (first, late):
        assert isinstance(error, PeerMissing)
        assert error.details["missing_ranks"] == [2]


def test_a_call_that_is_looked_at_while_a_loss_is_agreed_upon_fails_like_that_of_the_others() -> (
    None
):
    with local_groups([[0, 1, 2]]) as local:
        first, second, _ = local.ranks

        def place(region: Region, nbytes: int) -> memoryview:
            if local.groups[0].current.ordinal == 0:
                local.lose(2)
            return first.memory(region, nbytes)

        first.place = place  # type: ignore[method-assign]
        for rank, value in ((first, 5.0), (second, 6.0)):
            rank.run(0, Kind.ALL_GATHER, [value], 1, 3)
        assert {type(rank.outcome()[1]) for rank in (first, second)} == {PeerLost}
        for rank, value in ((first, 5.0), (second, 6.0)):
            rank.run(1, Kind.ALL_GATHER, [value], 1, 2)
        assert first.outcome() == second.outcome() == (1, None)
        assert list(first.result(1)) == list(second.result(1)) == [5.0, 6.0]


def test_epochs_may_be_looked_through_while_another_one_is_installed() -> None:
    with local_groups([[0, 1]]) as local:
        group = local.groups[0]
        looked_through = iter(group.epochs.values())
        local.lose(1)
        assert [epoch.ordinal for epoch in looked_through] == [0]
        assert list(group.epochs) == [0, 1]


# Numbers that are not positions


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER])
@pytest.mark.parametrize("root", range(4))
def test_ranks_have_any_order_over_the_nodes(kind: Kind, root: int) -> None:
    ranks = [[1, 3], [2], [0]]
    with local_groups(ranks) as local:
        given = [np.arange(4.0) + 10 * rank for rank in range(4)]
        gathered = np.array([each[0] for each in given])
        rights: dict[Kind, list[Any]] = {
            Kind.ALL_GATHER: [gathered] * 4,
            Kind.GATHER: [gathered if rank == root else None for rank in range(4)],
            Kind.BROADCAST: [given[root][:1] if rank != root else None for rank in range(4)],
            Kind.SCATTER: [given[root][rank : rank + 1] for rank in range(4)],
        }
        right = rights[kind]
        for rank, each in enumerate(local.ranks):
            brings = given[rank] if kind is Kind.SCATTER else given[rank][:1]
            gets = 4 if kind in (Kind.ALL_GATHER, Kind.GATHER) else 1
            strategy = "centralized" if kind.has_root else "direct"
            each.run(
                0, kind, brings, 1, gets, root=root if kind.has_root else -1, strategy=strategy
            )
        for rank, each in enumerate(local.ranks):
            assert each.outcome() == (0, None)
            if right[rank] is not None:
                assert np.array_equal(each.result(0), right[rank]), rank


# Groups by name


def test_a_group_is_found_by_its_opening_in_whichever_epoch_it_is(shrunk: LocalGroups) -> None:
    registry, group = GroupRegistry(), shrunk.groups[0]
    assert registry.open(group.plan, lambda: group) is group
    assert registry.find("test", OPENING) is group
    with pytest.raises(RegisterNotFirstOperation, match=f"'test' opening {LATER} is not open"):
        registry.find("test", LATER)
    registry.remove(group)
    with pytest.raises(RegisterNotFirstOperation, match=f"'test' opening {OPENING} is closed here"):
        registry.find("test", OPENING)


class WatchedRegistry(GroupRegistry):
    """Notes when somebody looks for a group; the lock is free again when he waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = Event()

    def _opened_as(self, name: str, opening: int) -> NodeGroup | None:
        self.looked.set()
        return super()._opened_as(name, opening)


def test_whoever_waits_for_a_group_goes_on_as_soon_as_it_is_open() -> None:
    registry, found = WatchedRegistry(), SimpleQueue[NodeGroup | None]()
    with local_groups([[0]]) as local:
        waiting = Thread(
            target=lambda: found.put(registry.look_for("test", OPENING, 60.0)), daemon=True
        )
        waiting.start()
        assert registry.looked.wait(SECONDS)
        group = registry.open(make_plan([[0]]), lambda: local.groups[0])
        assert found.get(timeout=SECONDS) is group


def test_a_name_may_be_opened_anew_before_the_last_rank_has_left_the_old_group() -> None:
    with local_groups([[0]]) as old, local_groups([[0]]) as new:
        new.groups[0].opening = LATER
        registry = GroupRegistry()
        registry.open(make_plan([[0]]), lambda: old.groups[0])
        assert registry.open(make_plan([[0]], epoch=LATER), lambda: new.groups[0])
        assert registry.find("test", OPENING) is old.groups[0]
        assert registry.find("test", LATER) is new.groups[0]
        registry.remove(old.groups[0])
        assert registry.all() == [new.groups[0]]
