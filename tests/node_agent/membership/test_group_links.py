"""Messages from groups to links, and from links to groups."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from time import monotonic
from typing import Any
from unittest.mock import create_autospec

import pytest

from allfold_agent.groups.epoch import GroupEpoch
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.neighbours import Neighbours
from allfold_agent.groups.registry import GroupRegistry
from allfold_agent.membership.group_links import GroupLinks
from allfold_agent.membership.group_terms import EarlyNotices
from allfold_agent.membership.links import PeerLinks
from allfold_control.survival import Closed, pack
from allfold_core.errors import PeerLost
from allfold_core.protocol.peer_link import Floor, GroupMessage, GroupProgress, LinkMessageType
from allfold_core.survival.plans import first_record
from allfold_core.survival.reports import Doubt, Reason
from allfold_core.survival.suspicion import Awaited, Observation
from tests.support.fakes.local_groups import LocalGroups, local_groups
from tests.support.fakes.local_rank import no_outcome
from tests.support.waiting import wait_until

OPENING = 3


@pytest.fixture
def local() -> Iterator[LocalGroups]:
    with local_groups([[0], [1]]) as local:
        yield local


class Links:
    """The links of the node of one group, which is open unless a test says otherwise."""

    def __init__(self, local: LocalGroups, *, is_open: bool = True, node: int = 0) -> None:
        self.registry = GroupRegistry()
        self.notices = EarlyNotices(self.registry)
        self.peers: Any = create_autospec(PeerLinks, instance=True)
        self.links = GroupLinks(f"node{node}", self.peers, self.registry, self.notices)
        self._group = local.groups[node]
        if is_open:
            self.open()

    def open(self) -> NodeGroup:
        group = self.registry.open(self._group.plan, lambda: self._group)
        assert group is not None
        self.notices.opened(group)
        return group


@pytest.fixture
def links(local: LocalGroups) -> Links:
    return Links(local)


def doubt(opening: int = OPENING) -> GroupMessage:
    """Another node says that an op cannot be done."""
    error = '{"code": "AF301", "message": "it is impossible", "details": {}}'
    body = pack(Doubt(0, Reason.FAILED, error=error))
    return GroupMessage(LinkMessageType.DOUBT, "test", opening, body)


def test_a_group_wants_links_to_all_other_nodes_until_it_is_over(links: Links) -> None:
    group = links.open()
    links.links.opened(group)
    links.peers.want.assert_called_once_with("node1", "node1", "life 1")
    links.peers.unwant.assert_not_called()
    links.links.over(group)
    links.peers.unwant.assert_called_once_with("node1", "life 1")


def test_a_message_reaches_its_group(local: LocalGroups, links: Links) -> None:
    local.ranks[0].call(0, [1.0])
    links.links.on_message("node1", doubt())
    assert str(local.ranks[0].outcome()[1]).startswith("[AF301 PeerLost] it is impossible")


def test_a_message_for_a_group_whose_plan_is_on_its_way_waits_for_it(local: LocalGroups) -> None:
    links = Links(local, is_open=False)
    local.ranks[0].call(0, [1.0])
    links.links.on_message("node1", doubt())
    assert no_outcome(local.ranks[0], 0.02)
    links.open()
    assert isinstance(local.ranks[0].outcome()[1], PeerLost)


def test_a_message_of_another_opening_of_the_name_is_not_for_this_group(
    local: LocalGroups, links: Links
) -> None:
    local.ranks[0].call(0, [1.0])
    links.links.on_message("node1", doubt(OPENING + 1))
    assert no_outcome(local.ranks[0], 0.02)


def test_nonsense_is_logged_and_changes_nothing(
    local: LocalGroups, links: Links, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in LinkMessageType:
        if LinkMessageType.FREEZE <= kind < LinkMessageType.CLOSED:
            with caplog.at_level(logging.WARNING):
                links.links.on_message("node1", GroupMessage(kind, "test", OPENING, {"x": 1}))
    assert "group 'test': node node1 sends nonsense" in caplog.text
    local.call_all(0, [[1.0], [2.0]])
    assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2


def test_a_node_that_is_left_out_needs_no_link_and_is_told_nothing(
    local: LocalGroups, links: Links
) -> None:
    group = links.open()
    links.links.opened(group)
    links.links.left_out(group, {"node1"})
    links.links.over(group)
    links.peers.unwant.assert_called_once_with("node1", "life 1")
    local.lose_node(1)
    wait_until(lambda: group.agreement.term.voters == ("node0",), "the term is there")
    assert links.links.progress("node1") == []


def test_pings_carry_how_far_the_groups_are_that_two_nodes_share(
    local: LocalGroups, links: Links
) -> None:
    links.links.on_progress("node1", [GroupProgress("unknown", 9, 5, -1, 0)])
    local.call_all(0, [[1.0], [2.0]])
    assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2
    assert links.links.progress("node1") == [GroupProgress("test", OPENING, 0, -1, 0)]
    assert links.links.progress("a node of another group") == []
    group = local.groups[0]
    links.links.on_progress("node1", [GroupProgress("test", OPENING, 0, -1, 0)])
    assert group.results.nbytes == 0
    assert links.links.floors("node1") == [Floor("test", OPENING, 0)]
    links.links.on_floors("node1", [Floor("test", OPENING, 0), Floor("unknown", 9, 5)])


def test_a_call_that_differs_from_what_the_ping_of_another_node_says_is_judged(
    local: LocalGroups, links: Links
) -> None:
    """An op of which this node gets no frames: no other way would tell before the deadline."""
    local.ranks[0].call(0, [1.0])
    links.links.on_progress("node1", [GroupProgress("test", OPENING, -1, 0, 12345)])
    assert local.rounds == 1


def test_a_node_was_heard_when_the_latest_byte_came_on_an_edge_of_any_group(
    local: LocalGroups, links: Links
) -> None:
    assert links.links.last_heard("node1") == links.links.last_heard("stranger") == float("-inf")
    local.call_all(0, [[1.0], [2.0]])
    assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2
    edges = local.groups[0].edges

    def is_that_of_its_edges() -> bool:  # on which acknowledgements may still come
        return links.links.last_heard("node1") == edges.last_heard("node1") > float("-inf")

    wait_until(is_that_of_its_edges, "what came on its edges counts")


def test_a_node_is_missing_when_it_refuses_connections_or_is_silent_everywhere(
    local: LocalGroups, links: Links
) -> None:
    group = local.groups[0]
    now, long_ago = monotonic(), monotonic() - 60.0

    def missing(**seen: Any) -> dict[str, str]:
        links.peers.observe.return_value = Observation(own_lag=30.0, **seen)
        return dict(links.links.missing(group))

    assert missing(last_heard=now) == {}
    assert missing(last_heard=now, refused=True) == {"node1": "refuses connections"}
    assert missing(last_heard=long_ago, unanswered=9) == {"node1": "is silent"}
    assert missing(last_heard=now, unanswered=9) == {}, "its answers are only slow"
    links.peers.observe.return_value = None
    assert links.links.missing(group) == {}
    local.call_all(0, [[1.0], [2.0]])
    assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2
    assert missing(last_heard=long_ago, unanswered=9) == {}, "it was heard on an edge just now"


def test_the_leader_waits_for_reports_and_the_others_for_its_decision() -> None:
    with local_groups([[0], [1], [2]]) as local:
        leader, follower = Links(local), Links(local, node=1)
        assert leader.links.awaited() == follower.links.awaited() == []
        local.links.hold(LinkMessageType.FROZEN)
        local.ranks[1].call(0, [1.0])
        local.groups[1].runs.doubt([Doubt(0, Reason.DEADLINE)])
        frozen = [group.agreement.machine for group in local.groups]
        wait_until(lambda: all(each.frozen for each in frozen), "the reports are on their way")
        assert leader.links.awaited() == [
            Awaited("test", OPENING, OPENING, 1, "node1"),
            Awaited("test", OPENING, OPENING, 1, "node2"),
        ]
        assert follower.links.awaited() == [Awaited("test", OPENING, OPENING, 1, "node0")]
        assert leader.links.floors("node1")[0].waits_for == ("node1", "node2")
        assert follower.links.floors("node0")[0].waits_for == ()
        local.links.release()
        wait_until(lambda: not any(each.frozen for each in frozen), "the decision")
        assert leader.links.awaited() == follower.links.awaited() == []
        frozen[0].frozen = True  # of what this node itself is late with it can suspect nobody
        assert leader.links.awaited() == []
        frozen[0].frozen = False


def test_a_new_life_of_a_node_is_not_waited_for_in_a_group_of_its_earlier_one() -> None:
    with local_groups([[0], [1], [2]]) as local:
        leader, machine = Links(local), local.groups[0].agreement.machine
        earlier = ("node1", local.groups[0].members["node1"].incarnation)
        leader.peers.is_with.side_effect = lambda node, incarnation: (node, incarnation) != earlier
        local.links.hold(LinkMessageType.FROZEN)
        local.ranks[1].call(0, [1.0])
        local.groups[1].runs.doubt([Doubt(0, Reason.DEADLINE)])
        wait_until(lambda: machine.frozen and leader.links.awaited(), "the round has begun")
        assert [each.node for each in leader.links.awaited()] == ["node2"]
        assert leader.links.floors("node1")[0].waits_for == ("node1", "node2")


@pytest.mark.parametrize("node", [0, 1], ids=["leader", "follower"])
def test_a_node_without_which_a_group_goes_on_waits_for_nobody_in_it(node: int) -> None:
    with local_groups([[0], [1], [2]]) as local:
        links, machine = Links(local, node=node).links, local.groups[node].agreement.machine
        local.links.hold(LinkMessageType.FROZEN)
        local.ranks[1].call(0, [1.0])
        local.groups[1].runs.doubt([Doubt(0, Reason.DEADLINE)])
        wait_until(lambda: machine.frozen and links.awaited(), "the round has begun")
        machine.out = True
        assert links.awaited() == []
        machine.out = False
        assert links.awaited() != []
        local.groups[node].evict(PeerLost("it is over"))
        assert links.awaited() == []


# Groups that are over on one node


def closed(*, all_left: bool = False) -> GroupMessage:
    body = pack(Closed(all_left))
    return GroupMessage(LinkMessageType.CLOSED, "test", OPENING, body)


def test_a_message_for_a_group_that_all_ranks_have_left_is_answered(
    local: LocalGroups, links: Links
) -> None:
    for rank in local.ranks:
        rank.end("left the group")
    wait_until(lambda: sorted(local.notes.over) == ["node0", "node1"], "it is decided")
    links.registry.remove(links.open())
    links.links.on_message("node1", doubt())
    links.peers.send.assert_called_once_with("node1", closed(all_left=True).pack())


def test_the_log_tells_ranks_that_left_in_order_from_those_that_were_lost(
    local: LocalGroups, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "allfold_agent.groups.events")
    first, *others = local.ranks
    first.end("ended with an exception (ValueError: no)")
    wait_until(lambda: len(caplog.messages) == len(local.groups), "it is lost")
    for record in caplog.records:
        assert record.levelname == "WARNING"
        assert "has lost rank " in record.getMessage()
        assert "ended with an exception (ValueError: no)" in record.getMessage()
    caplog.clear()
    for rank in others:
        rank.end("left the group")
    wait_until(lambda: sorted(local.notes.over) == ["node0", "node1"], "all have left")
    assert caplog.records
    for record in caplog.records:
        assert record.levelname == "INFO"
        assert "left in order; " in record.getMessage()
        assert "lost" not in record.getMessage()


def test_a_rank_that_is_to_join_hears_that_all_others_have_left(local: LocalGroups) -> None:
    group, told = local.groups[1], list[GroupEpoch | None]()
    neighbours: Any = create_autospec(Neighbours, instance=True)
    newcomer = NodeGroup(group.plan, group._resources, neighbours, first_record(group.plan))
    newcomer.begin()
    newcomer.join("a", told.append)
    newcomer.receive("node0", closed())  # it may be left out, and the others may go on
    assert told == []
    neighbours.group_over.assert_not_called()
    newcomer.receive("node0", closed(all_left=True))
    assert told == [None]
    neighbours.group_over.assert_called_once_with(newcomer)
    neighbours.send.assert_called_with("node0", closed(all_left=True))
    newcomer.join("b", told.append)
    assert told == [None, None]


def test_a_node_without_ranks_stays_in_a_group_that_another_one_was_left_out_of(
    local: LocalGroups,
) -> None:
    """A rank may be about to join here, and the others wait for what this node reports."""
    local.lose(1)
    local.groups[1].receive("node0", closed())
    assert local.notes.over == []
    assert not local.groups[1].has_no_ranks


def test_a_rank_that_joins_where_the_last_one_has_left_hears_that_all_others_have(
    local: LocalGroups,
) -> None:
    group, told = local.groups[1], list[GroupEpoch | None]()
    local.lose(1)
    group.join("a", told.append)
    group.receive("node0", closed(all_left=True))
    assert (told, group.has_no_ranks) == ([None], True)
    assert local.notes.over == ["node1"]


def test_a_node_with_a_rank_in_the_group_is_left_out_of_what_others_have_left(
    local: LocalGroups,
) -> None:
    """It is the orchestrator that says so; the rank then hears why."""
    local.groups[1].receive("node0", closed(all_left=True))
    assert local.notes.over == []
    assert not local.groups[1].has_no_ranks


def test_a_message_for_a_group_that_is_over_is_answered(links: Links) -> None:
    links.registry.remove(links.open())
    links.links.on_message("node1", doubt())
    links.peers.send.assert_called_once_with("node1", closed().pack())


def test_that_a_group_is_over_elsewhere_is_not_answered(links: Links) -> None:
    """Otherwise two nodes would answer each other without end."""
    links.registry.remove(links.open())
    links.links.on_message("node1", closed())
    links.peers.send.assert_not_called()


def test_a_node_that_has_missed_the_last_decision_closes_the_group_like_the_others(
    local: LocalGroups,
) -> None:
    local.links.hold(LinkMessageType.INSTALL)
    for rank in local.ranks:
        rank.end("left the group")
    wait_until(lambda: local.notes.over == ["node0"], "the leader has decided")
    local.links.drop()
    Links(local, node=1).links.on_message("node0", closed(all_left=True))
    assert local.notes.over == ["node0", "node1"]


def test_ranks_that_are_left_in_a_group_go_on_although_another_node_has_closed_it(
    local: LocalGroups, links: Links
) -> None:
    """The node that closed it is left out of the group; the orchestrator tells the others."""
    local.ranks[0].call(0, [1.0])
    links.links.on_message("node1", closed())
    assert no_outcome(local.ranks[0], 0.02)
    local.lose_node(1)
    assert isinstance(local.ranks[0].outcome()[1], PeerLost)
