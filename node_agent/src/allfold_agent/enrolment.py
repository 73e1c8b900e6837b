"""The agent's standing with the orchestrator: registration, heartbeats, and seats for its ranks."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from allfold_agent.group import Group
from allfold_agent.link_probe import Link, worse
from allfold_agent.orchestrator_client import Forgotten, OrchestratorClient
from allfold_core.errors import AllfoldError, OrchestratorUnreachable, PeerMissing, ServiceError
from allfold_core.plan import Plan
from allfold_core.verdict import name_ranks

log = logging.getLogger(__name__)

_POLL_SECONDS = 10.0
_RETRY_SECONDS = 0.5
_GOODBYE_SECONDS = 3.0
# The part of a lease that may go by while links are measured, without a heartbeat.
_MEASURING_SHARE = 0.5


@dataclass(frozen=True)
class Identity:
    """What the agent tells the orchestrator about itself."""

    node: str
    control_url: str
    data_address: str
    device_type: str
    zone: str
    version: str


class Enrolment:
    """Keeps the node registered, and gets its ranks into groups.

    Args:
        identify: finds out what to tell; may wait, and may fail while names cannot be resolved.
        held: the groups that are open on this node.
        probe: measures the link to the agent at a data address; waits.
    """

    def __init__(
        self,
        client: OrchestratorClient,
        node: str,
        identify: Callable[[], Identity],
        held: Callable[[], list[Group]],
        probe: Callable[[str], Link],
    ) -> None:
        self.identity: Identity | None = None
        self._node = node
        self._identify = identify
        self.incarnation = uuid.uuid4().hex
        self.problem: str | None = "not registered with the orchestrator yet"
        self._client = client
        self._held = held
        self._probe = probe
        self._link: Link | None = None
        self._has_measured = False
        self._heartbeat_seconds = 1.0
        self._lease_seconds = 5.0
        self._registered = asyncio.Event()
        self._owed: dict[tuple[str, int, str], str] = {}

    async def keep(self) -> None:
        """Register, then send heartbeats, for ever; every failure is tried again."""
        while True:
            try:
                if not self._registered.is_set():
                    await self._come_in()
                await asyncio.sleep(self._heartbeat_seconds)
                await self._heartbeat()
                self.problem = None
                await self._give_back_seats()
            except Forgotten as error:
                log.info("registering again: %s", error)
                self.problem = f"registering again: {error}"
                self._registered.clear()
            except AllfoldError as error:
                if self.problem != error.message:
                    log.warning("waiting for the orchestrator: %s", error)
                self.problem = error.message
                await asyncio.sleep(_RETRY_SECONDS)

    async def _come_in(self) -> None:
        """Register; and measure once, so that plans are made for the links there are.

        Not while a job runs: it would disturb the measurement, and be disturbed.
        """
        peers = await self._register()
        if peers and not self._has_measured and not self._held():
            self._has_measured = True
            self.problem = "measuring the links to other nodes"
            await self._measure(peers)
            if self._link is not None:
                await self._register()
        self.problem = None
        self._registered.set()

    async def _measure(self, peers: Sequence[str]) -> None:
        """Find the slowest of the links to some peers, as far as they can be measured."""
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
        """Register; the addresses of others that the orchestrator answers with."""
        identity = await asyncio.to_thread(self._identify)
        body = {
            **asdict(identity),
            "incarnation": self.incarnation,
            "link": None if self._link is None else asdict(self._link),
            "holds": {group.name: group.epoch for group in self._held()},
        }
        answer = await self._client.call("POST", "/v1/nodes", json=body)
        self._heartbeat_seconds = float(answer["heartbeat_seconds"])
        self._lease_seconds = float(answer["lease_seconds"])
        self.identity = identity
        log.info("registered with the orchestrator at %s", self._client.url)
        return list(answer.get("peers", ()))

    async def _heartbeat(self) -> None:
        progress = [
            {
                "group": group.name,
                "epoch": group.epoch,
                "last_seq": max(group.last_seq.values()),
                "in_flight": len(group.ops),
            }
            for group in self._held()
        ]
        await self._client.call(
            "POST",
            f"/v1/nodes/{self._node}/heartbeat",
            json={"incarnation": self.incarnation, "progress": progress},
        )

    async def say_goodbye(self) -> None:
        """Tell the orchestrator that the node goes; it would notice by itself, only later."""
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
            log.info("left without the orchestrator's word: %s", error)

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
            AllfoldError: the orchestrator's refusal.
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
        body = {
            key: request[key] for key in ("rank", "session", "world_size", "timeout", "strategies")
        }
        body |= {"node": self._node, "incarnation": self.incarnation}
        while True:
            await self._await_registration(deadline)
            await self._give_back_seats()
            try:
                answer = await self._client.persist(
                    "POST", f"/v1/groups/{request['group']}/ranks", json=body, deadline=deadline
                )
                return int(answer["epoch"])
            except Forgotten:
                # The next heartbeat finds this out as well and registers; wait for that.
                self._registered.clear()

    async def _await_registration(self, deadline: float) -> None:
        try:
            await asyncio.wait_for(self._registered.wait(), max(0.0, deadline - monotonic()))
        except TimeoutError:
            raise OrchestratorUnreachable(
                f"node {self._node} could not register in time: {self.problem}"
            ) from None

    async def _await_plan(self, request: dict[str, Any], epoch: int, deadline: float) -> Plan:
        answer: dict[str, Any] = {"missing": [], "gave_up": []}
        while (left := deadline - monotonic()) > 0:
            wait = min(left, _POLL_SECONDS)
            answer = await self._client.persist(
                "GET",
                f"/v1/groups/{request['group']}/plan",
                params={"epoch": epoch, "session": request["session"], "wait": wait},
                timeout=wait + 5.0,
                deadline=deadline,
            )
            if answer["ready"]:
                return Plan.from_dict(answer["plan"])
        raise _incomplete(request, answer["missing"], answer["gave_up"])

    async def give_up_seat(self, group: str, rank: int, session: str, reason: str) -> None:
        """Leave a group, or its formation; ``reason`` is finished, withdrawn or lost.

        While the orchestrator cannot be reached the seat is still owed, and given back as soon as
        it can: nobody must find it taken by a rank that is long gone.
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
                log.info("rank %d of group '%s' keeps its seat for now: %s", rank, group, error)
                return
            except (AllfoldError, Forgotten) as error:
                # It has cleared the seat by itself: the lease ended, or it lost its memory.
                log.info("rank %d of group '%s' had no seat any more: %s", rank, group, error)
            self._owed.pop((group, rank, session), None)


def _incomplete(request: dict[str, Any], missing: list[int], gave_up: list[int]) -> PeerMissing:
    """The error of a rank that waited in vain.

    Ranks do not start at the same moment, so their time is not over at the same moment either:
    the last one to give up must not name those that were there all along.
    """
    never_came = [rank for rank in missing if rank not in gave_up]
    reasons = []
    if never_came:
        reasons.append(f"{name_ranks(never_came)} of {request['world_size']} did not come")
    if gave_up:
        reasons.append(f"{name_ranks(gave_up)} came, and gave up before")
    why = "; ".join(reasons) or "there was no time left to wait for its ranks"
    return PeerMissing(
        f"group '{request['group']}' is not complete after {request['init_timeout']:g} s: {why}. "
        "Start the missing ranks, or check that all were started with the same group and world "
        "size.",
        missing_ranks=never_came,
        gave_up_ranks=gave_up,
        group=request["group"],
        timeout=request["init_timeout"],
    )
