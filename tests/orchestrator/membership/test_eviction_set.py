"""The nodes that are left out where links are dead, against a search through all sets of nodes."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from allfold_orchestrator.membership.eviction_set import (
    MAX_SEARCHED,
    eviction_set_of_some,
    smallest_eviction_set,
)

NODES = "abcdef"


def links(*pairs: str) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in pairs}


def test_of_one_dead_link_the_node_with_fewer_ranks_goes() -> None:
    assert smallest_eviction_set(links("ab"), {"a": 1, "b": 2}) == {"a"}
    assert smallest_eviction_set(links("ab"), {"a": 2, "b": 1}) == {"b"}


def test_of_two_nodes_with_as_many_ranks_the_leader_stays() -> None:
    assert smallest_eviction_set(links("ab"), {"a": 1, "b": 1}, {"a"}) == {"b"}
    assert smallest_eviction_set(links("ab"), {"a": 1, "b": 1}, {"b"}) == {"a"}
    assert smallest_eviction_set(links("ab"), {}) == {"a"}, "and all replicas choose the same"


def test_a_node_that_lost_all_its_links_goes_alone_however_many_ranks_it_has() -> None:
    assert smallest_eviction_set(links("ab", "ac", "ad"), {"a": 8, "b": 1, "c": 1, "d": 1}) == {"a"}


def test_dead_links_that_have_nothing_in_common_are_covered_one_by_one() -> None:
    assert smallest_eviction_set(links("ab", "cd"), {"a": 2, "b": 1, "c": 1, "d": 2}) == {"b", "c"}
    assert smallest_eviction_set([], {}) == frozenset()


def test_a_chain_of_dead_links_is_covered_by_every_second_node() -> None:
    assert smallest_eviction_set(links("ab", "bc", "cd", "de"), {}) == {"b", "d"}


def test_a_tangle_too_large_to_search_is_covered_all_the_same() -> None:
    names = [f"n{number}" for number in range(MAX_SEARCHED + 2)]
    dead = {frozenset(pair) for pair in combinations(names, 2)}
    found = smallest_eviction_set(dead, {})
    assert all(link & found for link in dead)
    assert len(found) == len(names) - 1


pairs = st.sampled_from([frozenset(pair) for pair in combinations(NODES, 2)])


@given(
    st.sets(pairs, max_size=10),
    st.dictionaries(st.sampled_from(NODES), st.integers(1, 3)),
    st.sets(st.sampled_from(NODES), max_size=2),
)
def test_no_set_of_nodes_is_a_better_cover(
    dead: set[frozenset[str]], ranks: dict[str, int], leaders: set[str]
) -> None:
    def cost(nodes: frozenset[str]) -> tuple[int, int, int]:
        return len(nodes), sum(ranks.get(n, 0) for n in nodes), len(nodes & leaders)

    covers = (
        frozenset(nodes)
        for count in range(len(NODES) + 1)
        for nodes in combinations(NODES, count)
        if all(link & set(nodes) for link in dead)
    )
    found = smallest_eviction_set(dead, ranks, leaders)
    assert all(link & found for link in dead)
    assert cost(found) == min(map(cost, covers))


def test_an_undecided_link_does_not_hold_up_what_is_the_same_either_way() -> None:
    assert eviction_set_of_some(links("ab"), [], {"a": 1, "b": 2}) == frozenset("a")
    assert eviction_set_of_some(links("ab"), links("cb", "db"), {}) == frozenset("b")
    assert eviction_set_of_some(links("ab"), links("ab", "cd"), {"a": 2, "b": 1}) == frozenset("b")


def test_where_an_undecided_link_makes_a_difference_it_is_waited_for() -> None:
    assert eviction_set_of_some(links("ab", "ac"), links("bd", "ce"), {"a": 5}) is None
    assert eviction_set_of_some(links("zy"), links("zc", "cd"), {}) == frozenset("z")
    assert eviction_set_of_some(links("ab"), links("ac"), {"a": 8, "b": 1}) is None
    assert eviction_set_of_some(links("ab"), links("ac"), {}, leaders="a") is None
    assert eviction_set_of_some([], links("ab"), {}) == frozenset()


@given(
    st.sets(pairs, min_size=1, max_size=3),
    st.sets(pairs, max_size=5),
    st.dictionaries(st.sampled_from(NODES), st.integers(1, 3)),
    st.data(),
)
def test_who_goes_early_would_go_as_well_if_any_of_the_undecided_links_were_dead(
    dead: set[frozenset[str]],
    undecided: set[frozenset[str]],
    ranks: dict[str, int],
    data: st.DataObject,
) -> None:
    chosen = eviction_set_of_some(dead, undecided, ranks)
    if chosen is None:
        return
    assert all(link & chosen for link in dead)
    late = data.draw(st.sets(st.sampled_from(sorted(undecided, key=sorted)))) if undecided else ()
    left = [link for link in late if not link & chosen]
    price = sum(ranks.get(node, 0) for node in (*chosen, *smallest_eviction_set(left, ranks)))
    best = smallest_eviction_set({*dead, *late}, ranks)
    assert len(chosen) + len(smallest_eviction_set(left, ranks)) == len(best)
    assert price == sum(ranks.get(node, 0) for node in best)
