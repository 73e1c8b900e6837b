"""Seats of this node's ranks in groups: taken, waited for and given back."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from allfold_agent.membership.control_link import ControlLink
from allfold_agent.membership.orchestrator_client import (
    Forgotten,
    OrchestratorClient,
    Pauses,
    parsed,
)
from allfold_agent.membership.registration import NodeRegistration
from allfold_control.messages import Ask, dump
from allfold_control.records import read_record
from allfold_core import group_options
from allfold_core.errors import (
    AllfoldError,
    GroupFull,
    InvalidArgument,
    OrchestratorUnreachable,
    PeerMissing,
    ServiceError,
)
from allfold_core.group_options import digest_of_key
from allfold_core.plan import Plan
from allfold_core.protocol.rank_messages import LONGEST_TIMEOUT
from allfold_core.survival.plans import joining_plan
from allfold_core.survival.term_record import TermRecord
from allfold_core.verdict import name_ranks

log = logging.getLogger(__name__)

# Behind a rank's deadline, for the answer that says who is missing; less than the SDK waits for us.
_ANSWER_SECONDS = 2.0
_RETRY_SECONDS = 0.5
_GIVE_BACK_SECONDS = 3.0
_SEAT_KEYS = ("rank", "session", "world_size", *group_options.NAMES)

_HAS_ENDED = (
    "A group of this name was open before, and has ended: a rank that was to go on in that one has "
    "come too late, and is done if the training is. "
)


class _Place(BaseModel):
    """A rank and its node."""

    rank: int
    node: str


class _Formation(BaseModel):
    """The answer to a join: the plan, the record of a term, or what it still waits for."""

    ready: bool
    plan: dict[str, Any] = {}
    record: dict[str, Any] = {}
    missing: list[int] = []
    gave_up: list[int] = []
    refused: str = ""
    was_open: bool = False
    held_by: list[_Place] = []


@dataclass(frozen=True)
class Entry:
    """The way of a rank into its group.

    Attributes:
        plan: with which the group is opened; where it runs already, its terms and nodes.
        record: of the term in which this node votes, where the group runs already.
    """

    plan: Plan
    record: TermRecord | None = None


@dataclass(frozen=True)
class _Seat:
    group: str
    rank: int
    session: str


@dataclass(eq=False)
class _Debt:
    """A seat that this node has still to give back.

    Attributes:
        was_joining: the plan, or the term, that lets the rank in may be on its way here.
        refused_at: when it could not be given back for the first time (monotonic).
    """

    reason: str
    ended: int = 0
    was_joining: bool = False
    paying: asyncio.Lock = field(default_factory=asyncio.Lock)
    refused_at: float | None = None

    @property
    def said(self) -> dict[str, Any]:
        """The part of the message to the orchestrator that says why the seat is free."""
        return {"reason": self.reason, "ended": self.ended, "was_joining": self.was_joining}


class _Request(BaseModel):
    """The fields of a rank's request that its agent reads; the orchestrator checks the others."""

    group: str
    rank: int | None
    session: str
    init_timeout: float = Field(gt=0, le=LONGEST_TIMEOUT, allow_inf_nan=False)
    key: str = ""


def check_request(request: dict[str, Any]) -> None:
    """Refuse what is no request for a seat: ``InvalidArgument``."""
    try:
        _Request.model_validate(request, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidArgument(f"not a join: {place}: {first['msg']}") from error


class RankSeats:
    """Gets ranks of this node into groups, and their seats back, over the control link.

    Args:
        client: gives seats back where there is no link.
    """

    def __init__(
        self, client: OrchestratorClient, link: ControlLink, registration: NodeRegistration
    ) -> None:
        self._client = client
        self._link = link
        self._registration = registration
        self._owed: dict[_Seat, _Debt] = {}
        self._is_owing = asyncio.Event()

    async def join(
        self,
        request: dict[str, Any],
        deadline: float,
        refusing: AbstractAsyncContextManager[None] | None = None,
    ) -> Entry:
        """Seat a rank in its group.

        Args:
            request: group, rank, session, world_size, the group's options, and ``init_timeout``,
                the seconds that all of this may take.
            deadline: the end of these seconds (monotonic).
            refusing: ends the wait with its own error where this node takes no ranks any more.

        Raises:
            PeerMissing: the group is not complete in time; names the ranks that never came, and
                those that came and gave up earlier.
            OrchestratorUnreachable: no answer in time.
            AllfoldError: the orchestrator's refusal, of the rank or of this node.
        """
        seat = _Seat(request["group"], request["rank"] or 0, request["session"])
        try:
            async with refusing or nullcontext():
                return await self._await_plan(request, deadline)
        except asyncio.CancelledError:
            # The rank died meanwhile: nobody must wait for this seat.
            await self._give_up(seat, _Debt("lost", was_joining=True))
            raise
        except BaseException:
            await self._give_up(seat, _Debt("withdrawn", was_joining=True))
            raise

    async def _await_plan(self, request: dict[str, Any], deadline: float) -> Entry:
        """Join until the answer is the plan; a join that is repeated finds the seat taken by it."""
        formation, failure, pauses = _Formation(ready=False), None, Pauses()
        while monotonic() < deadline:
            await self._registration.wait(deadline)
            # The seat that it asks for may be owed. Those of other groups are nothing to it.
            await self._give_back(request["group"])
            try:
                answer, failure = await self._ask_for_plan(request, deadline), None
            except (Forgotten, ServiceError) as error:
                # Where it was forgotten, the link finds that out too, and the node registers again.
                known, failure = failure, error if isinstance(error, ServiceError) else None
                if failure is not None and known is None:
                    _log_wait(request, failure, deadline)
            else:
                formation = parsed(_Formation, answer)
                if formation.ready:
                    return _entry(formation)
            await asyncio.sleep(min(pauses.draw(), max(0.0, deadline - monotonic())))
        if failure is not None:
            raise _after_waiting(failure, request)
        raise (
            _name_is_held(request, formation)
            if formation.held_by
            else _incomplete(request, formation)
        )

    async def _ask_for_plan(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        seat = {key: request[key] for key in _SEAT_KEYS if key in request}
        seat["join_timeout"] = float(request["init_timeout"])
        seat["key"] = digest_of_key(request["group"], request.get("key", ""))

        def pack(number: int) -> str:  # when it is sent again, time has passed
            node = {"node": self._registration.node, "incarnation": self._registration.incarnation}
            place = {"group": request["group"], "wait": max(0.0, deadline - monotonic())}
            return dump(Ask(type="join", number=number, body=seat | node | place))

        return await self._link.ask(pack, deadline, _ANSWER_SECONDS)

    async def give_up_seat(
        self, group: str, rank: int, session: str, reason: str, *, ended: int = 0
    ) -> None:
        """Leave a group, or its formation; ``reason`` is finished, withdrawn or lost.

        While the orchestrator cannot be reached the seat is kept in a list and given back later:
        the rank is gone, and another one may want to take the seat.

        Args:
            ended: the opening of the group that all other ranks have left, as its nodes agree.
        """
        await self._give_up(_Seat(group, rank, session), _Debt(reason, ended))

    async def _give_up(self, seat: _Seat, debt: _Debt) -> None:
        self._owed[seat] = debt
        await self._pay(seat, debt)

    async def keep_giving_back(self) -> None:
        """Give back, until cancelled, what could not be given back at once."""
        while True:
            await self._is_owing.wait()
            await asyncio.sleep(_RETRY_SECONDS)
            self._is_owing.clear()
            await self._give_back()

    async def _give_back(self, group: str | None = None) -> None:
        """Give back what is owed of a group, or all; together, so that it takes one round trip."""
        owed = [each for each in self._owed.items() if group in (None, each[0].group)]
        await asyncio.gather(*(self._pay(seat, debt) for seat, debt in owed))

    async def _pay(self, seat: _Seat, debt: _Debt) -> None:
        """Give a seat back, once; whoever else wants that meanwhile waits for it."""
        async with debt.paying:
            if self._owed.get(seat) is not debt:
                return
            try:
                await self._leave(seat, debt)
            except ServiceError as error:
                if debt.refused_at is None:
                    debt.refused_at = monotonic()
                    what = seat.rank, seat.group
                    log.info("rank %d of group '%s' stays registered for now: %s", *what, error)
                self._is_owing.set()
                return
            except (AllfoldError, Forgotten) as error:
                # It has freed the seat by itself: the lease ended, or it lost its state.
                log.info("rank %d of group '%s' had left already: %s", seat.rank, seat.group, error)
            if debt.refused_at is not None:
                seconds = monotonic() - debt.refused_at
                text = "rank %d of group '%s' is registered no more, after %.1f s"
                log.info(text, seat.rank, seat.group, seconds)
            if self._owed.get(seat) is debt:
                del self._owed[seat]

    async def _leave(self, seat: _Seat, debt: _Debt) -> None:
        left = {"session": seat.session, **debt.said}
        if not self._link.is_open:
            path = f"/v1/groups/{seat.group}/ranks/{seat.rank}"
            await self._client.call("DELETE", path, params=left, timeout=_GIVE_BACK_SECONDS)
            return
        body = {"group": seat.group, "rank": seat.rank, **left}
        deadline = monotonic() + _GIVE_BACK_SECONDS
        await self._link.ask(
            lambda number: dump(Ask(type="leave", number=number, body=body)), deadline
        )


def _entry(answer: _Formation) -> Entry:
    try:
        if answer.record:
            record = read_record(answer.record)
            return Entry(joining_plan(record), record)
        return Entry(Plan.from_dict(answer.plan))
    except (KeyError, TypeError, ValueError) as error:
        raise OrchestratorUnreachable(
            f"the orchestrator's plan cannot be read: {error}; agents and orchestrator should have "
            "the same version"
        ) from error


def _log_wait(request: dict[str, Any], failure: ServiceError, deadline: float) -> None:
    """Say for how long a rank goes on asking for what it was refused."""
    seconds = max(0.0, deadline - monotonic())
    log.info("a rank of group '%s' waits up to %.3g s: %s", request["group"], seconds, failure)


def _after_waiting(failure: ServiceError, request: dict[str, Any]) -> ServiceError:
    """Return the refusal of a rank that has asked again until its time was over, and says so."""
    if type(failure) not in (ServiceError, GroupFull):
        return failure  # it says so itself, or it is about something else than this rank
    seconds = request["init_timeout"]
    text = f"{failure.message}; this rank has waited {seconds:g} s for that"
    return type(failure)(text, **{**failure.details, "timeout": seconds})


def _name_is_held(request: dict[str, Any], formation: _Formation) -> PeerMissing:
    """Return the error of a rank whose group could not open, as an earlier one has not ended."""
    ranks_on: dict[str, list[int]] = {}
    for place in formation.held_by:
        ranks_on.setdefault(place.node, []).append(place.rank)
    holders = "; ".join(f"{name_ranks(ranks)} on node {node}" for node, ranks in ranks_on.items())
    return PeerMissing(
        f"group '{request['group']}' could not open within {request['init_timeout']:g} s: its name "
        f"is held by an earlier opening that still has {holders}. A group opens anew when the last "
        "rank of the one before has left: end those processes, wait longer for them with "
        "ALLFOLD_INIT_TIMEOUT or init_timeout=, or give this group another name.",
        held_by={node: list(ranks) for node, ranks in ranks_on.items()},
        missing_ranks=formation.missing,
        gave_up_ranks=formation.gave_up,
        group=request["group"],
        timeout=request["init_timeout"],
    )


def _incomplete(request: dict[str, Any], formation: _Formation) -> PeerMissing:
    """Return the error of a rank whose group was not complete in time.

    Ranks do not start at the same moment, so their time is not over at the same moment either:
    the last one to give up must not name those that were there all along.
    """
    gave_up = formation.gave_up
    never_came = [rank for rank in formation.missing if rank not in gave_up]
    reasons = []
    if never_came:
        reasons.append(f"{name_ranks(never_came)} of {request['world_size']} did not come")
    if gave_up:
        reasons.append(f"{name_ranks(gave_up)} came, and gave up before")
    why = "; ".join(reasons) or "there was no time left to wait for its ranks"
    ended = _HAS_ENDED if formation.was_open and never_came else ""
    refused = f"A rank was refused: {formation.refused}. " if formation.refused else ""
    return PeerMissing(
        f"group '{request['group']}' is not complete after {request['init_timeout']:g} s: {why}. "
        f"{refused}{ended}"
        "Start the missing ranks, or check that all were started with the same group and world "
        "size. Where ranks start further apart, give every rank more seconds with "
        "ALLFOLD_INIT_TIMEOUT or init_timeout=.",
        missing_ranks=never_came,
        gave_up_ranks=gave_up,
        group=request["group"],
        timeout=request["init_timeout"],
    )
