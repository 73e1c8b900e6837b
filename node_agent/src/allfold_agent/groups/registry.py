"""The groups of this node by name, for every thread, and the records of their terms."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from allfold_agent.runtime.locks import make_condition
from allfold_core.errors import RegisterNotFirstOperation
from allfold_core.plan import Plan
from allfold_core.survival.records import Epoch, Seat, Term
from allfold_core.survival.term_record import TermRecord, Voter

if TYPE_CHECKING:
    from allfold_agent.groups.group import NodeGroup

# A peer may have got its plan a moment before this node did.
PLAN_LAG_SECONDS = 4.0
_CLOSED_KEPT = 1024


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


class LastTerm(NamedTuple):
    """The newest term that this node has known of a group.

    Attributes:
        number: of the term.
        generation: of the store that has made it.
    """

    number: int
    generation: int


class _End(NamedTuple):
    """The end of an opening on this node.

    Attributes:
        had_no_ranks: all ranks had left, on all nodes; else this node was left out.
        generation: of the store that had opened it. One that has lost everything may count anew.
        term: the newest that this node has known.
    """

    had_no_ranks: bool
    generation: int
    term: LastTerm


class GroupRegistry:
    """Open groups by name; remembers which openings are over.

    A name may be opened anew while ranks of the group that had it before have yet to leave, so
    there may be several groups of one name. The number of its opening tells each from the others.
    """

    def __init__(self) -> None:
        self._changed = make_condition("registry")
        self._groups: dict[str, list[NodeGroup]] = {}
        self._over: dict[tuple[str, int], _End] = {}

    def open(self, plan: Plan, make: Callable[[], NodeGroup]) -> NodeGroup | None:
        """Return the group that a plan opens; the first caller makes it.

        A node that was left out of a group may join it again: then there is another one. A group
        that all ranks have left is over for good (``None``), also where other nodes, or the
        orchestrator, do not know yet: they would take this node for one that remembers its ops.
        """
        with self._changed:
            end = self._over.get((plan.group, plan.opening))
            if end is not None and end.had_no_ranks and end.generation == plan.generation:
                return None
            group = self._opened_as(plan.group, plan.opening)
            if group is None or group.evicted is not None:
                group = make()
                self._groups.setdefault(plan.group, []).append(group)
                self._over.pop((plan.group, plan.opening), None)
                self._changed.notify_all()
            return group

    def _opened_as(self, name: str, opening: int) -> NodeGroup | None:
        newest_first = reversed(self._groups.get(name, ()))
        return next((each for each in newest_first if each.opening == opening), None)

    def find(self, name: str, opening: int, wait: float = 0.0) -> NodeGroup:
        """Return the open group of a name and the number of its opening.

        Args:
            wait: seconds to wait for a plan that is on its way.

        Raises:
            RegisterNotFirstOperation: this node has no such group, or it is over.
        """
        deadline = monotonic() + wait
        with self._changed:
            while (group := self._opened_as(name, opening)) is None:
                left = deadline - monotonic()
                is_over = (name, opening) in self._over
                if is_over or left <= 0:
                    state = "is closed" if is_over else "is not open"
                    raise RegisterNotFirstOperation(
                        f"group '{name}' opening {opening} {state} here"
                    )
                self._changed.wait(timeout=left)
            return group

    def look_for(self, name: str, opening: int, wait: float) -> NodeGroup | None:
        """Like :meth:`find`; ``None`` where there is none, for news that only a group can use."""
        try:
            return self.find(name, opening, wait)
        except RegisterNotFirstOperation:
            return None

    def is_over(self, name: str, opening: int) -> bool:
        """Return True if a group was open here and will not be again."""
        with self._changed:
            return (name, opening) in self._over

    def had_no_ranks(self, name: str, opening: int) -> bool:
        """Return True if a group is over here because all of its ranks had left, on all nodes."""
        with self._changed:
            end = self._over.get((name, opening))
            return end is not None and end.had_no_ranks

    def last_term(self, name: str, opening: int) -> LastTerm | None:
        """Return the newest term that was known here of a group that is over; else ``None``.

        It is over also where it is still open here, and goes on without this node.
        """
        with self._changed:
            end = self._over.get((name, opening))
            group = self._opened_as(name, opening)
            if group is None:
                return None if end is None else end.term
            return None if group.evicted is None else _last_term(group)

    def remove(self, group: NodeGroup) -> bool:
        """Forget a group that is over; return False if that was done before."""
        with self._changed:
            groups = self._groups.get(group.name, [])
            is_here = group in groups
            if is_here:
                groups[:] = [each for each in groups if each is not group]
                if not groups:
                    del self._groups[group.name]
                # Now that it is out: a newer group of the same opening may be there still.
                self._remember_end(group)
            self._changed.notify_all()
            return is_here

    def _remember_end(self, group: NodeGroup) -> None:
        if self._opened_as(group.name, group.opening) is not None:
            return  # this node is in it again
        end = _End(group.has_no_ranks, group.plan.generation, _last_term(group))
        self._over[group.name, group.opening] = end
        while len(self._over) > _CLOSED_KEPT:
            del self._over[next(iter(self._over))]

    def all(self) -> list[NodeGroup]:
        """The open groups; of one name, the newest last."""
        with self._changed:
            return [group for groups in self._groups.values() for group in groups]


def _last_term(group: NodeGroup) -> LastTerm:
    term = group.agreement.term
    return LastTerm(term.number, term.generation)
