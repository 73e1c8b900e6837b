"""Joins of local ranks: a seat, the group on this node, and the first epoch."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from time import monotonic
from typing import Any

from allfold_agent.groups.epoch import GroupEpoch
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.registry import PLAN_LAG_SECONDS, GroupRegistry
from allfold_agent.local.memberships import JoinResult
from allfold_agent.membership.group_terms import GroupTerms
from allfold_agent.membership.orchestrator_client import Pauses
from allfold_agent.membership.seats import Entry, RankSeats, check_request
from allfold_core.errors import NodeDraining, PeerMissing
from allfold_core.survival.plans import joining_plan
from allfold_core.survival.term_record import TermRecord

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2
# A plan is on its way for less time than so many ranks of a node take to give up.
_MOST_GONE = 4096
_GONE = "was gone before it was in the group"

Refusing = Callable[[], AbstractAsyncContextManager[None]]


class Joins:
    """Joins ranks of this node to groups. In the event loop of the control plane.

    Args:
        make: makes a group on this node.
        opened: called when a group is open here.
        terms: of the groups of this node.
        refusing: returns a context that raises the error of a node that takes no more ranks, also
            as soon as it takes none.
    """

    def __init__(
        self,
        seats: RankSeats,
        registry: GroupRegistry,
        make: Callable[[Entry], NodeGroup],
        opened: Callable[[NodeGroup], None],
        terms: GroupTerms,
        refusing: Refusing,
    ) -> None:
        self._seats = seats
        self._registry = registry
        self._make = make
        self._opened = opened
        self._terms = terms
        self._refusing = refusing
        self._gone: deque[str] = deque(maxlen=_MOST_GONE)  # the sessions of ranks that gave up

    async def join(self, request: dict[str, Any], *, is_new: bool = True) -> JoinResult:
        """Return the group of a rank, and the first epoch that it is in.

        Args:
            request: see :meth:`RankSeats.join`.
            is_new: the process is in no group on this node. One that is opens sub-groups also while
                the node drains: the others wait for it.

        Raises:
            AllfoldError: it was not let in in time, or refused; or it is no request.
        """
        check_request(request)
        deadline, pauses = monotonic() + float(request["init_timeout"]), Pauses()
        plan_due = float("inf")
        refusing = self._refusing if is_new else nullcontext
        while True:
            try:
                entry = await self._seats.join(request, deadline, refusing())
            except BaseException:
                self._note_gone(request)
                raise
            if self._is_void(entry):
                await asyncio.sleep(_RETRY_SECONDS)  # it registers anew within a second
                continue
            if (record := self._unknown(entry)) is not None:
                plan_due = min(plan_due, monotonic() + PLAN_LAG_SECONDS)
                if monotonic() >= plan_due:
                    self._terms.disown(entry.plan.group, record)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            admission = await self._admit(entry, request, deadline, refusing)
            if admission is not None:
                return admission
            log.info("group '%s' has ended while a rank was to join it", request["group"])
            await asyncio.sleep(min(pauses.draw(), max(0.0, deadline - monotonic())))
            if monotonic() >= deadline:
                raise _always_ended(request)

    def let_in(self, record: TermRecord) -> None:
        """Take part in a group from the moment in which a term says that this node votes in it.

        The other nodes wait for its reports from then on, even if the rank that was to join has
        died.
        """
        try:
            entry = Entry(joining_plan(record), record)
        except ValueError as error:
            log.error("the orchestrator announces a group that cannot be joined: %s", error)
            return
        opening = entry.plan.group, entry.plan.opening
        if self._registry.look_for(*opening, 0.0) is None and not self._registry.is_over(*opening):
            self._take_part(entry)

    def _take_part(self, entry: Entry) -> NodeGroup | None:
        group = self._registry.open(entry.plan, lambda: self._make(entry))
        if group is None:
            return None
        group.begin()
        self._opened(group)
        for session in {*self._gone}.intersection(entry.plan.sessions):
            group.rank_ended(session, _GONE)
        return group

    def _note_gone(self, request: Mapping[str, Any]) -> None:
        """Make the group go on without a rank that is gone but may be in the plan.

        Other ranks of this node may have received the plan, or are about to.
        """
        name, session = request["group"], request["session"]
        self._gone.append(session)
        for group in self._registry.all():
            if group.name == name and session in group.plan.sessions:
                group.rank_ended(session, _GONE)

    def _is_void(self, entry: Entry) -> bool:
        """Return True for a term of another life of the store than this node has registered with.

        It takes no such term, whoever tells of it.
        """
        record = entry.record
        return record is not None and record.generation != self._terms.generation

    def _unknown(self, entry: Entry) -> TermRecord | None:
        """Return the record of a term that takes this node for one that knows the group already.

        The plan with which the group opened may be on its way here, for another rank.
        """
        record = entry.record
        is_unknown = record is not None and self._terms.is_unknown(entry.plan.group, record)
        return record if is_unknown else None

    async def _admit(
        self, entry: Entry, request: dict[str, Any], deadline: float, refusing: Refusing
    ) -> JoinResult | None:
        """Return the way of a seated rank into its group; ``None`` if that is over before."""
        session = request["session"]
        try:
            group, epoch = self._take_part(entry), None
            if group is not None:
                if session in entry.plan.sessions:
                    return JoinResult(group, group.epochs[0])
                epoch = await _first_epoch(group, session, deadline, refusing())
        except BaseException as error:
            # The group counts on this rank, and will not have it.
            reason = "withdrawn" if isinstance(error, PeerMissing | NodeDraining) else "lost"
            await self._give_up_seat(request, reason)
            raise
        if group is None or epoch is None:
            ended = entry.plan.opening if group is None or group.has_no_ranks else 0
            await self._give_up_seat(request, "withdrawn", ended)
            return None
        return JoinResult(group, epoch)

    async def _give_up_seat(self, request: dict[str, Any], reason: str, ended: int = 0) -> None:
        rank = request["rank"] or 0
        await self._seats.give_up_seat(
            request["group"], rank, request["session"], reason, ended=ended
        )


async def _first_epoch(
    group: NodeGroup, session: str, deadline: float, refusing: AbstractAsyncContextManager[None]
) -> GroupEpoch | None:
    """Return the first epoch of a rank that joins a running group; ``None`` if that is over."""
    loop = asyncio.get_running_loop()
    admitted: asyncio.Future[GroupEpoch | None] = loop.create_future()

    def resolve(epoch: GroupEpoch | None) -> None:
        if not admitted.done():
            admitted.set_result(epoch)

    def tell(epoch: GroupEpoch | None) -> None:
        loop.call_soon_threadsafe(resolve, epoch)

    group.join(session, tell)
    try:
        async with refusing, asyncio.timeout(max(0.0, deadline - monotonic())):
            return await admitted
    except BaseException as error:
        group.rank_ended(session, "gave up waiting to be let in")
        if isinstance(error, TimeoutError):
            raise _not_admitted(group) from None
        raise


def _always_ended(request: Mapping[str, Any]) -> PeerMissing:
    """Return the error of a rank whose group was over each time before it was let in."""
    group, seconds = request["group"], request["init_timeout"]
    return PeerMissing(
        f"group '{group}' took in this rank, and ended before it was in, until its {seconds:g} s "
        "were over: the other ranks have left it, or were lost. Start it together with the others, "
        "or give it more time with ALLFOLD_INIT_TIMEOUT or init_timeout=.",
        group=group,
        timeout=seconds,
    )


def _not_admitted(group: NodeGroup) -> PeerMissing:
    """Return the error of a rank that was not let in in time."""
    waits_for = group.deadlines.waits_for() or (
        "its ranks to commit their state"
        if group.plan.options.at_commits
        else "the decision of its nodes"
    )
    return PeerMissing(
        f"group '{group.name}' runs, and has not let this rank in: it waits for {waits_for}. Give "
        "the rank more time with ALLFOLD_INIT_TIMEOUT or init_timeout=.",
        group=group.name,
    )
