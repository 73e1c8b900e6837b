"""What the agreement is told of the ops that ranks of several nodes have done in the short lane."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from allfold_agent.edges.members import Members
from allfold_agent.execution.op import RankEndpoint
from allfold_agent.groups.epoch import Epoch, NodeResources
from allfold_agent.groups.lane_keeper import LaneGroup, LaneKeeper
from allfold_agent.groups.lane_page import Post
from allfold_agent.groups.short_lane import ShortLane
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind
from allfold_core.short_lane.page import PostHeader
from allfold_core.survival.plans import first_epoch, first_term
from tests.node_agent.groups.lane_nodes import NodesOfALane
from tests.support.fakes.local_groups import make_plan


class Page:
    """A lane of several nodes, of whose one rank each look sees the next post.

    Args:
        end: of the ops that are published.
        looks: the last post and the last message before it, look by look.
        left: the posted ops that are neither done nor taken over.
    """

    sessions = ("rank",)
    exchange: object | None = object()

    def __init__(
        self, end: int, looks: Sequence[tuple[int, int]], left: Sequence[int] = ()
    ) -> None:
        self._end = end
        self._left = left
        self._looks = list(looks)

    def end_of_complete(self) -> int:
        return self._end

    def incomplete(self) -> dict[int, dict[str, Post]]:
        return {seq: {} for seq in self._left}

    def last_posts(self) -> dict[str, Post]:
        seq, message = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        return {"rank": Post(seq, seq % 8, PostHeader(1, 0.0, 1.0, 0, 1, message, seq))}

    def last_posted(self) -> dict[str, int]:
        return {session: post.seq for session, post in self.last_posts().items()}

    def last_messages(self) -> dict[str, int]:
        return {s: post.header.last_message for s, post in self.last_posts().items()}


class Passing:
    """A keeper and what it tells the agreement.

    Args:
        read: the last op whose message was read.
    """

    def __init__(self, read: int) -> None:
        self.told: list[int] = []
        machine = SimpleNamespace(dead={})
        agreement = SimpleNamespace(machine=machine, passed_by_ranks=self.told.append)
        group: Any = SimpleNamespace(submitted={"rank": read}, agreement=agreement)
        resources = SimpleNamespace(short_lane=True, lane_thread=None)
        plan = make_plan([(0,), (1,)])
        self._keeper = LaneKeeper(
            cast(LaneGroup, group),
            plan,
            Members(plan.members, first_term(plan)),
            cast(NodeResources, resources),
        )

    def passed(self, page: Page) -> int:
        """Return the last op that the agreement takes for done."""
        self._keeper.lane = cast(ShortLane, page)
        self._keeper.pass_completed()
        return self.told[-1]


@pytest.mark.parametrize(
    ("end", "post", "message", "read", "last"),
    [
        (20, 19, 12, 12, 19),
        (20, 19, 12, 11, 11),  # op 12 may not have been heard of
        (20, 15, 12, 12, 15),  # nobody has called 16: the lane was opened in advance
        (20, 3, -1, 17, 17),
        (16, 19, 12, 12, 15),
    ],
    ids=[
        "all are done",
        "a message is unread",
        "opened in advance",
        "messages since",
        "posted only",
    ],
)
def test_ops_are_passed_up_to_the_first_that_may_not_be_done(
    end: int, post: int, message: int, read: int, last: int
) -> None:
    assert Passing(read).passed(Page(end, [(post, message)])) == last


def test_messages_that_were_sent_while_the_page_is_looked_at_are_not_passed_over() -> None:
    """The lane is open from op 20 on; meanwhile the rank sends 12 to 19, and posts 20."""
    assert Passing(read=11).passed(Page(20, [(11, 3), (20, 19)])) == 11


def test_ops_before_a_lane_that_was_opened_in_advance_are_not_passed_later_either() -> None:
    """The other nodes are lost before the ranks come to the first op of that lane."""
    passing = Passing(read=11)
    assert passing.passed(Page(20, [(-1, -1)])) == 11
    alone = Page(12, [(-1, -1)])
    alone.exchange = None
    assert passing.passed(alone) == 11


def test_an_op_that_was_posted_as_the_lane_was_closed_is_not_passed_before_it_is_taken_over() -> (
    None
):
    assert Passing(read=19).passed(Page(20, [(15, 14)], left=[15, 21])) == 14
    assert Passing(read=19).passed(Page(20, [(15, 14)], left=[21])) == 19


def lane_of_one_rank(nodes: NodesOfALane) -> ShortLane:
    epoch = SimpleNamespace(plan=nodes.plan, record=first_epoch(nodes.plan), ordinal=0)
    lane = ShortLane(cast(Epoch, epoch), "node0")
    lane.hand_to(lane.sessions[0], cast(RankEndpoint, None), 0)
    nodes.use(0, lane.page)
    return lane


BARRIER = Fingerprint(Kind.BARRIER, None, DType.UINT8, (0,), -1, AUTO)


def test_an_op_that_was_posted_just_before_the_lane_is_opened_again_is_still_taken_over() -> None:
    nodes = NodesOfALane(((0,), (1,)))
    lane = lane_of_one_rank(nodes)
    nodes.post(0, 5, BARRIER)
    lane.open(20)
    assert [call.message.seq for call in lane.take_over({})] == [5]
    assert lane.take_over({}) == []


def test_a_post_is_taken_over_after_the_messages_that_its_rank_had_sent_before() -> None:
    """The agent may see it first; but the ops have one order on the edges between the nodes."""
    nodes = NodesOfALane(((0,), (1,)))
    lane = lane_of_one_rank(nodes)
    (session,) = lane.sessions
    nodes.post(0, 5, BARRIER, last_message=4)
    assert lane.take_over({session: 3}) == []
    assert lane.awaits_messages
    assert lane.has_unfinished_before(6)
    assert [call.message.seq for call in lane.take_over({session: 4})] == [5]
    assert not lane.awaits_messages
