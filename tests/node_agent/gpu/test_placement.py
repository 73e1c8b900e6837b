"""An op is folded where most ranks' memory is reached, and every node of equal ones agrees."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_agent.gpu.gpus import fold_on

HOMES = st.lists(st.integers(0, 5), min_size=1, max_size=10)
LINKS = st.frozensets(st.tuples(st.integers(0, 5), st.integers(0, 5)))
Links = frozenset[tuple[int, int]]


def reached(links: Links, home: int, homes: list[int]) -> int:
    return sum(home == other or (home, other) in links for other in homes)


def place(homes: list[int], links: Links) -> int:
    return fold_on(homes, lambda one, other: one == other or (one, other) in links)


@given(HOMES, LINKS)
def test_it_is_a_gpu_that_has_memory_of_a_rank_and_reaches_most(
    homes: list[int], links: Links
) -> None:
    chosen = place(homes, links)
    assert chosen in homes
    most = max(reached(links, home, homes) for home in homes)
    assert reached(links, chosen, homes) == most


@given(HOMES, LINKS)
def test_of_equals_it_is_the_one_of_the_lowest_rank(homes: list[int], links: Links) -> None:
    chosen = place(homes, links)
    before = homes[: homes.index(chosen)]
    assert all(reached(links, home, homes) < reached(links, chosen, homes) for home in before)


@given(HOMES)
def test_where_all_reach_all_it_is_that_of_the_first_rank(homes: list[int]) -> None:
    assert place(homes, frozenset(product(range(6), range(6)))) == homes[0]


@given(HOMES)
def test_where_none_reaches_another_it_is_that_of_most_ranks(homes: list[int]) -> None:
    assert homes.count(place(homes, frozenset())) == max(map(homes.count, homes))


@given(HOMES, LINKS, st.permutations(range(6)))
def test_the_numbers_of_gpus_do_not_matter(
    homes: list[int], links: Links, numbers: list[int]
) -> None:
    renamed = frozenset((numbers[one], numbers[other]) for one, other in links)
    assert place([numbers[home] for home in homes], renamed) == numbers[place(homes, links)]


def test_one_that_reaches_others_is_better_than_one_that_is_reached() -> None:
    assert place([0, 1, 2], frozenset({(2, 0), (2, 1), (0, 1)})) == 2


def test_without_memory_on_a_gpu_there_is_no_place() -> None:
    with pytest.raises(ValueError, match="no rank"):
        place([], frozenset())
