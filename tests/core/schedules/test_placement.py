"""Nodes that are near each other stand next to each other."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.schedules.schedule import ring_order, tree_order
from allfold_core.schedules.strategies.phases import place_in_heap
from allfold_core.schedules.strategies.tree import preorder_ranks
from allfold_core.topology import Member


def member(name: str, device_type: str = "cpu", zone: str = "") -> Member:
    return Member(name, f"http://{name}:1", f"{name}:2", (0,), device_type, zone)


def group(zone: str, device_type: str, count: int) -> list[Member]:
    return [member(f"{zone}-{device_type}-{i:02}", device_type, zone) for i in range(count)]


def alternating(*groups: list[Member]) -> list[Member]:
    """The members of all groups, dealt out in turns, as they may well register."""
    longest = max(map(len, groups))
    return [members[i] for i in range(longest) for members in groups if i < len(members)]


def place(one: Member) -> tuple[str, str]:
    return one.zone, one.device_type


def laid_out(members: list[Member], arity: int) -> list[Member]:
    """Return the members by their position in the heap, as the compiler lays it out."""
    order = tree_order(members)
    return [members[order[rank]] for rank in preorder_ranks(len(members), arity)]


def crossings(heap: list[Member], arity: int) -> int:
    """Parent-child edges between different zones or device types."""
    parents = (place_in_heap(len(heap), arity, me).parent for me in range(1, len(heap)))
    return sum(
        place(child) != place(heap[parent]) for child, parent in zip(heap[1:], parents, strict=True)
    )


MIXED = {
    "two sites": alternating(group("a", "cuda", 8), group("b", "cuda", 7)),
    "cpu and cuda": alternating(group("", "cuda", 10), group("", "cpu", 20)),
    "three device types": alternating(
        group("", "cuda", 5), group("", "rocm", 11), group("", "cpu", 3)
    ),
    "two sites, two types": alternating(
        group("a", "cuda", 8), group("b", "cpu", 4), group("a", "cpu", 12), group("b", "cuda", 9)
    ),
    "nobody like another": alternating(*(group(f"z{i}", "cpu", 1) for i in range(9))),
    "all alike": group("a", "cpu", 13),
}

members_lists = st.lists(
    st.builds(
        member,
        st.uuids().map(str),
        st.sampled_from(["cpu", "cuda"]),
        st.sampled_from(["", "eu", "us"]),
    ),
    max_size=40,
)


@given(members=members_lists, random=st.randoms(use_true_random=False))
def test_the_ring_order_does_not_depend_on_who_came_first(
    members: list[Member], random: object
) -> None:
    shuffled = list(members)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ring_order(shuffled) == ring_order(members)
    assert sorted(ring_order(members), key=str) == sorted(members, key=str)


@given(members=members_lists)
def test_a_ring_leaves_every_zone_once(members: list[Member]) -> None:
    ring = ring_order(members)
    zones = [one.zone for one in ring]
    places = [place(one) for one in ring]
    assert sum(one != two for one, two in pairwise(zones)) == max(0, len(set(zones)) - 1)
    assert sum(one != two for one, two in pairwise(places)) == max(0, len(set(places)) - 1)


def test_a_ring_is_sorted_by_zone_then_type_then_name() -> None:
    ring = ring_order(
        [
            member("d", "cuda", "b"),
            member("c", "cpu", "b"),
            member("b", "cuda", "a"),
            member("a", "cuda", "b"),
        ]
    )
    assert [one.node for one in ring] == ["b", "c", "a", "d"]


@given(members=members_lists, random=st.randoms(use_true_random=False))
def test_the_tree_order_is_a_permutation_that_does_not_depend_on_the_input(
    members: list[Member], random: object
) -> None:
    order = tree_order(members)
    assert sorted(order) == list(range(len(members)))
    shuffled = list(members)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert [shuffled[i] for i in tree_order(shuffled)] == [members[i] for i in order]


@pytest.mark.parametrize("arity", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("members", MIXED.values(), ids=MIXED.keys())
def test_fewer_edges_of_a_tree_join_different_nodes(members: list[Member], arity: int) -> None:
    placed = crossings(laid_out(members, arity), arity)
    by_registration = crossings(members, arity)
    sorted_heap = crossings(sorted(members, key=place), arity)
    assert placed <= by_registration
    assert placed <= sorted_heap


@pytest.mark.parametrize("arity", [2, 4])
def test_two_sites_are_joined_by_few_edges(arity: int) -> None:
    assert crossings(laid_out(MIXED["two sites"], arity), arity) <= arity + 1
    assert crossings(MIXED["two sites"], arity) >= 7


@given(members=members_lists.filter(bool), arity=st.integers(1, 9))
def test_a_group_hangs_on_the_rest_by_few_edges(members: list[Member], arity: int) -> None:
    heap = laid_out(members, arity)
    depth, position = 0, len(heap) - 1
    while position:
        position = place_in_heap(len(heap), arity, position).parent
        depth += 1
    groups = len({place(one) for one in members})
    assert crossings(heap, arity) <= (groups - 1) * max(1, 1 + (arity - 1) * depth)


@pytest.mark.parametrize("arity", [2, 3])
def test_like_nodes_share_a_parent_before_mixed_ones_do(arity: int) -> None:
    members = MIXED["two sites, two types"]
    heap = laid_out(members, arity)
    mixed = sum(
        len({place(heap[child]) for child in place_in_heap(len(heap), arity, me).children}) > 1
        for me in range(len(heap))
    )
    assert mixed <= 4
    assert place(heap[0]) == ("a", "cpu"), "the root is among the largest group"
