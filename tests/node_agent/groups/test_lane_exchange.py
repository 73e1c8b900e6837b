"""The exchange of the short lane: a frame from each node to each, whatever comes first."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.node_agent.groups.lane_exchanges import FIRST, STAMP, Exchanges, frame, total


@pytest.fixture
def two() -> Exchanges:
    return Exchanges(((0,), (1,)))


@pytest.fixture(params=[((0,), (1,)), ((0, 1), (2,), (3,))], ids=["2x1", "2+1+1"])
def group(request: pytest.FixtureRequest) -> Exchanges:
    return Exchanges(request.param)


# Ops


def test_every_rank_finds_the_results_of_one_op_after_the_other(group: Exchanges) -> None:
    group.open()
    for seq in range(FIRST, FIRST + 20):
        group.post_all(seq)
        group.run()
        for rank in range(group.nodes.plan.world_size):
            assert group.sum_at(rank, seq) == [total(group, seq)] * 4
        assert all(group.published(seq))
    assert {each.results.end for each in group.all} == {FIRST + 20}
    assert not any(group.troubles)


def test_a_burst_of_ops_is_done_in_their_order(group: Exchanges) -> None:
    group.open()
    for seq in range(FIRST, FIRST + 8):
        group.post_all(seq)
    group.run()
    assert {each.results.end for each in group.all} == {FIRST + 8}
    for seq in range(FIRST, FIRST + 8):
        assert group.sum_at(0, seq) == [total(group, seq)] * 4


def test_each_node_sends_every_other_one_a_frame_for_each_op(group: Exchanges) -> None:
    group.open()
    group.post_all(FIRST)
    group.post_all(FIRST + 1)
    group.run()
    pairs = {(one, other) for one in group.names for other in group.names if one != other}
    assert len(group.sent) == 2 * len(pairs)
    assert {(each.source, each.to) for each in group.sent} == pairs
    assert {(each.header.seq, each.header.behind) for each in group.sent} == {
        (FIRST, 0),
        (FIRST + 1, 0),
    }
    assert {each.header.stamp for each in group.sent} == {STAMP}


def test_nothing_is_sent_before_the_last_local_rank_has_called(group: Exchanges) -> None:
    group.open()
    local = group.nodes.placement[0]
    for rank in local:
        assert not group.on_the_way
        group.post(rank, FIRST)
        group.step()
    assert {each.source for each in group.on_the_way} == {"node0"}


def test_ops_between_which_others_go_by_the_long_lane_are_done(group: Exchanges) -> None:
    group.open()
    for seq in (FIRST, FIRST + 3, FIRST + 13):
        group.post_all(seq)
        group.run()
        assert all(group.published(seq))
        assert group.sum_at(0, seq) == [total(group, seq)] * 4
    assert [each.header.behind for each in group.sent if each.to == "node0"][-1] == 9


def test_an_op_is_not_passed_over_though_only_the_one_behind_it_was_seen(two: Exchanges) -> None:
    """A rank posts two ops while the agent looks at one slot after the other."""
    two.open()
    two.step()
    page = two.nodes.pages[0]
    words, slots = page._words, [page.layout.post_word(0, slot) for slot in range(8)]

    class PostsWhileReadBetween:
        """The words; after the slot of the first op was read for nothing, two are posted."""

        def __getitem__(self, word: int) -> int:
            if word == slots[(FIRST + 1) % 8] and not two.nodes.is_published(0, FIRST):
                page._words = words
                two.post(0, FIRST)
                two.post(0, FIRST + 1)
            return words[word]

    page._words = cast(Any, PostsWhileReadBetween())
    two.post(1, FIRST)
    two.post(1, FIRST + 1)
    two.run()
    assert two.published(FIRST) == [True, True]
    assert two.published(FIRST + 1) == [True, True]


# Frames


def test_frames_of_ops_that_this_node_has_not_come_to_are_kept(two: Exchanges) -> None:
    two.open()
    two.post(1, FIRST)
    two.step()
    two.deliver()
    two.step()
    assert two.published(FIRST) == [False, False]
    two.post(0, FIRST)
    two.step(0)
    assert two.published(FIRST) == [True, False]


def test_frames_that_come_before_the_lane_is_open_here_are_kept(two: Exchanges) -> None:
    two.open(nodes=[1])
    two.post(1, FIRST)
    two.step()
    two.deliver()
    two.open(nodes=[0])
    two.post(0, FIRST)
    two.run()
    assert two.published(FIRST) == [True, True]


@pytest.mark.parametrize(
    ("source", "seq", "stamp"),
    [("node1", FIRST, STAMP - 1), ("node1", FIRST, STAMP + 1), ("stranger", FIRST, STAMP)],
    ids=["of an older epoch", "of a newer one", "of nobody"],
)
def test_frames_that_are_not_of_this_epoch_are_dropped(
    two: Exchanges, source: str, seq: int, stamp: int
) -> None:
    two.open()
    two.post(0, FIRST)
    two.step(0)
    two.take(0, source, *frame(seq, stamp=stamp))
    two.step(0)
    assert two.published(FIRST) == [False, False]
    two.post(1, FIRST)
    two.run()
    assert two.sum_at(0, FIRST) == [total(two, FIRST)] * 4


def test_frames_of_ops_that_are_done_are_dropped(two: Exchanges) -> None:
    two.open()
    two.post_all(FIRST)
    two.run()
    for _ in range(2):
        two.take(0, "node1", *frame(FIRST))
        two.take(0, "node1", *frame(FIRST - 1))
    assert not two.all[0]._early


def test_of_too_many_frames_of_ops_to_come_the_oldest_are_dropped(two: Exchanges) -> None:
    two.open()
    for seq in range(FIRST, FIRST + 100):
        two.take(0, "node1", *frame(seq))
    assert sorted(two.all[0]._early) == list(range(FIRST + 36, FIRST + 100))


def test_a_node_without_a_link_is_sent_nothing_and_waited_for(two: Exchanges) -> None:
    two.links[0].gone.add("node1")
    two.open()
    two.post_all(FIRST)
    two.run()
    assert two.published(FIRST) == [True, False]
    assert not any(two.troubles)


def test_the_nodes_that_have_sent_nothing_for_an_op_are_silent() -> None:
    group = Exchanges(((0,), (1,), (2,)))
    group.open()
    group.post(1, FIRST)
    group.step()
    assert group.all[0].silent_nodes(FIRST) == ("node1", "node2")
    group.deliver()
    assert group.all[0].silent_nodes(FIRST) == ("node2",)
    group.post(0, FIRST)
    group.step(0)
    assert group.all[0].silent_nodes(FIRST) == ("node2",), "of what it has folded as well"
    assert group.all[0].silent_nodes(FIRST + 1) == ("node1", "node2")
