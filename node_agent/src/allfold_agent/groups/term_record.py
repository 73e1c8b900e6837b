"""The record of a term, which the orchestrator may lose and then asks its nodes for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from allfold_core.survival.records import Epoch, Seat, Term
from allfold_core.survival.term_record import TermRecord, Voter


def record_of(term: Term, announced: int, known: TermRecord) -> TermRecord:
    """Return the record of a term that a node may have learned of from another one.

    Fields that the term does not have are taken from the known record.

    Args:
        announced: the generation of the store that has announced the term.
        known: of this term or an earlier one.
    """
    if known.term.number >= term.number:
        return known
    voters = {**known.voters, **{each.node: Voter.of(each) for each in term.newcomers}}
    voters = {node: voters[node] for node in term.voters}
    return replace(known, term=term, voters=voters, generation=announced)


def with_seats(
    record: TermRecord, epoch: Epoch, node: str, sessions: Collection[str]
) -> TermRecord:
    """Return a record with the seats that are taken now; some have come or gone since the term.

    Seats of nodes that the term has left out are no longer taken.

    Args:
        epoch: the newest one. It cannot have the ranks of nodes that have joined after it.
        node: this one.
        sessions: of the ranks that it has, those on their way into the group too.
    """
    joined = dict(zip(record.term.voters, record.term.joined, strict=True))
    new = {other for other, number in joined.items() if number > epoch.stamp.term} - {node}
    seats = [
        Seat(seat.session, seat.node)
        for seat in epoch.seats
        if (
            seat.session in sessions
            if seat.node == node
            else seat.node in joined and seat.node not in new
        )
    ]
    seats += [seat for seat in record.seats if seat.node in new]
    seats += [Seat(session, node) for session in sorted(set(sessions) - epoch.sessions)]
    return replace(record, seats=tuple(seats))
