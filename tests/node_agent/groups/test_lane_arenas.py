"""The inputs and results of long ops of the short lane in the arenas of the local ranks."""

from __future__ import annotations

import fcntl
import os
from types import SimpleNamespace
from typing import cast

import pytest

from allfold_agent.execution.op import RankEndpoint
from allfold_agent.groups.epoch import GroupEpoch, NodeResources
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.lane.exchange import LaneExchange
from allfold_agent.groups.lane.keeper import LaneKeeper
from allfold_agent.groups.lane.kept_results import KeptResults
from allfold_agent.groups.lane.short_lane import NodeLane
from allfold_agent.runtime.rank_arena import RankArena
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.pricing.lane import LONGEST_BYTES
from allfold_core.protocol.rank_messages import Region
from allfold_core.short_lane.page import SLOT_BYTES, PageLayout
from allfold_core.survival.plans import first_epoch
from tests.node_agent.groups.lane_exchanges import HandThread
from tests.node_agent.groups.lane_nodes import NodesOfALane, Placement

ARENA = Region(3, 128)


def arena_of_one_segment() -> RankArena:
    """An arena of 4096 bytes."""
    arena = RankArena()
    add_segment(arena, ARENA.segment)
    return arena


def add_segment(arena: RankArena, number: int) -> None:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    arena.add(number, 4096, descriptor)
    os.close(descriptor)


class OneRank:
    """The lane of a node, and the connection of its rank."""

    def __init__(self, placement: Placement = ((0,), (1,))) -> None:
        self.nodes = NodesOfALane(placement)
        record = first_epoch(self.nodes.plan)
        epoch = SimpleNamespace(plan=self.nodes.plan, record=record, ordinal=0)
        exchange = SimpleNamespace(open=lambda _: None, results=KeptResults([]))
        make = (lambda *_: cast(LaneExchange, exchange)) if len(placement) > 1 else None
        self.lane = NodeLane(cast(GroupEpoch, epoch), "node0", make)
        self.arena = arena_of_one_segment()
        connection = cast(RankEndpoint, SimpleNamespace(send_outcome=None, send=None))
        self.lane.hand_to(self.lane.sessions[0], connection, self.arena, 0)
        self.nodes.use(0, self.lane.page)


@pytest.fixture
def one() -> OneRank:
    return OneRank()


def test_an_input_is_where_its_rank_says_and_in_the_file_of_that_segment(one: OneRank) -> None:
    found = one.lane.rank_input(0, ARENA, 50)
    assert found is not None
    found.memory[7] = 99
    assert one.arena.memory(ARENA, 50)[7] == 99
    assert len(found.memory) == 50
    assert (found.file, found.place) == (one.arena.file(ARENA.segment), 128)


@pytest.mark.parametrize("region", [Region(4, 0), Region(3, 4090)], ids=["segment", "end"])
def test_an_input_of_which_the_arena_is_not_known_yet_is_none(one: OneRank, region: Region) -> None:
    assert one.lane.rank_input(0, region, 50) is None


def test_who_brings_nothing_needs_no_arena(one: OneRank) -> None:
    found = one.lane.rank_input(0, Region(4, 0), 0)
    assert found is not None
    assert not found.memory


def test_the_page_of_several_nodes_has_places_for_the_longest_op_and_that_of_one_has_none() -> None:
    assert OneRank().lane.page.layout == PageLayout(1, place_bytes=LONGEST_BYTES)
    assert OneRank(((0, 1),)).lane.page.layout == PageLayout(2)


def summing(numel: int) -> Fingerprint:
    return Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.FLOAT32, (numel,), -1, AUTO)


def test_a_long_op_that_is_taken_over_has_its_input_and_its_result_in_the_arena(
    one: OneRank,
) -> None:
    one.nodes.post(0, 5, summing(SLOT_BYTES // 4 + 1), source=ARENA)
    one.nodes.post(0, 6, summing(SLOT_BYTES // 4), bytes(SLOT_BYTES))
    one.lane.open(20)
    long, short = one.lane.take_over()
    assert (long.message.seq, short.message.seq) == (5, 6)
    assert (long.message.source, long.message.target) == (ARENA, ARENA)
    long.endpoint.memory(ARENA, 50)[7] = 42
    assert one.arena.memory(ARENA, 50)[7] == 42, "also once its connection has ended"
    layout = one.lane.page.layout
    assert short.message.source == Region(0, layout.input_offset(0, 6))
    assert short.message.target == Region(0, layout.output_offset(0, 6))


def test_a_post_whose_segment_is_not_known_yet_is_taken_over_later_and_those_behind_it_too(
    one: OneRank,
) -> None:
    new = Region(ARENA.segment + 1, 0)
    one.nodes.post(0, 5, summing(SLOT_BYTES // 4 + 1), source=new)
    one.nodes.post(0, 6, summing(SLOT_BYTES // 4), bytes(SLOT_BYTES))
    one.lane.open(20)
    assert one.lane.take_over() == []
    assert one.lane.has_unfinished_before(6)
    add_segment(one.arena, new.segment)
    assert [each.message.seq for each in one.lane.take_over()] == [5, 6]
    assert one.lane.take_over() == []


def test_the_lane_looks_again_for_an_input_once_an_arena_has_grown() -> None:
    thread = HandThread()
    resources = SimpleNamespace(short_lane=True, lane_thread=thread)
    group = SimpleNamespace(event=lambda _: None)
    keeper = LaneKeeper(cast(NodeGroup, group), cast(NodeResources, resources))
    keeper.arena_grew()
    assert not thread.tasks, "there is no lane"
    keeper.lane = OneRank(((0, 1),)).lane
    keeper.arena_grew()
    assert not thread.tasks, "no agent looks at posts of one node"
    keeper.lane = OneRank().lane
    keeper.arena_grew()
    assert len(thread.tasks) == 1
    thread.run()
