"""Reports to the agreement of ops that ranks of several nodes have done in the short lane."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from allfold_agent.execution.op import RankEndpoint
from allfold_agent.groups.epoch import GroupEpoch, NodeResources
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.lane.handover import LaneHandover
from allfold_agent.groups.lane.keeper import LaneKeeper
from allfold_agent.groups.lane.kept_results import HeldResult, KeptResults
from allfold_agent.groups.lane.op_memory import Elements
from allfold_agent.groups.lane.page import Post
from allfold_agent.groups.lane.program import LaneProgram
from allfold_agent.groups.lane.short_lane import NodeLane
from allfold_agent.runtime.rank_arena import RankArena
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind
from allfold_core.survival.plans import first_epoch
from tests.node_agent.groups.lane_nodes import NodesOfALane
from tests.support.fakes.local_groups import local_groups


class Page:
    """A lane of several nodes, and of one rank here.

    Args:
        end: of the ops that are published.
        last: the last post; -1 for none.
        left: the posted ops that are neither done nor taken over.
    """

    sessions = ("rank",)
    exchange: object | None = object()

    def __init__(self, end: int, last: int, left: Sequence[int] = ()) -> None:
        self._end = end
        self._left = left
        self._last = last

    def end_of_complete(self) -> int:
        return self._end

    def incomplete(self) -> dict[int, dict[str, Post]]:
        return {seq: {} for seq in self._left}

    def last_posted(self) -> dict[str, int]:
        return {"rank": self._last} if self._last >= 0 else {}


class Passing:
    """A keeper and what it tells the agreement.

    Args:
        read: the last op whose message was read.
    """

    def __init__(self, read: int) -> None:
        self.told: list[int] = []
        machine = SimpleNamespace(dead={})
        agreement = SimpleNamespace(machine=machine, passed_by_ranks=self.told.append)
        calls = SimpleNamespace(submitted={"rank": read})
        group = SimpleNamespace(calls=calls, agreement=agreement)
        resources = SimpleNamespace(short_lane=True, lane_thread=None)
        self._keeper = LaneKeeper(cast(NodeGroup, group), cast(NodeResources, resources))

    def passed(self, page: Page) -> int:
        """Return the last op that the agreement takes for done."""
        self._keeper.lane = cast(NodeLane, page)
        self._keeper.pass_completed()
        return self.told[-1]


@pytest.mark.parametrize(
    ("end", "post", "read", "last"),
    [
        pytest.param(20, 19, 12, 19, id="all are done"),
        pytest.param(20, 15, 12, 15, id="opened in advance: nobody has called 16"),
        pytest.param(20, 3, 17, 17, id="messages since"),
        pytest.param(16, 19, 12, 15, id="one is not published"),
    ],
)
def test_ops_are_passed_up_to_the_first_that_may_not_be_done(
    end: int, post: int, read: int, last: int
) -> None:
    assert Passing(read).passed(Page(end, post)) == last


def test_ops_before_a_lane_that_was_opened_in_advance_are_not_passed_later_either() -> None:
    """The other nodes are lost before the ranks come to the first op of that lane."""
    passing = Passing(read=11)
    assert passing.passed(Page(20, -1)) == 11
    alone = Page(12, -1)
    alone.exchange = None
    assert passing.passed(alone) == 11


def test_an_op_that_was_posted_as_the_lane_was_closed_is_not_passed_before_it_is_taken_over() -> (
    None
):
    assert Passing(read=19).passed(Page(20, 15, left=[15, 21])) == 14
    assert Passing(read=19).passed(Page(20, 15, left=[21])) == 19


class Closing:
    """A lane that was opened in advance and is closed, and what the agreement hears of it."""

    def __init__(self, first: int) -> None:
        self.floors: list[int] = []
        machine = SimpleNamespace(ops={}, floor=-1, note_called=dict, hold=lambda *_, **__: None)
        agreement = SimpleNamespace(
            machine=machine, learn_floor=self.floors.append, passed_by_ranks=int
        )
        calls = SimpleNamespace(submitted={"rank": first - 3})
        group = SimpleNamespace(calls=calls, agreement=agreement, current=None)
        self._handover = LaneHandover(cast(NodeGroup, group), cast(NodeResources, None))
        self.results = KeptResults(["node1"])
        self.results.open(first)
        page = Page(first, -1)
        page.exchange = SimpleNamespace(results=self.results, take_held_part=lambda: None)
        self._lane = SimpleNamespace(
            since=first,
            sessions=page.sessions,
            exchange=page.exchange,
            end_of_complete=page.end_of_complete,
            incomplete=page.incomplete,
            last_posted=page.last_posted,
            take_over=list,
        )

    def close(self) -> int:
        """Return the op up to which all are said to be final on all nodes."""
        self._handover.take_all(cast(NodeLane, self._lane))
        return self.floors[-1]


def test_ops_that_nobody_here_has_called_are_not_final_as_others_have_come_to_the_lane() -> None:
    closing = Closing(first=20)
    closing.results.hear("node1", 20)
    assert closing.close() == -1, "here 18 and 19 are still to come"
    program = SimpleNamespace(is_in_parts=False)
    closing.results.add(20, HeldResult(cast(LaneProgram, program), cast(Elements, None), ()))
    closing.results.hear("node1", 21)
    assert closing.close() == 20


def lane_of_one_rank(nodes: NodesOfALane) -> NodeLane:
    epoch = SimpleNamespace(plan=nodes.plan, record=first_epoch(nodes.plan), ordinal=0)
    lane = NodeLane(cast(GroupEpoch, epoch), "node0")
    connection = cast(RankEndpoint, SimpleNamespace(send_outcome=None, send=None))
    lane.hand_to(lane.sessions[0], connection, RankArena(), 0)
    nodes.use(0, lane.page)
    return lane


BARRIER = Fingerprint(Kind.BARRIER, None, DType.UINT8, (0,), -1, AUTO)


def test_an_op_that_was_posted_just_before_the_lane_is_opened_again_is_still_taken_over() -> None:
    nodes = NodesOfALane(((0,), (1,)))
    lane = lane_of_one_rank(nodes)
    nodes.post(0, 5, BARRIER)
    lane.open(20)
    assert [call.message.seq for call in lane.take_over()] == [5]
    assert lane.take_over() == []


def test_several_misfits_of_one_opening_keep_the_lane_closed_no_longer_than_one() -> None:
    """Across nodes it stays open until they have agreed to close it, and more messages come."""
    with local_groups([[0]]) as local:
        (rank,) = local.ranks
        lane = rank.group.lanes.lane
        assert lane is not None
        lane.hand_to(rank.session, rank, RankArena(), 0)
        lane.open(0)
        for seq in range(5, 50):
            lane.note_misfit(seq)
        lane.close()
        assert not lane.may_open(12)
        assert lane.may_open(50)
        lane.open(50)
        lane.note_misfit(51)
        lane.close()
        assert not lane.may_open(51 + 8), "it is the second one, soon after the first"
        assert lane.may_open(51 + 16)
