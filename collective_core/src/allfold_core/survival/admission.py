"""The ranks that join a running group, and those that leave it in order. Pure.

Ranks join between two ops: before any op, or only where all ranks commit their state. In the second
case, a round first announces that a rank waits. Every rank is told so with the outcome of the same
op, and stops at its next commit, a *boundary*. When all ranks have reached the boundary, another
round changes the members. If too few are left to go on, they all stop at one and wait for others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from allfold_core.survival.judge import describe_change, packed
from allfold_core.survival.plans import GroupPolicy
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import Wishes
from allfold_core.verdict import LEFT

# Waits beside the sessions of an epoch with too few ranks: whoever may come to join them.
OTHERS = "*"


@dataclass(frozen=True)
class Change:
    """A change of a group's members.

    Attributes:
        newcomers: the sessions that join, each with its node.
        leavers: the sessions that leave.
        at_boundary: the next op of the ranks that wait at a boundary; 0 if the change needs none.
    """

    newcomers: tuple[tuple[str, str], ...]
    leavers: frozenset[str] = frozenset()
    at_boundary: int = 0

    def apply(self, policy: GroupPolicy, before: Epoch, stamp: Stamp, first: int) -> Epoch:
        """Return the epoch after the change.

        Args:
            first: the first op of the newcomers.
        """
        staying = before.remaining(self.leavers, before.nodes)
        seats = tuple(
            Seat(session, node, number, first)
            for number, (session, node) in enumerate(self.newcomers, before.seated)
        )
        gone = {seat: LEFT for seat in before.seats if seat.session in self.leavers}
        change = describe_change(policy.group, before, gone, (*staying, *seats))
        return Epoch(
            stamp,
            before.ordinal + 1,
            (*staying, *seats),
            packed(change),
            before.layout,
            before.seated + len(seats),
            boundaries=before.boundaries,
        )


def possible_change(
    policy: GroupPolicy,
    term: Term,
    epoch: Epoch,
    wishes: Mapping[str, Wishes],
    dead: Collection[str] = (),
) -> Change | None:
    """Return the change of the members that can be made now; ``None`` if there is none.

    Args:
        epoch: the current one.
        wishes: by node.
        dead: the sessions that have ended; their wishes are ignored.
    """
    if not epoch.seats:
        return None  # the group is over
    leavers = _leavers(policy, epoch, wishes)
    newcomers = _newcomers(policy, term, epoch, wishes, leavers, dead)
    if not (newcomers or leavers):
        return None
    if not policy.options.at_commits:
        return Change(newcomers) if newcomers else None
    arrived = {s: seq for each in wishes.values() for s, seq in each.at_boundary.items()}
    if not epoch.waiting or not epoch.sessions <= arrived.keys():
        return None
    return Change(newcomers, leavers, max(arrived[session] for session in epoch.sessions))


def waiting_sessions(
    policy: GroupPolicy,
    term: Term,
    epoch: Epoch,
    wishes: Mapping[str, Wishes],
    dead: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the sessions for which all ranks are to stop at their next commit."""
    if not policy.options.at_commits:
        return ()
    leavers = _leavers(policy, epoch, wishes)
    newcomers = _newcomers(policy, term, epoch, wishes, leavers, dead)
    sessions = (*(session for session, _ in newcomers), *sorted(leavers.difference(dead)))
    return (*sessions, OTHERS) if _awaits_others(policy, epoch) else sessions


def is_due(policy: GroupPolicy, term: Term, epoch: Epoch, wishes: Mapping[str, Wishes]) -> bool:
    """Return True if a round would change the members, or announce that somebody waits."""
    if not policy.options.is_elastic:
        return False
    waiting = waiting_sessions(policy, term, epoch, wishes)
    return waiting != epoch.waiting or possible_change(policy, term, epoch, wishes) is not None


def announce(epoch: Epoch, waiting: tuple[str, ...]) -> Epoch:
    """Return the epoch with the sessions that wait to join or to leave."""
    begins = bool(waiting) and not epoch.waiting
    return replace(epoch, waiting=waiting, boundaries=epoch.boundaries + begins)


def with_others_awaited(policy: GroupPolicy, epoch: Epoch) -> Epoch:
    """Return an epoch whose ranks stop at their next boundary if they are too few to go on."""
    if OTHERS in epoch.waiting or not _awaits_others(policy, epoch):
        return epoch
    return announce(epoch, (*epoch.waiting, OTHERS))


def _awaits_others(policy: GroupPolicy, epoch: Epoch) -> bool:
    is_small = bool(epoch.seats) and policy.is_too_small(epoch)
    return policy.options.is_elastic and policy.options.at_commits and is_small


def _leavers(policy: GroupPolicy, epoch: Epoch, wishes: Mapping[str, Wishes]) -> frozenset[str]:
    if not policy.options.at_commits:
        return frozenset()  # there a rank leaves without asking
    asking = {session for each in wishes.values() for session in each.leave}
    return epoch.sessions & asking


def _newcomers(
    policy: GroupPolicy,
    term: Term,
    epoch: Epoch,
    wishes: Mapping[str, Wishes],
    leavers: Collection[str],
    dead: Collection[str],
) -> tuple[tuple[str, str], ...]:
    """The sessions for which there is room, in the order of the voters."""
    if policy.options.max_world is None:
        return ()
    room = policy.options.max_world - len(epoch.seats) + len(leavers)
    ready = [
        (session, node)
        for node in term.voters
        if node in wishes
        for session in wishes[node].join
        if session not in epoch.sessions and session not in dead
    ]
    return tuple(ready[: max(0, room)])
