"""A node keeps a bounded amount of results for other nodes, and the bound deadlocks nobody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pytest

from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.results import LEAST_BYTES, ResultShares
from tests.support.fakes.local_groups import LocalGroups, local_groups
from tests.support.fakes.local_rank import LocalRank
from tests.support.waiting import wait_until

NUMEL = 1000
RESULT = 4 * NUMEL
OPS = 20


def bounds(limit: int) -> dict[str, ResultShares]:
    return {node: ResultShares(limit) for node in ("node0", "node1")}


@contextmanager
def two_nodes(retentions: Mapping[str, ResultShares]) -> Iterator[LocalGroups]:
    with local_groups([[0], [1]], retentions=retentions) as local:
        yield local


def call(rank: LocalRank, seq: int) -> None:
    rank.call(seq, np.full(NUMEL, 1.0 + rank.rank))


def finish(rank: LocalRank, ops: int = OPS) -> None:
    """Take the outcomes of ops, which are all right."""
    assert dict(rank.outcome() for _ in range(ops)) == dict.fromkeys(range(ops))
    assert all((rank.result(seq) == 3.0).all() for seq in range(ops))


def under_way(group: NodeGroup) -> list[int]:
    with group.table.lock:
        return [op.seq for op in group.table.in_flight.values() if op.running and not op.ended]


def keeps(group: NodeGroup, ops: int) -> bool:
    return group.results.nbytes == ops * RESULT


def test_a_group_within_its_share_begins_whatever_is_called() -> None:
    with two_nodes(bounds(RESULT)) as local:
        first, second = local.ranks
        for seq in range(OPS):
            call(first, seq)
        assert under_way(local.groups[0]) == [*range(OPS)]
        for seq in range(OPS):
            call(second, seq)
        for rank in local.ranks:
            finish(rank)


def test_a_group_above_its_share_begins_its_oldest_op_alone() -> None:
    with two_nodes(bounds(RESULT - 1)) as local:
        first, second = local.ranks
        group = local.groups[0]
        local.call_all(0, [np.ones(NUMEL)] * 2)
        assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2
        wait_until(lambda: keeps(group, 1), "the result is kept")
        for seq in range(1, 4):
            call(first, seq)
        assert under_way(group) == [1]
        call(second, 1)
        assert first.outcome() == (1, None)
        wait_until(lambda: under_way(group) == [2], "the next one is begun when that is done")
        for seq in (2, 3):
            call(second, seq)
        assert [first.outcome(), first.outcome()] == [(2, None), (3, None)]


def test_what_all_nodes_have_makes_room_for_the_ops_that_wait() -> None:
    with two_nodes(bounds(RESULT - 1)) as local:
        local.call_all(0, [np.ones(NUMEL)] * 2)
        assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2
        for seq in range(1, 4):
            call(local.ranks[0], seq)
        assert under_way(local.groups[0]) == [1]
        local.links.ping()
        assert local.groups[0].results.nbytes == 0
        assert under_way(local.groups[0]) == [1, 2, 3]


def test_two_groups_with_crossed_calls_finish_although_neither_may_keep_a_result() -> None:
    """One rank calls in one group first, the other one in the other; nobody waits in between."""
    retentions = bounds(RESULT)
    with two_nodes(retentions) as one, two_nodes(retentions) as other:
        assert retentions["node0"].share == RESULT // 2
        for seq in range(OPS):
            call(one.ranks[0], seq)
            call(other.ranks[1], seq)
        for seq in range(OPS):
            call(other.ranks[0], seq)
            call(one.ranks[1], seq)
        for rank in (*one.ranks, *other.ranks):
            finish(rank)


def test_ops_that_wait_for_room_are_redone_like_others_when_a_rank_is_lost() -> None:
    bound = {f"node{node}": ResultShares(0) for node in range(3)}
    with local_groups([[0], [1], [2]], retentions=bound) as local:
        survivors = local.ranks[:2]
        local.call_all(0, [np.ones(NUMEL)] * 3)
        assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 3
        for seq in range(1, 9):
            for rank in survivors:
                call(rank, seq)
        local.lose(2)
        for rank in survivors:
            assert [rank.outcome()[0] for _ in range(8)] == [*range(1, 9)]
        for rank in survivors:
            call(rank, 9)
        for rank in survivors:
            assert rank.outcome() == (9, None)


def test_groups_that_are_over_leave_their_share_to_the_others() -> None:
    retentions = bounds(100)
    with two_nodes(retentions):
        with two_nodes(retentions):
            assert retentions["node0"].share == 50
        assert retentions["node0"].share == 100


@pytest.mark.parametrize("largest", [0, 1, LEAST_BYTES // 2, LEAST_BYTES])
def test_by_default_the_two_largest_results_have_room(largest: int) -> None:
    retention = ResultShares()
    for nbytes in (1, largest, 2):
        retention.make_room(nbytes)
    assert retention.limit == max(LEAST_BYTES, 2 * largest)
    given = ResultShares(7)
    given.make_room(largest)
    assert given.limit == 7
