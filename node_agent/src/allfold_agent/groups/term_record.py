"""The record of a term, which the orchestrator may lose and then asks its nodes for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from allfold_core.survival.plans import term_fields, voter_of
from allfold_core.survival.records import Epoch, Term


def record_of(term: Term, announced: int, known: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record of a term that a node may have learned of from another one.

    Fields that the term does not have are taken from the known record.

    Args:
        announced: the generation of the store that has announced the term.
        known: of this term or an earlier one.
    """
    if known["term"]["number"] >= term.number:
        return known
    voters = {**known["voters"], **{each.node: voter_of(each) for each in term.newcomers}}
    voters = {node: voters[node] for node in term.voters}
    return {**known, "term": term_fields(term), "voters": voters, "generation": announced}


def with_seats(
    record: Mapping[str, Any], epoch: Epoch, node: str, sessions: Collection[str]
) -> Mapping[str, Any]:
    """Return a record with the seats that are taken now; some have come or gone since the term.

    Seats of nodes that the term has left out are no longer taken.

    Args:
        epoch: the newest one. It cannot have the ranks of nodes that have joined after it.
        node: this one.
        sessions: of the ranks that it has, those on their way into the group too.
    """
    term = record["term"]
    joined = dict(zip(term["voters"], term["joined"], strict=True))
    seats = [
        [seat.session, seat.node]
        for seat in epoch.seats
        if (seat.session in sessions if seat.node == node else seat.node in joined)
    ]
    new = {other for other, number in joined.items() if number > epoch.stamp.term}
    seats = [seat for seat in seats if seat[1] == node or seat[1] not in new]
    seats += [[seat, other] for seat, other in record["seats"] if other != node and other in new]
    joining = sorted(set(sessions) - epoch.sessions)
    return {**record, "seats": [*seats, *([session, node] for session in joining)]}
