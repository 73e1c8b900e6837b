"""The report of a node on a group whose record the orchestrator has lost."""

from __future__ import annotations

from dataclasses import replace

from allfold_agent.groups.registry import with_seats
from allfold_core.survival.records import NO_EPOCH, Epoch, Seat, Stamp, Term
from allfold_core.survival.term_record import TermRecord, Voter

RECORD = TermRecord(
    opening=1,
    term=Term(2, 1, ("a", "b", "c"), (1, 1, 2)),
    voters={node: Voter("1", f"{node}:1", f"http://{node}:2") for node in "abc"},
    seats=(Seat("s0", "a"), Seat("s1", "b"), Seat("s2", "c")),
    generation=1,
)


def seats(epoch: Epoch, node: str, *sessions: str) -> list[str]:
    record = with_seats(RECORD, epoch, node, sessions)
    assert replace(record, seats=RECORD.seats) == RECORD
    return [seat.session for seat in record.seats]


def epoch_of(term: int, *held: tuple[str, str]) -> Epoch:
    return Epoch(Stamp(term, 0, 0), 1, tuple(Seat(*seat) for seat in held))


def test_ranks_that_have_left_are_not_reported() -> None:
    epoch = epoch_of(2, ("s0", "a"), ("s2", "c"))
    assert seats(epoch, "a", "s0") == ["s0", "s2"]
    assert seats(epoch, "a") == ["s2"], "it has ended, and the nodes have yet to agree upon that"


def test_ranks_that_have_joined_since_are_reported() -> None:
    epoch = epoch_of(2, ("s0", "a"), ("s1", "b"), ("s2", "c"), ("s3", "b"))
    assert seats(epoch, "b", "s1", "s3") == ["s0", "s1", "s2", "s3"]
    assert seats(epoch, "b", "s1", "s3", "joining") == ["s0", "s1", "s2", "s3", "joining"]


def test_a_node_that_the_newest_epoch_cannot_have_is_reported_as_the_term_has_it() -> None:
    epoch = epoch_of(1, ("s0", "a"), ("s3", "a"))
    assert seats(epoch, "a", "s0", "s3") == ["s0", "s3", "s2"]


def test_a_node_that_is_not_in_the_group_yet_reports_the_others_as_the_term_has_them() -> None:
    assert seats(NO_EPOCH, "c", "s2") == ["s0", "s1", "s2"]


def test_ranks_of_a_node_that_a_term_has_left_out_are_not_reported() -> None:
    epoch = epoch_of(1, ("s0", "a"), ("lost", "x"), ("before", "c"))
    assert seats(epoch, "a", "s0") == ["s0", "s2"], "nor those of the earlier life of a node"
