"""Stamps order epochs, terms are a chain, and an epoch keeps the order of those who are left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.survival.records import Epoch, Seat, Stamp, Term

TERMS, ROUNDS, GENERATIONS, BRANCHES = 2**24 - 1, 2**24 - 1, 2**12 - 1, 2**4 - 1
STAMPS = st.builds(
    Stamp,
    st.integers(0, TERMS),
    st.integers(0, ROUNDS),
    st.integers(0, GENERATIONS),
    st.integers(0, BRANCHES),
)


@given(one=STAMPS, other=STAMPS)
def test_packed_stamps_compare_as_stamps_do(one: Stamp, other: Stamp) -> None:
    assert (one < other, one == other) == (one.pack() < other.pack(), one.pack() == other.pack())
    assert Stamp.unpack(one.pack()) == one


def test_the_highest_stamp_fits_into_64_bits() -> None:
    assert Stamp(TERMS, ROUNDS, GENERATIONS, BRANCHES).pack() == 2**64 - 1
    assert Stamp(0, 0, 0).pack() == 0


def term(number: int, **joined: int) -> Term:
    return Term(number, 0, tuple(joined), tuple(joined.values()))


@pytest.mark.parametrize(
    ("newer", "follows"),
    [
        (term(4, a=0, b=0), True),
        (term(3, a=0, b=0), False),
        (term(2, a=0), False),
        (term(4, a=0), True),
        (term(9, b=0, new=5), True),
        (term(4, a=0, c=0), False),  # c was left out once, and never left
        (term(5, a=0, c=4), True),  # c has come back as a new member
    ],
)
def test_a_term_follows_one_of_which_it_has_all_members_that_are_not_newer(
    newer: Term, *, follows: bool
) -> None:
    assert newer.may_follow(term(3, a=0, b=0)) is follows


def test_the_first_voter_leads() -> None:
    assert term(3, b=0, a=0).leader == "b"


EPOCH = Epoch(Stamp(0, 0, 0), 0, tuple(Seat(f"s{n}", "abac"[n]) for n in range(4)))


@given(dead=st.sets(st.sampled_from("0123")), nodes=st.sets(st.sampled_from("abc")))
def test_the_ranks_that_are_left_keep_their_order(dead: set[str], nodes: set[str]) -> None:
    left = EPOCH.remaining({f"s{n}" for n in dead}, nodes)
    assert list(left) == sorted(left)
    for seat in EPOCH.seats:
        assert (seat in left) == (seat.session[1] not in dead and seat.node in nodes)


def test_an_epoch_knows_its_nodes_and_their_ranks() -> None:
    assert EPOCH.nodes == {"a", "b", "c"}
    assert EPOCH.sessions == {"s0", "s1", "s2", "s3"}
    assert EPOCH.sessions_on("a") == {"s0", "s2"}
    assert EPOCH.sessions_on("d") == set()


def test_only_a_rank_that_came_after_an_op_begins_later() -> None:
    seats = (*EPOCH.seats, Seat("s4", "a", 4, 3), Seat("s5", "b", 5, 3), Seat("s6", "c", 6, 4))
    epoch = Epoch(Stamp(0, 1, 0), 1, seats, seated=7)
    found = [sorted(epoch.beginners(seq)) for seq in (0, 2, 3, 4)]
    assert found == [[], [], ["s4", "s5"], ["s6"]]
