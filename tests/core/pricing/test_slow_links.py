"""A link that is much slower than the others is planned around, where that helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.group_options import GroupOptions
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.pricing.choose import choose
from allfold_core.pricing.per_link import bandwidth_seconds, seconds_over_links, shares_of
from allfold_core.pricing.predict import predict
from allfold_core.pricing.slow_links import (
    BELIEVED_SECONDS,
    GAP_SECONDS,
    MOST_GAP_SECONDS,
    ChangeLimit,
    LinkTable,
    arrange,
    bandwidth_bound,
    better_layout,
    describe,
)
from allfold_core.schedules.registry import candidates
from allfold_core.topology import AS_OPENED, Layout, LinkModel, Member, SlowLink

RATE, MIB = 118e6, 1 << 20
BETA = 1 / RATE


def plan_for(nodes: int, strategies: dict[str, str] | None = None) -> Plan:
    names = [f"n{number:02}" for number in range(nodes)]
    return Plan(
        group="g",
        opening=1,
        world_size=nodes,
        members=tuple(Member(name, "", "", (rank,)) for rank, name in enumerate(names)),
        tree_order=tuple(reversed(range(nodes))),
        links=LinkModel(seconds_per_byte=BETA),
        options=GroupOptions(3.0, strategies or {}),
    )


def slow_links(plan: Plan, *pairs: tuple[int, int], times: float = 10) -> tuple[SlowLink, ...]:
    names = [member.node for member in plan.members]
    return tuple(SlowLink(names[one], names[other], times * BETA) for one, other in pairs)


def steps_of_ring(plan: Plan) -> Iterator[tuple[str, str]]:
    names = [member.node for member in plan.members]
    return pairwise([*names, names[0]])


def table_of(plan: Plan, rates: dict[tuple[int, int], float], now: float = 0.0) -> LinkTable:
    """A table in which each node has measured all others; those not given at the full rate."""
    table = LinkTable()
    names = [member.node for member in plan.members]
    for to, node in enumerate(names):
        others = (each for each in range(len(names)) if each != to)
        told = {names[each]: rates.get((each, to), RATE) for each in others}
        table.record(node, told, now)
    return table


@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 12, 16])
def test_no_step_of_the_ring_goes_over_the_slow_link(nodes: int) -> None:
    plan = plan_for(nodes)
    slow = slow_links(plan, (1, 2))
    arranged = arrange(plan, BETA, slow)
    assert (slow[0].source, slow[0].destination) not in set(steps_of_ring(arranged))
    assert sorted(arranged.tree_order) == list(range(nodes))
    assert {each.node for each in arranged.members} == {each.node for each in plan.members}


@pytest.mark.parametrize("nodes", [3, 4, 8])
def test_a_long_all_reduce_takes_hardly_longer_than_without_the_slow_link(nodes: int) -> None:
    plan, nbytes = plan_for(nodes), 64 * MIB
    slow = slow_links(plan, (1, 2))
    arranged = arrange(plan, BETA, slow)
    before = seconds_over_links(
        Kind.ALL_REDUCE, choose(Kind.ALL_REDUCE, plan, nbytes), plan, nbytes, arranged.layout
    )
    after = seconds_over_links(
        Kind.ALL_REDUCE, choose(Kind.ALL_REDUCE, arranged, nbytes), arranged, nbytes
    )
    alike = predict(Kind.ALL_REDUCE, "ring", nodes, nbytes, plan.links)
    assert after < 1.05 * alike
    assert after < before / 5


def test_with_both_directions_slow_three_nodes_go_by_way_of_the_third() -> None:
    plan = plan_for(3)
    slow = slow_links(plan, (1, 2), (2, 1))
    arranged = arrange(plan, BETA, slow)
    name = choose(Kind.ALL_REDUCE, arranged, 64 * MIB)
    found = bandwidth_seconds(Kind.ALL_REDUCE, name, arranged, 64 * MIB)
    assert found == pytest.approx(2 * 64 * MIB * BETA), "twice through the node in the middle"


@given(
    nodes=st.integers(2, 6),
    pairs=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4),
)
def test_an_arrangement_is_never_worse_than_the_order_of_the_opening(
    nodes: int, pairs: set[tuple[int, int]]
) -> None:
    plan = plan_for(nodes)
    known = sorted(each for each in pairs if max(each) < nodes and each[0] != each[1])
    slow = slow_links(plan, *known)
    arranged = arrange(plan, BETA, slow)

    def best(of: Plan) -> float:
        return min(
            bandwidth_seconds(Kind.ALL_REDUCE, name, of, 64 * MIB, arranged.layout)
            for name in candidates(Kind.ALL_REDUCE)
        )

    assert best(arranged) <= best(plan) * 1.001
    bound = bandwidth_bound(plan, BETA, slow, 64 * MIB)
    assert 2 * (nodes - 1) / nodes * 64 * MIB * BETA <= bound * 1.001
    assert bound <= best(plan) * 1.001


def test_without_a_slow_link_the_order_stays() -> None:
    plan = plan_for(5)
    arranged = arrange(plan, BETA, ())
    assert arranged.members == plan.members
    assert arranged.tree_order == plan.tree_order


def test_the_bound_is_that_of_the_best_schedule_for_the_measured_links() -> None:
    plan = plan_for(4)
    assert bandwidth_bound(plan, BETA, (), 64 * MIB) == pytest.approx(1.5 * 64 * MIB * BETA)
    slow = slow_links(plan, (0, 1))
    assert bandwidth_bound(plan, BETA, slow, 64 * MIB) == pytest.approx(1.5 * 64 * MIB * BETA)
    everything = [(one, other) for one in range(4) for other in range(4) if one != other]
    slow = slow_links(plan, *everything)
    least = bandwidth_bound(plan, BETA, slow, 64 * MIB)
    assert least == pytest.approx(0.5 * 64 * MIB * 10 * BETA), "each pair by itself, direct2"


@pytest.mark.parametrize("kind", Kind)
def test_every_strategy_has_a_price_over_links_that_differ(kind: Kind) -> None:
    plan = plan_for(4)
    plan = replace(plan, layout=Layout(usual=BETA, slow=slow_links(plan, (0, 1))))
    for name in candidates(kind):
        for nbytes in (0, 1, 4 * MIB):
            alike = predict(kind, name, 4, nbytes, plan.links)
            assert seconds_over_links(kind, name, plan, nbytes) >= alike * 0.999
    assert choose(kind, plan, 4 * MIB) in candidates(kind)


def test_the_shares_of_a_ring_are_those_of_its_steps() -> None:
    shares = shares_of(Kind.ALL_REDUCE, "ring", 4)
    assert [pair[:2] for pair in shares.pairs] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert {pair[2] for pair in shares.pairs} == {1.5}
    assert shares.port == 1.5
    assert not shares.in_tree
    assert shares_of(Kind.ALL_REDUCE, "chain", 4).in_tree


# The table


def test_the_slow_link_is_the_one_that_others_are_not_like() -> None:
    plan = plan_for(4)
    figures = table_of(plan, {(1, 2): RATE / 10}).figures(plan, 1.0)
    assert figures.slow == slow_links(plan, (1, 2))
    assert figures.usual == pytest.approx(BETA)
    assert describe(figures, plan) == "link n01 -> n02 measured 11.8 MB/s, planned with 118 MB/s"


def test_on_a_busy_machine_all_links_are_alike_and_none_is_slow() -> None:
    plan = plan_for(4)
    names = [member.node for member in plan.members]
    table = LinkTable()
    for to, node in enumerate(names):
        table.record(node, {names[to - 1]: RATE / (20 + to)}, 0.0)
    figures = table.figures(plan, 1.0)
    assert figures.slow == ()
    assert better_layout(plan, plan, figures) is None


def test_links_that_are_faster_than_planned_are_no_reason_for_anything() -> None:
    plan = plan_for(4)
    figures = table_of(plan, {(1, 2): 50 * RATE, (2, 3): 0.9 * RATE}).figures(plan, 1.0)
    assert figures.slow == ()
    assert describe(figures, plan) == ""


def test_a_change_has_to_be_worth_it() -> None:
    plan = plan_for(4)
    figures = table_of(plan, {(1, 2): RATE / 10}).figures(plan, 1.0)
    layout = better_layout(plan, plan, figures)
    assert layout is not None
    ring = ", ".join(layout.ring)
    assert layout.reason == f"ring order changed to {ring}: {describe(figures, plan)}"
    arranged = arrange(plan, figures.usual, figures.slow)
    present = replace(arranged, layout=layout)
    assert better_layout(present, plan, figures) is None, "that is how it is"
    many = plan_for(16, {"all_reduce": "direct2"})
    figures = table_of(many, {(1, 2): RATE / 10}).figures(many, 1.0)
    assert better_layout(many, many, figures) is None, "each link carries but a 16th"


def test_the_reason_says_what_has_changed_where_it_is_not_the_ring() -> None:
    plan = plan_for(4, {"all_reduce": "chain"})
    layout = better_layout(plan, plan, Layout(usual=BETA, slow=slow_links(plan, (1, 2))))
    assert layout is not None
    assert layout.reason.startswith(f"tree order changed to {', '.join(layout.tree)}: link n01")
    links = LinkModel(latency=20e-3, seconds_per_byte=BETA)  # so that few steps are worth much
    far = replace(plan_for(5), links=links, tree_order=tuple(range(5)))
    assert choose(Kind.ALL_REDUCE, far, 16 * MIB) == "direct2"
    layout = better_layout(far, far, Layout(usual=BETA, slow=slow_links(far, (0, 3), times=100)))
    assert layout is not None
    assert layout.reason.startswith("other strategies chosen: link n00 -> n03 measured")


@pytest.mark.parametrize("nodes", [2, 17])
def test_there_is_no_other_order_of_two_nodes_and_none_is_sought_of_very_many(nodes: int) -> None:
    plan = plan_for(nodes)
    figures = Layout(usual=BETA, slow=slow_links(plan, (0, 1)))
    assert better_layout(plan, plan, figures) is None


def test_a_link_of_which_nothing_is_heard_is_tried_again_and_believed_for_longer_then() -> None:
    plan, slow = plan_for(4), {(1, 2): RATE / 10}
    table = table_of(plan, slow)
    assert table.figures(plan, BELIEVED_SECONDS - 1).slow
    present = replace(plan, layout=Layout(slow=slow_links(plan, (1, 2))))
    figures = table.figures(plan, BELIEVED_SECONDS + 1)
    assert not figures.slow
    assert better_layout(present, plan, figures) == AS_OPENED
    again = BELIEVED_SECONDS + 10
    table.record("n02", {"n01": RATE / 10}, again)
    assert table.figures(plan, again + 2 * BELIEVED_SECONDS - 1).slow
    assert not table.figures(plan, again + 2 * BELIEVED_SECONDS + 1).slow


def test_a_link_that_is_healthy_again_takes_its_place_again() -> None:
    plan = plan_for(4)
    table = table_of(plan, {(1, 2): RATE / 10})
    figures = table.figures(plan, 1.0)
    layout = better_layout(plan, plan, figures)
    assert layout is not None
    present = replace(arrange(plan, figures.usual, figures.slow), layout=layout)
    table.record("n02", {"n01": RATE}, 2.0)
    assert better_layout(present, plan, table.figures(plan, 3.0)) == AS_OPENED


def test_of_two_slow_links_the_healthy_one_comes_back_and_the_other_is_still_avoided() -> None:
    plan = plan_for(6)
    both = table_of(plan, {(1, 2): RATE / 10, (4, 5): RATE / 10}).figures(plan, 1.0)
    one = table_of(plan, {(1, 2): RATE / 10}).figures(plan, 1.0)
    layout = better_layout(plan, plan, both)
    assert layout is not None
    present = replace(arrange(plan, both.usual, both.slow), layout=layout)
    layout = better_layout(present, plan, one)
    assert layout is not None
    assert layout.slow == slow_links(plan, (1, 2))
    assert layout.ring == arrange(plan, one.usual, one.slow).layout.ring


def test_a_new_leader_believes_what_the_layout_was_made_for() -> None:
    plan = plan_for(4)
    layout = Layout(("n00",), ("n00",), BETA, slow_links(plan, (1, 2)), "")
    names = [member.node for member in plan.members]
    table = LinkTable()
    table.adopt(layout, 0.0)
    table.record(names[0], {names[3]: RATE}, 0.0)
    table.record(names[3], {names[2]: RATE}, 0.0)
    assert table.figures(plan, 1.0).slow == layout.slow
    table.adopt(layout, BELIEVED_SECONDS)  # the same, not news
    assert not table.figures(plan, BELIEVED_SECONDS + 1).slow


@pytest.mark.parametrize("own", [[], ["n00"], ["n00", "n03"]])
def test_a_new_leader_keeps_the_layout_when_most_links_it_knows_are_the_slow_ones(
    own: list[str],
) -> None:
    plan = plan_for(4)
    present = arrange(plan, BETA, slow_links(plan, (1, 2), (2, 1)))
    table = LinkTable()
    table.adopt(present.layout, 0.0)
    table.record("n02", dict.fromkeys(own, RATE), 0.0)
    figures = table.figures(plan, 1.0)
    assert figures.slow == present.layout.slow
    assert figures.usual == pytest.approx(BETA)
    assert better_layout(present, plan, figures) is None
    table.record("n02", {"n01": RATE}, 2.0)
    assert table.figures(plan, 3.0).slow == slow_links(plan, (2, 1)), "the other one has healed"


def test_a_link_that_has_healed_is_believed_to_be_slow_no_longer_than_at_first() -> None:
    plan, slow = plan_for(4), {"n01": RATE / 10}
    table = table_of(plan, {(1, 2): RATE / 10})
    now = BELIEVED_SECONDS + 1
    assert not table.figures(plan, now).slow
    table.record("n02", {"n01": RATE}, now)
    assert not table.figures(plan, now).slow
    table.record("n02", slow, now)
    assert table.figures(plan, now + BELIEVED_SECONDS - 1).slow
    assert not table.figures(plan, now + BELIEVED_SECONDS + 1).slow


def test_links_of_nodes_that_are_gone_do_not_count() -> None:
    plan = plan_for(4)
    table = table_of(plan, {(1, 2): RATE / 10})
    smaller = replace(plan_for(2), members=plan.members[:2])
    assert table.figures(smaller, 1.0).slow == ()
    assert LinkTable().figures(plan, 1.0) == AS_OPENED


def test_changes_become_rarer_the_more_there_are() -> None:
    limit, now, gaps = ChangeLimit(), 0.0, []
    for _ in range(12):
        limit.count_change(now)
        before = now
        while not limit.allows(now):
            now += GAP_SECONDS
        gaps.append(now - before)
    assert gaps[:3] == [GAP_SECONDS, 2 * GAP_SECONDS, 4 * GAP_SECONDS]
    assert gaps[-1] == MOST_GAP_SECONDS
    limit.count_change(now + 2 * MOST_GAP_SECONDS + 1)
    assert limit.allows(now + 2 * MOST_GAP_SECONDS + 1 + GAP_SECONDS)
