"""The choices of ``auto``: the cheapest, and the same on every node."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.dtypes import Wire
from allfold_core.errors import InvalidArgument
from allfold_core.group_options import GroupOptions
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.pricing.choose import choose
from allfold_core.pricing.predict import closed_form
from allfold_core.pricing.price import price
from allfold_core.schedules.compiler import compile_program, compile_schedule
from allfold_core.schedules.registry import candidates, parse_strategy, strategies_for
from allfold_core.schedules.schedule import Fold, Send
from allfold_core.topology import Layout, LinkModel, Member, SlowLink


def plan_of(nodes: int, links: LinkModel | None = None, **strategies: str) -> Plan:
    members = tuple(Member(f"node{i}", "", "", (i,)) for i in range(nodes))
    order = tuple(range(nodes))
    return Plan("g", 1, nodes, members, order, links or LinkModel(), GroupOptions(30.0, strategies))


def test_an_override_wins_and_comes_out_canonical() -> None:
    plan = plan_of(8, all_reduce=" Tree ", broadcast="tree(5)", reduce="auto")
    assert choose(Kind.ALL_REDUCE, plan, 100) == "tree(2)"
    assert choose(Kind.BROADCAST, plan, 1 << 30) == "tree(5)"
    assert choose(Kind.REDUCE, plan, 100) == choose(Kind.REDUCE, plan_of(8), 100)


def test_an_override_that_cannot_run_the_kind_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="ring cannot run broadcast"):
        choose(Kind.BROADCAST, plan_of(4, broadcast="ring"), 100)


def with_incast(kind: Kind, name: str, nodes: int, nbytes: int) -> float:
    """The formula's seconds, and 5 % more per doubling of nodes that send to one at once."""
    seconds = closed_form(kind, name, nodes, nbytes, LinkModel())
    if nodes > 2 and name in ("direct", "direct2"):
        return seconds * (1 + 0.05 * log2(nodes))
    if nodes > 2 and name == "halving_doubling" and kind.has_blocks:
        return seconds * (1 + 0.05 * log2(1 + nodes.bit_length() - 1))
    return seconds


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 16, 100, 10_000])
def test_the_choice_is_the_cheapest_by_the_formula(kind: Kind, nodes: int) -> None:
    plan = plan_of(nodes)
    for nbytes in (0, 4, 4096, 1 << 20, 1 << 30):
        times = {name: with_incast(kind, name, nodes, nbytes) for name in candidates(kind)}
        chosen = times[choose(kind, plan, nbytes)]
        assert chosen == pytest.approx(min(times.values()), rel=1e-8)


def test_four_nodes_take_a_ring_for_long_tensors_and_two_a_mesh() -> None:
    for nbytes in (4 << 20, 16 << 20, 256 << 20):
        assert choose(Kind.ALL_REDUCE, plan_of(4), nbytes) == "ring"
        assert choose(Kind.ALL_REDUCE, plan_of(2), nbytes) == "direct2"
    for nbytes in (0, 4096, 64 << 10):
        assert choose(Kind.ALL_REDUCE, plan_of(2), nbytes) == "direct"


def test_a_mesh_that_is_ahead_by_less_than_its_incast_is_not_taken() -> None:
    def by_formula(nbytes: int) -> list[str]:
        return sorted(
            candidates(Kind.ALL_REDUCE),
            key=lambda name: closed_form(Kind.ALL_REDUCE, name, 4, nbytes, LinkModel()),
        )

    assert by_formula(1 << 20)[:2] == ["direct2", "halving_doubling"]
    assert choose(Kind.ALL_REDUCE, plan_of(4), 1 << 20) == "halving_doubling"
    assert by_formula(1 << 18)[0] == "direct2"  # by more than that
    assert choose(Kind.ALL_REDUCE, plan_of(4), 1 << 18) == "direct2"


@pytest.mark.parametrize("kind", Kind)
def test_every_choice_compiles(kind: Kind) -> None:
    root = 0 if kind.has_root else -1
    for nodes in (1, 2, 3, 9):
        for nbytes in (0, 4, 1 << 12, 1 << 34):
            name = choose(kind, plan_of(nodes), nbytes)
            assert str(parse_strategy(name)) == name
            compile_schedule(kind, name, nodes=nodes, numel=nbytes // 4, root=root)


@pytest.mark.parametrize("kind", Kind)
def test_up_to_64_nodes_and_a_gigabyte_the_choice_has_a_program(kind: Kind) -> None:
    for nodes in (*range(1, 18), 31, 32, 33, 48, 63, 64):
        plan, root = plan_of(nodes), nodes // 2 if kind.has_root else -1
        for nbytes in (0, 4, 1000, 10**6, 10**9):
            name = choose(kind, plan, nbytes)
            for node in {0, nodes - 1}:
                program = compile_program(
                    kind, name, nodes=nodes, numel=nbytes // 4, node=node, root=root
                )
                assert bool(program) == (nodes > 1)


def test_short_tensors_take_the_mesh_and_long_ones_a_strategy_of_few_bytes() -> None:
    for nodes in (2, 4, 8, 16):
        assert choose(Kind.ALL_REDUCE, plan_of(nodes), 4096) == "direct"
        for nbytes in (64 << 20, 1 << 30):
            long = choose(Kind.ALL_REDUCE, plan_of(nodes), nbytes)
            assert long in ("direct2", "halving_doubling", "ring")
    assert choose(Kind.ALL_REDUCE, plan_of(32), 256 << 10) == "halving_doubling"
    assert choose(Kind.ALL_REDUCE, plan_of(1000), 64 << 20) == "double_tree"


def test_a_slow_network_moves_the_boundary_to_shorter_tensors() -> None:
    slow = LinkModel(seconds_per_byte=100 * LinkModel().seconds_per_byte)
    nbytes = 8 << 10
    assert choose(Kind.ALL_REDUCE, plan_of(8), 0) == "direct"
    assert choose(Kind.ALL_REDUCE, plan_of(8), nbytes) == "direct"
    assert choose(Kind.ALL_REDUCE, plan_of(8, slow), 0) == "direct"
    assert choose(Kind.ALL_REDUCE, plan_of(8, slow), nbytes) != "direct"


def test_of_equals_the_first_candidate_is_taken() -> None:
    """With two nodes, one message per slice, ring, direct2 and halving_doubling are the same."""
    links = LinkModel(latency=0.0, overhead=0.0)
    assert choose(Kind.ALL_REDUCE, plan_of(2, links), 1 << 17) == "direct2"
    free = LinkModel(0.0, 0.0, 0.0, 0.0)
    assert choose(Kind.ALL_REDUCE, plan_of(9, free), 1000) == "direct"


def test_over_long_links_every_connection_counts_and_none_is_in_the_way() -> None:
    """At a round trip of 40 ms a connection carries 70 MB/s, whatever the line has."""
    long = LinkModel(latency=20e-3, seconds_per_byte=1 / 70e6)
    far = replace(plan_of(4), links=long)
    for nbytes in (1 << 20, 16 << 20, 1 << 30):
        assert choose(Kind.ALL_REDUCE, far, nbytes) == "direct2"
        for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
            assert choose(kind, far, nbytes) == "direct"
    near = replace(far, links=replace(long, latency=2e-3))
    assert choose(Kind.ALL_REDUCE, near, 1 << 30) == "ring"
    assert choose(Kind.ALL_GATHER, near, 1 << 30) == "ring"


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_few_nodes_can_be_far_apart(kind: Kind, nodes: int) -> None:
    far = replace(plan_of(nodes), links=LinkModel(latency=80e-3, seconds_per_byte=1 / 20e6))
    for nbytes in (0, 1, 4096, 1 << 24):
        assert choose(kind, far, nbytes) in candidates(kind)


@pytest.mark.parametrize("bandwidth", [3e9, 12e9])
def test_a_fast_link_is_not_a_long_one(bandwidth: float) -> None:
    """Also where the agents' 100 us, by which it is counted longer, would fill it."""
    near = replace(plan_of(8), links=LinkModel(latency=500e-6, seconds_per_byte=1 / bandwidth))
    assert choose(Kind.ALL_REDUCE, near, 1 << 28) != "direct2"
    assert choose(Kind.ALL_GATHER, near, 1 << 28) != "direct"


def test_blocks_take_the_mesh_until_its_messages_cost_more_than_further_steps() -> None:
    for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        for nodes, longest in ((2, 64 << 10), (3, 64 << 10), (4, 64 << 10), (8, 4096)):
            for nbytes in (4, longest):
                assert choose(kind, plan_of(nodes), nbytes) == "direct"
        assert choose(kind, plan_of(2), 64 << 20) == "direct"
        for nodes in (3, 4, 8):  # what arrives at once takes longer than it would in turn
            assert choose(kind, plan_of(nodes), 64 << 20) == "ring"
        for nodes in (32, 64):
            assert choose(kind, plan_of(nodes), 4096) == "halving_doubling"
    for kind in (Kind.GATHER, Kind.SCATTER):
        assert choose(kind, plan_of(4), 4096) == "centralized"
        assert choose(kind, plan_of(64), 4096).startswith("tree")
    assert choose(Kind.ALL_TO_ALL, plan_of(64), 4096) == "direct"


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.has_blocks])
@pytest.mark.parametrize("nodes", [3, 8, 13, 24])
def test_what_is_chosen_for_blocks_is_near_the_cheapest_on_the_simulated_clock(
    kind: Kind, nodes: int
) -> None:
    """Within a fifth: where a tree is not full, its formula is only a bound."""
    root = 0 if kind.has_root else -1
    for block in (4, 40_000):
        nbytes = block * nodes
        clock = {
            name: price(
                compile_schedule(kind, name, nodes=nodes, numel=nbytes // 4, root=root), LinkModel()
            )
            for name in candidates(kind)
        }
        assert clock[choose(kind, plan_of(nodes), nbytes)] < 1.2 * min(clock.values())


@given(
    nodes=st.integers(1, 300),
    nbytes=st.integers(0, 1 << 40),
    kind=st.sampled_from(list(Kind)),
)
def test_the_choice_depends_on_the_plan_alone(nodes: int, nbytes: int, kind: Kind) -> None:
    plan = plan_of(nodes)
    again = Plan.from_dict(plan.to_dict())
    assert choose(kind, plan, nbytes) == choose(kind, again, nbytes)
    assert choose(kind, plan, nbytes) in candidates(kind)


def test_all_strategies_of_a_kind_are_candidates() -> None:
    for kind in Kind:
        names = {parse_strategy(name).strategy.name for name in candidates(kind)}
        assert names == set(strategies_for(kind))


SPARSE = {Kind.ALL_REDUCE: "direct2", Kind.REDUCE_SCATTER: "direct", Kind.REDUCE: "centralized"}


@pytest.mark.parametrize("kind", SPARSE)
def test_what_is_sparse_goes_straight_to_the_owner_of_its_place(kind: Kind) -> None:
    for nodes in (1, 2, 3, 9, 64):
        for nbytes in (0, 100, 1 << 20, 1 << 30):
            for plan in (
                plan_of(nodes),
                replace(plan_of(nodes), layout=Layout(slow=(SlowLink("node0", "node1", 1e-6),))),
            ):
                chosen = choose(kind, plan, nbytes, wire=Wire.TOPK, feedback=True)
                assert chosen == SPARSE[kind]
    for name in candidates(kind):
        for plan, asked in ((plan_of(4), name), (plan_of(4, None, **{kind.label: name}), "auto")):
            if name == SPARSE[kind]:
                assert choose(kind, plan, 100, asked=asked, wire=Wire.TOPK, feedback=True) == name
                continue
            with pytest.raises(InvalidArgument) as refused:
                choose(kind, plan, 100, asked=asked, wire=Wire.TOPK, feedback=True)
            assert f"{name} cannot run {kind.label} with wire='topk'" in refused.value.message


@pytest.mark.parametrize("kind", SPARSE)
def test_in_what_is_sparse_a_contribution_is_sent_once_and_the_result_once_to_each(
    kind: Kind,
) -> None:
    """And nobody sends on what is in part of others, but the owner what has all of them in it."""
    nodes, numel = 5, 5000
    root = 2 if kind.has_root else -1
    schedule = compile_schedule(kind, SPARSE[kind], nodes=nodes, numel=numel, root=root)
    for program in schedule.programs:
        folded: set[int] = set()
        sent: Counter[int] = Counter()
        for step in program:
            if isinstance(step, Fold):
                assert sorted(step.operands) == list(range(nodes))
                folded.update(range(step.slice.start, step.slice.stop))
            elif isinstance(step, Send):
                sent.update(range(step.slice.start, step.slice.stop))
        assert all(count == (nodes - 1 if at in folded else 1) for at, count in sent.items())
