"""Ops of the short lane that are longer than a slot: inputs in arenas, results in places."""

from __future__ import annotations

import pytest

from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from tests.node_agent.groups.lane_exchanges import (
    FIRST,
    STAMP,
    Exchanges,
    floats,
    frame,
    in_trouble,
    summing,
    total,
)
from tests.node_agent.groups.lane_nodes import NodesOfALane, Placement

NUMEL = 100
LONGEST = 64  # bytes of a frame
SLOT_BYTES = 64
LONG = summing(NUMEL)
MEAN = summing(NUMEL, ReduceOp.MEAN)
BROADCAST = Fingerprint(Kind.BROADCAST, None, DType.FLOAT32, (NUMEL,), 1, AUTO)


@pytest.fixture(autouse=True)
def short_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allfold_agent.groups.lane.program.LONGEST_PAYLOAD", LONGEST)


def exchanges(placement: Placement, strategy: str = "direct") -> Exchanges:
    return Exchanges(NodesOfALane(placement, SLOT_BYTES, 4 * NUMEL, strategy))


@pytest.fixture
def two() -> Exchanges:
    return exchanges(((0,), (1,)))


@pytest.fixture
def spread() -> Exchanges:
    return exchanges(((0,), (1,)), "direct2")


@pytest.fixture(params=["direct", "direct2"])
def either(request: pytest.FixtureRequest) -> Exchanges:
    return exchanges(((0,), (1,)), request.param)


@pytest.fixture(params=[((0,), (1,)), ((0, 1), (2,), (3,))], ids=["2x1", "2+1+1"])
def placement(request: pytest.FixtureRequest) -> Placement:
    found: Placement = request.param
    return found


@pytest.mark.parametrize("strategy", ["direct", "direct2"])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_rank_finds_the_results_of_one_long_op_after_the_other(
    placement: Placement, strategy: str, in_place: bool
) -> None:
    group = exchanges(placement, strategy)
    group.come_in_place = in_place
    group.open()
    for seq in range(FIRST, FIRST + 20):
        group.post_all(seq, LONG)
        group.run()
        assert all(group.published(seq))
        for rank in range(group.nodes.plan.world_size):
            assert group.sum_in_place(rank, seq, LONG) == [total(group, seq)] * NUMEL
        group.finish_all(seq + 1)
    assert not any(group.troubles)


@pytest.mark.parametrize("in_place", [False, True])
def test_all_ranks_but_the_root_find_what_it_has_sent(placement: Placement, in_place: bool) -> None:
    group = exchanges(placement)
    group.come_in_place = in_place
    group.open()
    group.post_all(FIRST, BROADCAST)
    group.run()
    for rank in range(group.nodes.plan.world_size):
        if rank != BROADCAST.root:
            assert group.sum_in_place(rank, FIRST, BROADCAST) == [10.0 * FIRST] * NUMEL
    assert not any(group.troubles)


def test_short_and_long_ops_take_turns(either: Exchanges) -> None:
    either.open()
    for seq in range(FIRST, FIRST + 6, 2):
        either.post_all(seq)
        either.post_all(seq + 1, LONG)
    either.run()
    for seq in range(FIRST, FIRST + 6, 2):
        assert either.sum_at(0, seq) == [total(either, seq)] * 4
        assert either.sum_in_place(1, seq + 1, LONG) == [total(either, seq + 1)] * NUMEL


def test_an_op_whose_input_is_in_a_segment_that_is_not_known_yet_waits_for_it(
    either: Exchanges,
) -> None:
    either.unknown.add((0, FIRST))
    either.open()
    either.post_all(FIRST, LONG)
    either.run()
    assert either.published(FIRST) == [False, False]
    assert "node0" not in {each.source for each in either.sent}
    either.unknown.clear()
    either.run()
    assert either.published(FIRST) == [True, True]
    assert either.sum_in_place(0, FIRST, LONG) == [total(either, FIRST)] * NUMEL
    assert not any(either.troubles)


def test_chunks_of_an_op_that_this_node_has_not_come_to_are_kept(either: Exchanges) -> None:
    either.come_in_place = True
    either.open()
    either.post(1, FIRST, LONG)
    either.step()
    either.deliver()
    either.post(0, FIRST, LONG)
    either.run()
    assert either.published(FIRST) == [True, True]
    assert either.sum_in_place(0, FIRST, LONG) == [total(either, FIRST)] * NUMEL


# What comes


@pytest.mark.parametrize(
    ("start", "numel"),
    [(8, 16), (0, 15), (0, 17), (96, 5), (112, 16), (100, 0)],
    ids=["start", "short", "long", "last", "beyond", "empty"],
)
def test_a_chunk_of_another_place_or_size_is_trouble(
    two: Exchanges, start: int, numel: int
) -> None:
    two.open()
    two.post(0, FIRST, LONG)
    two.step()
    two.take(0, "node1", *frame(FIRST, fingerprint=LONG, start=start, numel=numel))
    in_trouble(two, 0)
    assert f"{4 * numel} bytes at {start} are no chunk of it" in two.troubles[0][0]


def test_a_chunk_that_comes_twice_is_trouble(two: Exchanges) -> None:
    two.open()
    two.post(0, FIRST, LONG)
    two.step()
    for _ in range(2):
        two.take(0, "node1", *frame(FIRST, fingerprint=LONG, numel=16))
    in_trouble(two, 0)


def destinations(group: Exchanges, seq: int = FIRST, stamp: int = STAMP) -> list[int]:
    """Return the starts of the chunks of node1 that come to the memory of node0 at once."""
    frames = {
        start: frame(seq, stamp=stamp, fingerprint=LONG, start=start, numel=numel)[0]
        for start, numel in [*((start, 16) for start in range(0, 96, 16)), (96, 4), (50, 16)]
    }
    exchange = group.all[0]
    return [
        start
        for start, header in sorted(frames.items())
        if exchange.destination("node1", header) is not None
    ]


def test_sums_of_other_nodes_come_to_their_place_at_once_and_operands_do_not(
    two: Exchanges, spread: Exchanges
) -> None:
    """The second half of the elements is folded by node1."""
    for group in (two, spread):
        group.open()
        group.post(0, FIRST, LONG)
        group.step()
    assert destinations(two) == []
    assert destinations(spread) == [50]


def test_only_what_is_missing_of_the_op_under_way_has_a_place(spread: Exchanges) -> None:
    spread.open()
    assert destinations(spread) == []
    spread.post(0, FIRST, LONG)
    spread.step()
    assert destinations(spread, FIRST + 1) == []
    assert destinations(spread, stamp=STAMP + 1) == []
    (right, _), (shorter, _) = (
        frame(FIRST, fingerprint=LONG, start=50, numel=numel) for numel in (16, 15)
    )
    exchange = spread.all[0]
    assert exchange.destination("stranger", right) is None
    assert exchange.destination("node1", shorter) is None
    there = exchange.destination("node1", right)
    assert there is not None
    assert len(there) == 64
    exchange.take("node1", right, there, is_there=True)
    assert exchange.destination("node1", right) is None


def test_payloads_that_did_not_come_to_their_place_are_given_back_once_they_are_used(
    spread: Exchanges,
) -> None:
    spread.open()
    spread.post_all(FIRST, LONG)
    spread.run()
    for node, links in enumerate(spread.links):
        came = [each for each in spread.sent if each.to == spread.names[node]]
        assert len(links.freed) == len(came)
    spread.come_in_place = True
    spread.post_all(FIRST + 1, LONG)
    spread.run()
    for links in spread.links:
        assert len(links.freed) == 8 + 4, "operands alone"


# What is published


def test_an_op_is_published_only_once_all_that_this_node_sends_has_left(either: Exchanges) -> None:
    """Until then it lies in the memory of ranks, who may use it again after that."""
    either.open()
    either.links[0].are_full = True
    either.post_all(FIRST, LONG)
    either.run()
    assert either.published(FIRST) == [False, True]
    either.links[0].are_full = False
    either.step()
    assert either.published(FIRST) == [True, True]


def places(group: Exchanges, seqs: range, finished: int) -> list[int]:
    """Do long ops; return the places of their results on node0.

    Args:
        finished: by so many ops, ranks are behind with finishing theirs.
    """
    found = []
    for seq in seqs:
        group.post_all(seq, LONG)
        group.run()
        found.append(group.nodes.place_of(0, seq))
        group.finish_all(max(seq + 1 - finished, 0))
    return found


def test_a_place_is_used_again_once_all_local_ranks_and_all_nodes_have_the_result() -> None:
    """The other nodes are known to have it by what they send of the next op."""
    group = exchanges(((0, 1), (2,)))
    group.open()
    assert places(group, range(FIRST, FIRST + 5), finished=0) == [0, 1, 0, 1, 0]
    last = FIRST + 5
    group.post_all(last, LONG)
    group.run()
    group.nodes.finish(0, last + 1)  # the other rank of that node is behind
    assert group.nodes.place_of(0, last) == 1
    assert places(group, range(last + 1, last + 3), finished=3) == [0, 2]


def test_as_many_results_as_there_are_slots_may_be_in_use(two: Exchanges) -> None:
    two.open()
    assert places(two, range(FIRST, FIRST + 8), finished=100) == list(range(8))
    for seq in range(FIRST, FIRST + 8):
        assert two.sum_in_place(0, seq, LONG) == [total(two, seq)] * NUMEL


# The memory of an op


def test_the_memory_of_an_op_is_held_until_all_nodes_are_known_to_have_its_result(
    either: Exchanges,
) -> None:
    """The sum that is held for others is not divided yet."""
    either.open()
    either.post_all(FIRST, MEAN)
    either.run()
    assert either.sum_in_place(0, FIRST, MEAN) == [total(either, FIRST) / 2] * NUMEL
    assert floats(either.all[0].results.held()[FIRST].kept.bytes) == [total(either, FIRST)] * NUMEL
    assert either.pools[0].held_bytes
    either.post_all(FIRST + 1, LONG)
    either.run()
    assert list(either.all[0].results.held()) == [FIRST + 1]
    assert not either.pools[0].held_bytes, "only the mean needs memory beside the page"


def test_memory_of_results_is_kept_until_the_lane_is_opened_again_or_over(two: Exchanges) -> None:
    """Nodes on this machine may read it until they have closed the lane as well."""
    two.open()
    two.post_all(FIRST, MEAN)
    two.run()
    for node in (0, 1):
        two.close(node)
        two.all[node].results.set_aside()
        two.step()
        assert not two.all[node].results.held()
        assert two.pools[node].held_bytes
    two.open(FIRST + 8, nodes=[0])
    two.all[1].end()
    two.step()
    assert not two.pools[0].held_bytes
    assert not two.pools[1].held_bytes


def test_an_op_that_is_under_way_as_the_lane_is_closed_lets_go_of_all_memory(
    either: Exchanges,
) -> None:
    either.open()
    either.post(0, FIRST, MEAN)
    either.step()
    assert either.pools[0].held_bytes
    links = either.links[0]
    before = links.lets_go
    either.close(0)
    either.step()
    assert (before, links.lets_go) == (0, 1)
    assert either.pools[0].held_bytes, "others may still read it"
    assert destinations(either) == []
    either.post(1, FIRST, MEAN)
    either.run()
    assert not either.published(FIRST)[0]


def test_a_lane_that_rests_gives_the_memory_of_free_places_back(two: Exchanges) -> None:
    two.open()
    for seq in range(FIRST, FIRST + 3):
        two.post_all(seq, LONG)
        two.run()
        two.finish_all(seq + 1)
    page = two.nodes.pages[0]
    written = [place for place in range(8) if any(page.place(place))]
    assert len(written) > 1
    two.all[0].rest()
    left = [place for place in range(8) if any(page.place(place))]
    assert len(left) == 1, "others may still need the last result"
    assert two.sum_in_place(0, FIRST + 2, LONG) == [total(two, FIRST + 2)] * NUMEL


def test_a_lane_that_is_closed_between_two_ops_has_nothing_to_let_go(two: Exchanges) -> None:
    two.open()
    two.post_all(FIRST, LONG)
    two.run()
    two.close(0)
    two.step()
    assert not two.links[0].lets_go
    assert list(two.all[0].results.held()) == [FIRST]


def test_an_op_that_is_whole_as_the_lane_is_closed_is_not_published_and_lets_go(
    two: Exchanges,
) -> None:
    two.open()
    two.post_all(FIRST, MEAN)
    two.step()
    two.links[0].when_asked = lambda: two.close(0)
    two.run()
    assert two.published(FIRST) == [False, True]
    assert not two.all[0].results.held()
    two.all[0].end()
    two.step()
    assert not two.pools[0].held_bytes


def test_after_it_was_closed_in_the_middle_of_an_op_the_lane_does_later_ones(
    either: Exchanges,
) -> None:
    either.open()
    either.post(0, FIRST, MEAN)
    either.run()
    either.close(0, 1)
    either.step()
    later = FIRST + 8
    either.open(later)
    either.post_all(later, LONG)
    either.run()
    assert either.published(later) == [True, True]
    assert either.sum_in_place(0, later, LONG) == [total(either, later)] * NUMEL
    assert not any(either.troubles)
