"""Registration of this node with the orchestrator, heartbeats, and seats for its ranks."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Annotated, Any

from pydantic import BaseModel, Field

from allfold_agent.groups.group import Group
from allfold_agent.membership.link_probe import Link, worse
from allfold_agent.membership.orchestrator_client import Forgotten, OrchestratorClient, parsed
from allfold_core.errors import AllfoldError, OrchestratorUnreachable, PeerMissing, ServiceError
from allfold_core.plan import Plan
from allfold_core.verdict import name_ranks

log = logging.getLogger(__name__)

_POLL_SECONDS = 10.0
_RETRY_SECONDS = 0.5
_GOODBYE_SECONDS = 3.0
_SEAT_KEYS = ("rank", "session", "world_size", "timeout", "strategies")
# A rank that does not say what a loss means for its group leaves it to the orchestrator's default.
_LOSS_KEYS = ("on_loss", "min_world")
# The part of a lease that may go by while links are measured, without a heartbeat.
_MEASURING_SHARE = 0.5


@dataclass(frozen=True)
class Identity:
    """The agent's own addresses and properties, as registered with the orchestrator."""

    node: str
    control_url: str
    data_address: str
    device_type: str
    zone: str
    version: str
    cores: int


_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Lease(BaseModel):
    """The answer to a registration; ``peers`` are data addresses of other nodes."""

    heartbeat_seconds: _Seconds
    lease_seconds: _Seconds
    peers: list[str] = []


class _Seat(BaseModel):
    """The answer to a rank that takes its seat."""

    epoch: int


class _Place(BaseModel):
    """A rank and its node."""

    rank: int
    node: str


class _Formation(BaseModel):
    """The answer to a question for the plan: the plan, or what it waits for."""

    ready: bool
    plan: dict[str, Any] = {}
    missing: list[int] = []
    gave_up: list[int] = []
    held_by: list[_Place] = []


def _plan(data: dict[str, Any]) -> Plan:
    try:
        return Plan.from_dict(data)
    except (KeyError, TypeError, ValueError) as error:
        raise OrchestratorUnreachable(
            f"the orchestrator's plan cannot be read: {error}; agents and orchestrator should have "
            "the same version"
        ) from error


class Registration:
    """Keeps the node registered, and gets its ranks into groups.

    Args:
        identify: finds out the identity; may block, and may fail while names cannot be resolved.
        groups: returns the groups that are open on this node.
        probe: measures the link to the agent at a data address; blocks.
    """

    def __init__(
        self,
        client: OrchestratorClient,
        node: str,
        identify: Callable[[], Identity],
        groups: Callable[[], list[Group]],
        probe: Callable[[str], Link],
    ) -> None:
        self.identity: Identity | None = None
        self._node = node
        self._identify = identify
        self.incarnation = uuid.uuid4().hex
        self._obstacle: AllfoldError | None = OrchestratorUnreachable(
            "not registered with the orchestrator yet"
        )
        self._client = client
        self._groups = groups
        self._probe = probe
        self._link: Link | None = None
        self._has_measured = False
        self._heartbeat_seconds = 1.0
        self._lease_seconds = 5.0
        self._registered = asyncio.Event()
        self._owed: dict[tuple[str, int, str], str] = {}

    @property
    def problem(self) -> str | None:
        """The reason for which no rank can join at the moment, ``None`` if ranks can."""
        return None if self._obstacle is None else self._obstacle.message

    async def keep(self) -> None:
        """Register, then send heartbeats, until cancelled; every failure is tried again."""
        while True:
            try:
                if not self._registered.is_set():
                    await self._enter()
                await asyncio.sleep(self._heartbeat_seconds)
                await self._heartbeat()
                self._note_recovery()
                await self._give_back_seats()
            except Forgotten as error:
                log.info("registering again: %s", error)
                self._obstacle = ServiceError(f"registering again: {error}")
                self._registered.clear()
            except AllfoldError as error:
                await self._retry_later(error)
            except Exception as error:  # noqa: BLE001 - it is logged
                # Nobody foresaw it, but without heartbeats the node and its ranks would be lost.
                await self._retry_later(ServiceError(f"a heartbeat failed: {error!r}"), error)

    def _note_recovery(self) -> None:
        if self._obstacle is not None:
            log.info("the orchestrator at %s answers again", self._client.url)
        self._obstacle = None

    async def _retry_later(self, obstacle: AllfoldError, bug: Exception | None = None) -> None:
        """Pause before another try; a problem that lasts is logged once."""
        if self.problem != obstacle.message:
            log.warning("not ready, trying again: %s", obstacle.message, exc_info=bug)
        self._obstacle = obstacle
        await asyncio.sleep(_RETRY_SECONDS)

    async def _enter(self) -> None:
        """Register; and measure once, so that plans are made for the links there are.

        Not while a job runs: it would disturb the measurement, and be disturbed.
        """
        peers = await self._register()
        self._log_registered()
        if peers and not self._has_measured and not self._groups():
            self._has_measured = True
            self._obstacle = ServiceError("measuring the links to other nodes")
            await self._measure(peers)
            if self._link is not None:
                await self._register()
        self._obstacle = None
        self._registered.set()

    def _log_registered(self) -> None:
        assert self.identity is not None
        log.info(
            "registered with the orchestrator at %s: control %s, data %s",
            self._client.url,
            self.identity.control_url,
            self.identity.data_address,
        )

    async def _measure(self, peers: Sequence[str]) -> None:
        """Measure the links to some peers, until the time for that is over; keep the slowest."""
        try:
            async with asyncio.timeout(_MEASURING_SHARE * self._lease_seconds):
                for address in peers:
                    await self._measure_one(address)
        except TimeoutError:
            log.info("measuring the links took too long")
        if self._link is not None:
            latency, bandwidth = self._link.latency, self._link.bandwidth
            log.info("slowest link: %.0f us, %.3g B/s", latency * 1e6, bandwidth)

    async def _measure_one(self, address: str) -> None:
        try:
            link = await asyncio.to_thread(self._probe, address)
        except AllfoldError as error:
            log.info("the link to %s was not measured: %s", address, error.message)
        else:
            self._link = worse(self._link, link)

    async def _register(self) -> list[str]:
        """Register; return the data addresses of other nodes that the orchestrator knows."""
        identity = await asyncio.to_thread(self._identify)
        body = {
            **asdict(identity),
            "incarnation": self.incarnation,
            "link": None if self._link is None else asdict(self._link),
            "holds": {group.name: group.opening for group in self._groups()},
        }
        lease = parsed(_Lease, await self._client.call("POST", "/v1/nodes", json=body))
        self._heartbeat_seconds = lease.heartbeat_seconds
        self._lease_seconds = lease.lease_seconds
        self.identity = identity
        return lease.peers

    async def _heartbeat(self) -> None:
        progress = [
            {
                "group": group.name,
                "epoch": group.opening,
                "last_seq": max(group.last_called().values(), default=-1),
                "in_flight": len(group.table.in_flight),
            }
            for group in self._groups()
        ]
        await self._client.call(
            "POST",
            f"/v1/nodes/{self._node}/heartbeat",
            json={"incarnation": self.incarnation, "progress": progress},
        )

    async def say_goodbye(self) -> None:
        """Deregister, so that the orchestrator need not wait for the end of the lease."""
        if not self._registered.is_set():
            return
        try:
            await self._client.call(
                "DELETE",
                f"/v1/nodes/{self._node}",
                params={"incarnation": self.incarnation},
                timeout=_GOODBYE_SECONDS,
            )
        except (AllfoldError, Forgotten) as error:
            log.info("the orchestrator did not acknowledge that this node leaves: %s", error)

    # Ranks

    async def join(self, request: dict[str, Any]) -> Plan:
        """Seat a rank and wait for the plan of its epoch.

        Args:
            request: group, rank, session, world_size, timeout, strategies, and ``init_timeout``,
                the seconds that all of this may take.

        Raises:
            PeerMissing: the group is not complete in time; names the ranks that never came, and
                those that came and gave up earlier.
            OrchestratorUnreachable: no answer in time.
            AllfoldError: the orchestrator's refusal, of the rank or of this node.
        """
        deadline = monotonic() + float(request["init_timeout"])
        seat = request["group"], request["rank"], request["session"]
        try:
            epoch = await self._take_seat(request, deadline)
            return await self._await_plan(request, epoch, deadline)
        except asyncio.CancelledError:
            # The rank died meanwhile: nobody must wait for this seat.
            await self.give_up_seat(*seat, "lost")
            raise
        except BaseException:
            await self.give_up_seat(*seat, "withdrawn")
            raise

    async def _take_seat(self, request: dict[str, Any], deadline: float) -> int:
        body = {key: request[key] for key in _SEAT_KEYS}
        body |= {key: request[key] for key in _LOSS_KEYS if key in request}
        body |= {"node": self._node, "incarnation": self.incarnation}
        while True:
            await self._await_registration(deadline)
            await self._give_back_seats()
            try:
                answer = await self._client.persist(
                    "POST", f"/v1/groups/{request['group']}/ranks", json=body, deadline=deadline
                )
                return parsed(_Seat, answer).epoch
            except Forgotten:
                # The next heartbeat finds this out as well and registers; wait for that.
                self._registered.clear()

    async def _await_registration(self, deadline: float) -> None:
        try:
            await asyncio.wait_for(self._registered.wait(), max(0.0, deadline - monotonic()))
        except TimeoutError:
            raise self._not_registered() from None

    def _not_registered(self) -> AllfoldError:
        """Return the error of the registration itself, as each class has advice of its own."""
        cause = self._obstacle or ServiceError("there was no time left to wait")
        message = f"node {self._node} could not register in time: {cause.message}"
        return type(cause)(message, **cause.details)

    async def _await_plan(self, request: dict[str, Any], epoch: int, deadline: float) -> Plan:
        formation = _Formation(ready=False)
        while (left := deadline - monotonic()) > 0:
            wait = min(left, _POLL_SECONDS)
            answer = await self._client.persist(
                "GET",
                f"/v1/groups/{request['group']}/plan",
                params={"epoch": epoch, "session": request["session"], "wait": wait},
                timeout=wait + 5.0,
                deadline=deadline,
            )
            formation = parsed(_Formation, answer)
            if formation.ready:
                return _plan(formation.plan)
        raise (
            _name_is_held(request, formation)
            if formation.held_by
            else _incomplete(request, formation)
        )

    async def give_up_seat(self, group: str, rank: int, session: str, reason: str) -> None:
        """Leave a group, or its formation; ``reason`` is finished, withdrawn or lost.

        While the orchestrator cannot be reached the seat is kept in a list and given back later:
        the rank is gone, and another one may want to take the seat.
        """
        self._owed[group, rank, session] = reason
        await self._give_back_seats()

    async def _give_back_seats(self) -> None:
        for (group, rank, session), reason in list(self._owed.items()):
            try:
                await self._client.call(
                    "DELETE",
                    f"/v1/groups/{group}/ranks/{rank}",
                    params={"session": session, "reason": reason},
                    timeout=_GOODBYE_SECONDS,
                )
            except ServiceError as error:
                log.info("rank %d of group '%s' stays registered for now: %s", rank, group, error)
                return
            except (AllfoldError, Forgotten) as error:
                # It has freed the seat by itself: the lease ended, or it lost its state.
                log.info("rank %d of group '%s' had left already: %s", rank, group, error)
            self._owed.pop((group, rank, session), None)


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
    return PeerMissing(
        f"group '{request['group']}' is not complete after {request['init_timeout']:g} s: {why}. "
        "Start the missing ranks, or check that all were started with the same group and world "
        "size. Where ranks start further apart, give every rank more seconds with "
        "ALLFOLD_INIT_TIMEOUT or init_timeout=.",
        missing_ranks=never_came,
        gave_up_ranks=gave_up,
        group=request["group"],
        timeout=request["init_timeout"],
    )
