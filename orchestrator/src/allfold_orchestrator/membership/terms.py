"""The terms of a group as the orchestrator keeps them: who votes, and if the record is trusted.

Pure: every function returns the next record. The caller writes it only if nobody else has written
since it read the one before (compare-and-set), so the terms of a group are one chain.

A *recalled* record may lack what was decided last, because the store lost something. Agents then
register what they hold, and the record becomes the newest term of all; see :func:`register`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace
from zlib import crc32

from allfold_core.survival.records import Seat, Term
from allfold_core.survival.term_record import Life, Recall, TermRecord, Voter
from allfold_core.topology import Member
from allfold_orchestrator.membership.group_state import AgentRegisters, RankSeat, StoreLife

FIRST_GENERATIONS = 1 << 10
"""A quarter of those that there are, as each further life of the store takes one."""


def store_life(stored: StoreLife | None, run_id: str) -> StoreLife:
    """Return the store's life as it is now; it is another one where the server was started anew.

    A store that has lost all does not know how many lives it had. Its first generation is one by
    chance: the numbers of openings follow from it, and groups of an earlier life may still run.
    """
    if stored is None:
        return StoreLife(1 + crc32(run_id.encode()) % FIRST_GENERATIONS, run_id)
    return stored if stored.run_id == run_id else StoreLife(stored.generation + 1, run_id)


def outgrow(store: StoreLife, reported: int) -> StoreLife:
    """Return a life of the store above a generation that an agent has reported."""
    return replace(store, generation=max(store.generation, reported) + 1)


def seats_of(held: Mapping[int, RankSeat]) -> tuple[Seat, ...]:
    """Return the seats of ranks in their order."""
    return tuple(Seat(seat.session, seat.node.node) for _, seat in sorted(held.items()))


def without_seats(record: TermRecord, sessions: Collection[str]) -> TermRecord:
    """Return the record after ranks have left; the term is the same, as its nodes are."""
    seats = tuple(seat for seat in record.seats if seat.session not in sessions)
    return record if len(seats) == len(record.seats) else replace(record, seats=seats)


def evict(
    record: TermRecord,
    lost: Mapping[Life, str],
    store: StoreLife | None = None,
    until: float = 0.0,
) -> TermRecord | None:
    """Return the record without these lives of nodes; ``None`` if no node with a rank is left.

    Lives that the record does not have change nothing. Voters whose last rank has left go too.

    Args:
        lost: how the loss of each is known.
        store: its life now: a term is of the store that makes it, since an earlier one may have
            made another term of the same number.
        until: the end of the grace, where the record is of an earlier life of the store.
    """
    found = {life[0]: how for life, how in lost.items() if record.has(life)}
    if not found:
        return record
    if store is not None:
        record = recalled(record, store, until)
    seated = {seat.node for seat in record.seats}
    staying = {name for name in record.term.voters if name in seated and name not in found}
    return _narrowed(record, staying, record.term.number + 1, found) if staying else None


def _narrowed(
    record: TermRecord, staying: Set[str], number: int, lost: Mapping[str, str]
) -> TermRecord:
    """Return the record of a new term with some of the voters of the last one."""
    joined = dict(zip(record.term.voters, record.term.joined, strict=True))
    voters = tuple(name for name in record.term.voters if name in staying)
    term = Term(
        number=number,
        generation=record.generation,
        voters=voters,
        joined=tuple(joined[name] for name in voters),
        lost=tuple(sorted(lost.items())),
        newcomers=tuple(each for each in record.term.newcomers if each.node in staying),
    )
    return replace(
        record,
        term=term,
        voters={name: record.voters[name] for name in voters},
        seats=tuple(seat for seat in record.seats if seat.node in staying),
        recall=_after(record.recall, voters),
    )


def without_empty_node(
    record: TermRecord, node: str, store: StoreLife | None, *, was_joining: bool = False
) -> TermRecord | None:
    """Return the record of a term without a node that was let in, and has no rank any more.

    It may never have heard that it was, and the others would wait for its report. ``None`` if
    nothing is to change, or may: a record of an earlier life of the store makes no term.

    Args:
        was_joining: so it may be with a node that was there when the group opened.
    """
    seated = {seat.node for seat in record.seats}
    is_newcomer = any(each.node == node for each in record.term.newcomers)
    is_old = store is not None and record.generation < store.generation
    may_be_unaware = is_newcomer or (was_joining and node in record.voters)
    if not may_be_unaware or node in seated or not seated or record.recall is not None or is_old:
        return None
    staying = {name for name in record.term.voters if name != node}
    lost = {} if is_newcomer else {node: "has lost its ranks before the group opened"}
    return _narrowed(record, staying, record.term.number + 1, lost)


def admit(record: TermRecord, newcomer: Member) -> TermRecord:
    """Return the record of a new term in which a node votes that did not so far."""
    before, number = record.term, record.term.number + 1
    term = Term(
        number=number,
        generation=record.generation,
        voters=(*before.voters, newcomer.node),
        joined=(*before.joined, number),
        newcomers=(*before.newcomers, newcomer),
    )
    return replace(record, term=term, voters={**record.voters, newcomer.node: Voter.of(newcomer)})


# The loss of the record


@dataclass(frozen=True, slots=True)
class Registered:
    """The record after a registration; ``is_out``: the agent is to leave the group."""

    record: TermRecord | None
    is_out: bool = False


def shows_loss(record: TermRecord | None, report: AgentRegisters) -> bool:
    """Return True if an agent knows more than a store that thinks it has lost nothing.

    The store's generation then has to grow above the reported one (:func:`outgrow`), after which
    all agents register again.
    """
    store = report.store
    if report.generation > store.generation:
        return True
    if record is not None and record.generation > store.generation:
        return True  # the store has lost something since: the agent has promised too little
    if report.is_out or not report.held.has(report.life):
        return False
    if record is None:  # where the agent was here before, a new store has the same number
        return report.generation == store.generation
    is_current = record.recall is None and record.generation == store.generation
    return is_current and report.held.follows(record)


def recalled(record: TermRecord, store: StoreLife, until: float) -> TermRecord:
    """Return a record that is no longer trusted if the store has had another life since."""
    if record.generation >= store.generation:
        return record
    return replace(record, generation=store.generation, recall=Recall(until))


def register(record: TermRecord | None, report: AgentRegisters) -> Registered:
    """Return the record after a registration with the store's present life."""
    store, until = report.store, report.until
    if record is not None and report.held.opening < record.opening:
        # The earlier opening is over, whatever it says of it; in the later one it may be all right.
        return Registered(recalled(record, store, until), is_out=True)
    if report.is_out:
        return Registered(record and evict(recalled(record, store, until), _said_so(report)), True)
    if record is None:
        if not report.held.has(report.life):
            return Registered(None, is_out=True)
        held = replace(report.held, generation=store.generation, recall=Recall(until))
        return _noted(held, report)
    record = recalled(record, store, until)
    if record.recall is None:
        return Registered(record, is_out=not record.has(report.life))
    met = _meet(record, report.held)
    if met is None:
        return Registered(record, is_out=True)
    return _noted(_with_known_seats(met, record), report)


def _with_known_seats(met: TermRecord, record: TermRecord) -> TermRecord:
    """Return a record with the seats of the nodes that have registered as themselves know them.

    A node does not know all ranks that have joined on other nodes.
    """
    if met == record or record.recall is None or met.opening != record.opening:
        return met
    known = record.recall.registered & met.voters.keys()
    told = [seat for seat in record.seats if seat.node in known]
    kept = [seat for seat in met.seats if seat.node not in known or seat in told]
    return replace(met, seats=(*kept, *(seat for seat in told if seat not in kept)))


def _noted(record: TermRecord, report: AgentRegisters) -> Registered:
    if not record.has(report.life):
        return Registered(record, is_out=True)
    assert record.recall is not None
    registered = record.recall.registered | {report.life[0]}
    recall = _after(replace(record.recall, registered=registered), record.term.voters)
    seats = _with_own_seats(record, report)
    if recall is None and not seats:
        return Registered(None)  # all ranks have left
    return Registered(replace(record, seats=seats, recall=recall))


def _with_own_seats(record: TermRecord, report: AgentRegisters) -> tuple[Seat, ...]:
    """Return the seats of a record, with those of the reporter's node as itself knows them.

    Its ranks may have come and gone since the term was made, and only the node was told.
    """
    node = report.life[0]
    own = tuple(seat for seat in report.held.seats if seat.node == node)
    kept = tuple(seat for seat in record.seats if seat.node != node or seat in own)
    return (*kept, *(seat for seat in own if seat not in kept))


def _after(recall: Recall | None, voters: Collection[str]) -> Recall | None:
    """Return ``None`` once all voters have registered."""
    return None if recall is None or recall.registered.issuperset(voters) else recall


def _meet(record: TermRecord, held: TermRecord) -> TermRecord | None:
    """Return the record in which a recalled one and a reported one of no earlier opening meet.

    If both are of one chain, the newer one counts. If they are of different chains, the group goes
    on with the nodes that are in both terms, because these know everything that either term
    decided. ``None`` if there are no such nodes.
    """
    mine, other = record.term, held.term
    if held.opening > record.opening:
        return replace(held, generation=record.generation, recall=record.recall)
    if mine == other or mine.may_follow(other):
        return record
    if other.may_follow(mine):
        return replace(held, generation=record.generation, recall=record.recall)
    common = {
        name for name in mine.voters if name in held.voters and _same_life(record, held, name)
    }
    if not common:
        return None
    how = "missed a term, as the orchestrator had lost the record of the group"
    lost = {name: how for name in (*mine.voters, *other.voters) if name not in common}
    return _narrowed(record, common, max(mine.number, other.number) + 1, lost)


def _same_life(one: TermRecord, other: TermRecord, name: str) -> bool:
    return one.voters[name].incarnation == other.voters[name].incarnation


def _said_so(report: AgentRegisters) -> dict[Life, str]:
    return {report.life: "said that it is out of the group"}


def may_evict(
    records: Collection[TermRecord], node: str, *, is_proven: bool, now: float, generation: int = 0
) -> bool:
    """Return True if a node may be evicted; after a loss of its groups' records that takes more.

    A record for which nobody has registered yet with this life of the store may be an old one that
    has come back, in which nodes are missing that go on, and others are not left out yet.

    Args:
        generation: of the store.
        records: of all groups in which the node votes. Its life ends in all of them, so those who
            have registered in one group speak for the others, too.
        is_proven: the node is known to be gone, and not only silent.
    """
    if not records:  # nobody but a member can tell of its silence: a store has lost them
        return is_proven
    if any(record.generation < generation for record in records):
        return False
    recalls = [record.recall for record in records if record.recall is not None]
    missed = [recall for recall in recalls if node not in recall.registered]
    if any(now < recall.until for recall in missed):
        return False
    if is_proven or not missed:
        return is_proven or all(now >= recall.until for recall in recalls)
    voters = {name for record in records for name in record.voters}
    registered = {name for record in records for name in _registered(record)}
    return 2 * len(registered) > len(voters)


def _registered(record: TermRecord) -> Set[str]:
    """Return the voters that are known to have registered since the record was lost."""
    return record.voters.keys() & (
        record.voters if record.recall is None else record.recall.registered
    )
