"""The short lane's protocol: every order of the steps of two ranks and the agent."""

from __future__ import annotations

import pytest

from tests.core.short_lane.protocol_model import Model, Rules, search, without

# Ops whose calls differ.
PROGRAMS = ((), (0,))
BROKEN = (
    ("fence",),
    ("fence", "barrier"),
    ("posts_first",),
    ("undecided",),
    ("no_gaps",),
    ("prefix",),
    ("looks_again",),
    ("since",),
    ("all_done",),
)


@pytest.mark.parametrize("odd", PROGRAMS)
def test_no_two_ranks_end_an_op_in_two_ways_and_every_op_ends(odd: tuple[int, ...]) -> None:
    states, fault = search(Model(Rules(), odd=odd))
    assert fault is None
    assert states > 1_000


@pytest.mark.long
def test_where_every_rank_has_a_fence_behind_its_post_the_barrier_adds_nothing() -> None:
    assert search(Model(without("barrier")))[1] is None


@pytest.mark.long
@pytest.mark.parametrize("rules", BROKEN, ids="-".join)
def test_the_search_finds_a_fault_where_a_rule_is_missing(rules: tuple[str, ...]) -> None:
    faults = [search(Model(without(*rules), odd=odd))[1] for odd in PROGRAMS]
    assert any(faults)
