"""A group over its epochs: which ops run in which, and whose numbers count."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch

from allfold_agent.groups.group import Group
from allfold_agent.groups.registry import Registry
from allfold_core.errors import InvalidArgument, PeerLost, PeerMissing, RegisterNotFirstOperation
from allfold_core.operations import Kind, ReduceOp
from allfold_core.wire.local_wire import FIRST_PAIR, Message, Region
from tests.support.fakes.local_groups import SECONDS, LocalGroups, local_groups, make_plan

FIRST, SECOND = 3, 4


@pytest.fixture
def shrunk() -> Iterator[LocalGroups]:
    """Three ranks, of which the first is not in the second epoch, which begins with op 1."""
    with local_groups([[0, 1], [2]]) as local:
        leaver, stayer, _ = local.ranks
        leaver.call(0, [1.0])
        stayer.call(0, [2.0])
        local.install([[0], [1]], {1: 0, 2: 1}, first_seq=1)
        yield local


def test_an_op_that_has_begun_goes_on_in_its_epoch_when_another_one_is_installed(
    shrunk: LocalGroups,
) -> None:
    shrunk.ranks[2].call(0, [4.0])
    for rank in shrunk.ranks:
        assert rank.outcome() == (0, None)
        assert rank.result(0) == [7.0]
    assert [group.outcomes.recent[-1].epoch for group in shrunk.groups] == [FIRST, FIRST]


def test_an_op_that_begins_later_runs_in_the_new_epoch_with_its_ranks_alone(
    shrunk: LocalGroups,
) -> None:
    _, stayer, other = shrunk.ranks
    stayer.call(1, [2.0], op=ReduceOp.MEAN)
    other.call(1, [4.0], op=ReduceOp.MEAN)
    for rank in (stayer, other):
        assert rank.outcome() == (1, None), "although op 0 still waits"
        assert rank.result(1) == [3.0], "the mean of two"
    assert [group.outcomes.recent[-1].epoch for group in shrunk.groups] == [SECOND, SECOND]


def test_a_rank_is_recorded_by_its_number_in_the_epoch_of_the_op(shrunk: LocalGroups) -> None:
    _, stayer, other = shrunk.ranks
    for rank in (stayer, other):
        rank.call(1, [1.0])
    assert {stayer.outcome(), other.outcome()} == {(1, None)}
    assert set(shrunk.groups[1].outcomes.recent[-1].arrivals) == {1}
    assert shrunk.groups[0].last_called(shrunk.groups[0].epochs[FIRST]) == {0: 0, 1: 1}
    assert shrunk.groups[0].last_called(shrunk.groups[0].current) == {0: 1}


def test_a_root_is_a_rank_of_the_epoch_of_the_op(shrunk: LocalGroups) -> None:
    _, stayer, other = shrunk.ranks
    for rank, value in ((stayer, 5.0), (other, 6.0)):
        rank.run(1, Kind.BROADCAST, [value], 1, 1, root=1, strategy="centralized")
    assert stayer.outcome() == other.outcome() == (1, None)
    assert stayer.result(1) == [6.0], "of rank 1, which was rank 2"


def test_messages_go_by_the_numbers_of_the_new_epoch(shrunk: LocalGroups) -> None:
    _, stayer, other = shrunk.ranks
    stayer.exchange(Message.SEND, 0, [8.0], 1)
    other.exchange(Message.RECV, 0, [0.0], 0)
    assert stayer.outcome() == other.outcome() == (FIRST_PAIR, None)
    assert other.result(FIRST_PAIR) == [8.0]
    assert other.sources[FIRST_PAIR] == 0


@pytest.mark.parametrize("kind", [Message.OP, Message.SEND, Message.RECV])
def test_a_rank_that_is_not_in_the_new_epoch_hears_so(shrunk: LocalGroups, kind: Message) -> None:
    rank = shrunk.ranks[0]
    if kind is Message.OP:
        rank.call(1, [1.0])
    else:
        rank.exchange(kind, 1, [1.0], 1)
    seq, error = rank.outcome()
    assert seq == (1 if kind is Message.OP else FIRST_PAIR + 1)
    assert isinstance(error, InvalidArgument)
    assert "not a rank of epoch 4 of group 'test'" in error.message


def test_the_loss_of_a_member_fails_the_ops_of_its_epoch_alone(shrunk: LocalGroups) -> None:
    _, stayer, other = shrunk.ranks
    stayer.call(1, [2.0])
    for group in shrunk.groups:
        group.epochs[FIRST].break_(PeerLost("rank 0 is gone", ranks=[0]))
    seq, error = stayer.outcome()
    assert seq == 0
    assert isinstance(error, PeerLost)
    other.call(1, [4.0])
    assert stayer.outcome() == other.outcome() == (1, None)
    assert other.result(1) == [6.0]


def test_a_verdict_is_about_the_op_in_whichever_epoch_it_runs(shrunk: LocalGroups) -> None:
    for group in shrunk.groups:
        assert group.fail(0, PeerMissing("too late", missing_ranks=[2]))
        assert not group.current.failure(0)
    assert shrunk.ranks[1].outcome()[0] == 0
    shrunk.ranks[2].call(0, [4.0])
    assert isinstance(shrunk.ranks[2].outcome()[1], PeerMissing), "it hears the same, late"


@pytest.mark.parametrize("epoch", [FIRST, 2])
def test_a_plan_that_is_not_newer_is_refused(epoch: int) -> None:
    with local_groups([[0]]) as local:
        group = local.groups[0]
        with pytest.raises(InvalidArgument, match=f"epoch {epoch} cannot follow epoch {FIRST}"):
            group.install(make_plan([[0]], epoch=epoch))
        assert list(group.epochs) == [FIRST]


def test_by_default_an_epoch_begins_behind_the_last_op_that_was_called() -> None:
    with local_groups([[0, 1]]) as local:
        local.ranks[0].call(0, [1.0])
        epoch = local.groups[0].install(make_plan([[0, 1]], epoch=SECOND))
        assert epoch.first_seq == 1
        assert local.groups[0].epoch_of(0).number == FIRST
        assert local.groups[0].epoch_of(1) is epoch


def test_an_op_whose_call_is_looked_at_while_an_epoch_is_installed_begins_in_that_one() -> None:
    """The epoch begins behind the last op that was called, and this one was not yet."""
    with local_groups([[0, 1]]) as local:
        first, second = local.ranks

        def place(region: Region, nbytes: int) -> torch.Tensor:
            if local.groups[0].current.number == FIRST:
                local.install([[0, 1]], {0: 1, 1: 0}, first_seq=None)
            return first.memory(region, nbytes)

        first.place = place  # type: ignore[method-assign]
        first.run(0, Kind.ALL_GATHER, [5.0], 1, 2)
        second.run(0, Kind.ALL_GATHER, [6.0], 1, 2)
        assert first.outcome() == second.outcome() == (0, None)
        assert list(first.result(0)) == list(second.result(0)) == [6.0, 5.0], "their new numbers"
        assert local.groups[0].outcomes.recent[-1].epoch == SECOND


def test_epochs_may_be_looked_through_while_another_one_is_installed() -> None:
    with local_groups([[0]]) as local:
        group = local.groups[0]
        looked_through = iter(group.epochs.values())
        group.install(make_plan([[0]], epoch=SECOND))
        assert [epoch.number for epoch in looked_through] == [FIRST]
        assert list(group.epochs) == [FIRST, SECOND]


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
    registry, group = Registry(), shrunk.groups[0]
    assert registry.open(group.epochs[FIRST].plan, lambda: group) is group
    assert registry.find("test", FIRST) is group
    with pytest.raises(RegisterNotFirstOperation, match=f"'test' opening {SECOND} is not open"):
        registry.find("test", SECOND)
    registry.remove(group)
    with pytest.raises(RegisterNotFirstOperation, match=f"'test' opening {FIRST} is closed here"):
        registry.find("test", FIRST)


class WatchedRegistry(Registry):
    """Notes when somebody looks for a group; the lock is free again when he waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = Event()

    def _opened_as(self, name: str, opening: int) -> Group | None:
        self.looked.set()
        return super()._opened_as(name, opening)


def test_whoever_waits_for_a_group_goes_on_as_soon_as_it_is_open() -> None:
    registry, found = WatchedRegistry(), SimpleQueue[Group | None]()
    with local_groups([[0]]) as local:
        waiting = Thread(
            target=lambda: found.put(registry.look_for("test", FIRST, 60.0)), daemon=True
        )
        waiting.start()
        assert registry.looked.wait(SECONDS)
        group = registry.open(make_plan([[0]]), lambda: local.groups[0])
        assert found.get(timeout=SECONDS) is group


def test_a_name_may_be_opened_anew_before_the_last_rank_has_left_the_old_group() -> None:
    with local_groups([[0]]) as old, local_groups([[0]]) as new:
        new.groups[0].opening = SECOND
        registry = Registry()
        registry.open(make_plan([[0]]), lambda: old.groups[0])
        assert registry.open(make_plan([[0]], epoch=SECOND), lambda: new.groups[0])
        assert registry.find("test", FIRST) is old.groups[0]
        assert registry.find("test", SECOND) is new.groups[0]
        registry.remove(old.groups[0])
        assert registry.all() == [new.groups[0]]
