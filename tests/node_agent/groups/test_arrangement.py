"""The nodes of a group stand in another order: ops go on, and ranks notice nothing."""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
import pytest

from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.survival.records import Stamp
from allfold_core.topology import AS_OPENED, Layout, SlowLink
from tests.support.fakes.local_groups import LocalGroups, local_groups, make_plan
from tests.support.waiting import wait_until

THREE = [[0, 1], [2], [3]]
SLOW = (SlowLink("node1", "node2", 1e-7),)
TURNED = Layout(("node1", "node0", "node2"), ("node1", "node0", "node2"), 1e-8, SLOW, "a link")


def arrange(local: LocalGroups, layout: Layout) -> None:
    leader = local.groups[0]
    leader.event(partial(leader.agreement.arrange, layout))


def await_layout(local: LocalGroups, layout: Layout) -> None:
    wait_until(
        lambda: all(each.current.record.layout == layout for each in local.groups),
        "every node has the layout",
    )


def outcomes(local: LocalGroups) -> list[tuple[int, Exception | None]]:
    return [rank.outcome() for rank in local.ranks]


@pytest.mark.parametrize("on_loss", ["raise", "shrink"])
def test_ranks_call_on_with_their_view_when_nodes_stand_in_another_order(
    on_loss: Literal["raise", "shrink"],
) -> None:
    with local_groups(THREE, plan=make_plan(THREE, on_loss=on_loss)) as local:
        for seq, layout in enumerate([AS_OPENED, TURNED, AS_OPENED]):
            arrange(local, layout)
            await_layout(local, layout)
            local.call_all(seq, [[1.0 + rank.rank] * 4096 for rank in local.ranks], strategy="ring")
            assert outcomes(local) == [(seq, None)] * 4
            for rank in local.ranks:
                assert np.all(rank.result(seq) == 10.0)
                assert (rank.told[seq].epoch, rank.told[seq].participants) == (0, 4)
        assert [list(group.epochs) for group in local.groups] == [[0]] * 3
        assert local.rounds == 3


def test_a_tensor_goes_round_in_the_new_order() -> None:
    with local_groups(THREE) as local:
        arrange(local, TURNED)
        await_layout(local, TURNED)
        sent = set(_used(local, seq=0))
        assert sent == {("node1", "node0"), ("node0", "node2"), ("node2", "node1")}


def _used(local: LocalGroups, seq: int) -> list[tuple[str, str]]:
    local.call_all(seq, [[1.0] * 4096 for _ in local.ranks], strategy="ring")
    assert outcomes(local) == [(seq, None)] * 4
    return [
        (group.node, peer)
        for group in local.groups
        for direction, peer, counters in group.edges.counters()
        if direction == "out" and counters.payload_bytes
    ]


def test_an_op_that_has_begun_ends_in_the_order_in_which_it_began() -> None:
    with local_groups(THREE) as local:
        for rank in local.ranks[:3]:  # the last node has yet to call
            rank.call(0, [1.0], strategy="ring")
        first = local.groups[0].current.stamp
        arrange(local, TURNED)
        await_layout(local, TURNED)
        assert local.groups[0].table.in_flight[0].stamp == first
        for rank in local.ranks[:3]:
            rank.call(1, [2.0], strategy="ring")
        for seq in (0, 1):
            local.ranks[3].call(seq, [1.0 + seq], strategy="ring")
        for rank in local.ranks:
            assert sorted([rank.outcome(), rank.outcome()]) == [(0, None), (1, None)]
            assert (rank.result(0), rank.result(1)) == ([4.0], [8.0])
        assert local.rounds == 1


def test_calls_on_both_sides_of_the_change_are_one_op_which_is_run_by_the_new_strategy() -> None:
    values = [1.0] * 65536
    with local_groups(THREE) as local:
        before = local.groups[0].current.explain("all_reduce", 4 * len(values))
        local.ranks[0].call(0, values, strategy="auto")
        arrange(local, TURNED)
        await_layout(local, TURNED)
        after = local.groups[0].current.explain("all_reduce", 4 * len(values))
        assert before != after
        for rank in local.ranks[1:]:
            rank.call(0, values, strategy="auto")
        assert outcomes(local) == [(0, None)] * 4
        assert np.all(local.ranks[0].result(0) == 4.0)
        assert {group.outcomes.recent[-1].strategy for group in local.groups} == {after}
        assert local.rounds == 1


def test_the_order_is_kept_when_a_rank_is_lost() -> None:
    with local_groups(THREE, plan=make_plan(THREE, on_loss="shrink")) as local:
        arrange(local, TURNED)
        await_layout(local, TURNED)
        local.lose(1)
        for group in local.groups:
            assert group.current.ordinal == 1
            assert [each.node for each in group.current.plan.members] == list(TURNED.ring)
        for rank in (local.ranks[0], *local.ranks[2:]):
            rank.call(0, [1.0])
            assert rank.view in (0, 1)
        for rank in (local.ranks[0], *local.ranks[2:]):
            assert rank.outcome() == (0, None)
            assert rank.result(0) == [3.0]


def test_a_node_that_misses_the_decision_gets_it_with_the_next_one() -> None:
    with local_groups(THREE) as local:
        local.links.hold(LinkMessageType.INSTALL)
        arrange(local, TURNED)
        wait_until(lambda: local.groups[0].current.record.layout == TURNED, "it is decided")
        local.links.drop()
        assert local.groups[1].current.stamp == Stamp(3, 0, 0)
        local.links.mend("node1")
        local.links.mend("node2")
        await_layout(local, TURNED)
        local.call_all(0, [[1.0]] * 4)
        assert outcomes(local) == [(0, None)] * 4
