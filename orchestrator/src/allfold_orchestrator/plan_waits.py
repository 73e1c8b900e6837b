"""Waits for the plan of a group as it forms, or for the term that admits a rank."""

from __future__ import annotations

import asyncio
from time import monotonic

from allfold_core.errors import PeerLost, ServiceError
from allfold_core.plan import Plan
from allfold_core.survival.term_record import TermRecord
from allfold_orchestrator.membership.group_state import (
    GroupState,
    Opening,
)
from allfold_orchestrator.membership.joining import Finders, has_come_back, takes_in
from allfold_orchestrator.membership.reports import term_record
from allfold_orchestrator.store.failures import Refusal
from allfold_orchestrator.store.store import Store

# How often the first waiter of a group reads it again without a notification, and how old the
# state may be that it reads. It notifies the other waiters: if each of them read every second, the
# service would do nothing else.
RECHECK_SECONDS = 1.0
RECHECK_MAX_AGE = 0.5


async def await_plan(
    store: Store, group: str, opening: int, session: str, wait: float, *, max_age: float = 0.0
) -> Plan | TermRecord | GroupState:
    """Return the plan of the caller's opening once it is complete, else the group as it forms.

    To a rank that joins a group while it runs, return the record of its term.

    Waits for at most ``wait`` seconds.

    Args:
        max_age: of the state that is read first; a caller that was seated by this very replica
            need not ask the store again.

    Raises:
        Refusal: 410, the session has no seat in that opening or a later one.
        ServiceError: the group runs already, or has ended since the rank was seated in it; the rank
            is to join it again.
    """
    deadline = monotonic() + wait
    notifications = store.notifications
    seen: GroupState | None = None
    with notifications.listen(group) as changed:
        while True:
            changed.clear()
            state = await store.groups.read(group, RECHECK_MAX_AGE if seen else max_age)
            found = _find(state, opening, session, store.groups.finders(group))
            remaining = deadline - monotonic()
            if not isinstance(found, GroupState) or remaining <= 0 or notifications.stopping:
                return found
            looks_again = notifications.is_first(group, changed)
            if looks_again and seen is not None and _concerns_waiters(seen, state):
                notifications.notify(group)
            seen = state
            await _wait(changed, min(RECHECK_SECONDS, remaining) if looks_again else remaining)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


def _find(
    state: GroupState, opening: int, session: str, finders: Finders
) -> Plan | TermRecord | GroupState:
    """Return the plan in which the session has a seat, or the group if it has one in its formation.

    The record of the term, if it has come since. The number of a forming opening may rise while it
    forms (see ``NodeHolds``), never fall.
    """
    current, forming, term = state.current, state.forming, state.term
    if current is not None and current.plan.opening >= opening:
        rank = finders.current.rank_of(current.seats, session)
        if rank is not None and not _is_lost(current, rank):
            # All nodes of an opening ask at once: what is to be made for each must not be large.
            is_of_opening = current.plan.sessions[rank : rank + 1] == (session,)
            if is_of_opening:
                return current.plan
            record = term_record(state)
            if record is None:  # its nodes have closed the group, and must not open it anew
                raise ServiceError(f"group {state.group} has ended meanwhile: join it again")
            return record
    if current is None and term is not None and any(s.session == session for s in term.seats):
        return term
    if forming is not None and forming.opening >= opening:
        rank = finders.forming.rank_of(forming.seats, session)
        if rank is not None:
            return state
    if takes_in(state) or has_come_back(state):
        raise ServiceError(f"group {state.group} runs, as its nodes have reported: join it again")
    raise Refusal(410, _seat_gone(state.group, opening, session))


def _is_lost(opening: Opening, rank: int) -> bool:
    reason = opening.departed.get(rank)
    return reason is not None and reason.is_loss


def _concerns_waiters(before: GroupState, now: GroupState) -> bool:
    """Return True if more has changed than that further ranks took their seats."""
    if before is now:
        return False
    if before.current is not now.current or before.forming is None or now.forming is None:
        return True
    return before.forming.departed is not now.forming.departed


def _seat_gone(group: str, opening: int, session: str) -> PeerLost:
    return PeerLost(
        f"this process is not registered in opening {opening} of group {group} (any more): it "
        "left, or the lease of its node ended while the group was forming; register again",
        group=group,
        epoch=opening,
        session=session,
    )
