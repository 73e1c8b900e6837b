"""The exchange of the short lane when it is closed, and the results that it holds for others."""

from __future__ import annotations

import pytest

from tests.node_agent.groups.lane_exchanges import FIRST, Exchanges, floats, frame, total


@pytest.fixture
def two() -> Exchanges:
    return Exchanges(((0,), (1,)))


@pytest.fixture(params=[((0,), (1,)), ((0, 1), (2,), (3,))], ids=["2x1", "2+1+1"])
def group(request: pytest.FixtureRequest) -> Exchanges:
    return Exchanges(request.param)


def test_nothing_is_published_once_the_lane_is_closed(two: Exchanges) -> None:
    two.open()
    two.post_all(FIRST)
    two.step()
    two.close(0)
    two.run()
    assert two.published(FIRST) == [False, True]
    assert two.all[0].results.end == FIRST


def test_an_op_that_is_finished_as_the_lane_is_closed_is_not_published(two: Exchanges) -> None:
    """The lane's thread was just about to."""
    two.open()
    two.post_all(FIRST)
    two.step()
    two.links[0].when_asked = lambda: two.close(0)
    two.run()
    assert two.published(FIRST) == [False, True]
    assert not two.all[0].results.held()


def test_an_op_of_before_is_not_published_though_the_lane_is_open_again(two: Exchanges) -> None:
    """The lane's thread was about to, and did not run while it was closed."""
    two.open()
    two.post_all(FIRST)
    two.step()

    def close_and_open() -> None:
        two.close(0)
        two.open(FIRST + 20, nodes=[0])

    two.links[0].when_asked = close_and_open
    two.run()
    assert two.published(FIRST) == [False, True]
    assert two.all[0].results.end == FIRST + 20


def test_what_is_held_is_what_other_nodes_may_lack(group: Exchanges) -> None:
    group.open()
    for seq in range(FIRST, FIRST + 3):
        group.post_all(seq)
        group.run()
    # The others' frames of the last op have said that they had all those before it.
    last = FIRST + 2
    for each in group.all:
        assert each.results.final_everywhere() == last
        assert list(each.results.held()) == [last]
    group.post_all(last + 1)
    group.step()
    group.close(0)
    assert list(group.all[0].results.held()) == [last]
    assert floats(group.all[0].results.held()[last].kept.bytes) == [total(group, last)] * 4


def test_a_node_that_is_behind_has_all_that_it_lacks_held_by_the_others() -> None:
    group = Exchanges(((0,), (1,), (2,)))
    group.open()
    group.post_all(FIRST)
    group.step()
    group.deliver(1)
    group.deliver(2)
    group.step(0)  # node0 has the op, the others lack the frame of node0
    assert group.published(FIRST) == [True, False, False]
    assert list(group.all[0].results.held()) == [FIRST]
    assert not group.all[1].results.held()


def test_frames_and_results_of_an_earlier_time_do_not_count_once_it_is_opened_again(
    two: Exchanges,
) -> None:
    two.open()
    two.post_all(FIRST)
    two.run()
    two.post(0, FIRST + 1)
    two.step()
    header, payload = frame(FIRST + 2)
    two.take(0, "node1", header._replace(behind=2), payload)
    assert list(two.all[0].results.held()) == [FIRST]
    for node in (0, 1):
        two.close(node)
    two.step()
    later = FIRST + 20
    two.open(later)
    assert not two.all[0].results.held()
    two.deliver()
    two.post_all(later)
    two.run()
    assert two.published(later) == [True, True]
    assert two.sum_at(0, later) == [total(two, later)] * 4
    assert not two.all[0]._early


def test_a_closed_lane_is_served_no_more_and_an_open_one_is(two: Exchanges) -> None:
    two.open()
    two.step()
    assert two.threads[0].lanes == [two.all[0]]
    two.close(0)
    two.step()
    assert not two.threads[0].lanes
    two.open(FIRST + 8, nodes=[0])
    two.step()
    assert two.threads[0].lanes == [two.all[0]]
