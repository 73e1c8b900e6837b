"""Registration of this node with the orchestrator, and whether ranks can join at the moment."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Annotated

from pydantic import BaseModel, Field

from allfold_agent.edges.link_probe import MeasuredLink, worse
from allfold_agent.groups.group import NodeGroup
from allfold_agent.membership.orchestrator_client import (
    Forgotten,
    OrchestratorClient,
    parsed,
    refuses_token,
)
from allfold_core.errors import AllfoldError, OrchestratorUnreachable, ServiceError

log = logging.getLogger(__name__)

_GOODBYE_SECONDS = 3.0
# The part of a lease that may go by while links are measured, before the control link is opened.
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


class NodeRegistration:
    """This life of the node, as the orchestrator knows it. The control link keeps it alive.

    Args:
        identify: finds out the identity; may block, and may fail while names cannot be resolved.
        groups: returns the groups that are open on this node.
        probe: measures the link to the agent at a data address; blocks.

    Attributes:
        incarnation: names this life; another one begins when the orchestrator has evicted it.
        beat_seconds: how often the orchestrator wants to hear from this node.
    """

    def __init__(
        self,
        client: OrchestratorClient,
        node: str,
        identify: Callable[[], Identity],
        groups: Callable[[], list[NodeGroup]],
        probe: Callable[[str], MeasuredLink],
    ) -> None:
        self.node = node
        self.identity: Identity | None = None
        self.incarnation = uuid.uuid4().hex
        self._identify = identify
        self._obstacle: AllfoldError | None = OrchestratorUnreachable(
            "not registered with the orchestrator yet"
        )
        self._outage: set[str] = set()
        self._outage_began = 0.0
        self._client = client
        self._groups = groups
        self._probe = probe
        self._link: MeasuredLink | None = None
        self._has_measured = False
        self.beat_seconds = 0.5
        self._lease_seconds = 5.0
        self._is_known = False
        self._registered = asyncio.Event()
        self._refused = asyncio.Event()  # waiting is of no use: somebody has to change the token

    # Readiness

    @property
    def problem(self) -> str | None:
        """The reason for which no rank can join at the moment, ``None`` if ranks can."""
        return None if self._obstacle is None else self._obstacle.message

    async def wait(self, deadline: float) -> None:
        """Wait until the node is registered, and has a control link.

        Raises:
            AllfoldError: it was not by the deadline (monotonic), or the orchestrator refuses its
                token; says what hinders it.
        """
        registered = asyncio.ensure_future(self._registered.wait())
        refused = asyncio.ensure_future(self._refused.wait())
        left = max(0.0, deadline - monotonic())
        try:
            await asyncio.wait(
                [registered, refused], timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            registered.cancel()
            refused.cancel()
        if self._registered.is_set():
            return
        cause = self._obstacle or ServiceError("there was no time left to wait")
        late = "" if self._refused.is_set() else " in time"
        raise self._because_of(cause, f"could not register{late}")

    def unanswered(self) -> AllfoldError:
        """Return the error of a request on the control link that has no answer in time."""
        cause = self._obstacle or OrchestratorUnreachable("it does not answer on the control link")
        return self._because_of(cause, "has no answer of the orchestrator")

    def _because_of(self, cause: AllfoldError, what: str) -> AllfoldError:
        """Return an error of the cause's class, as each class has advice of its own."""
        return type(cause)(f"node {self.node} {what}: {cause.message}", **cause.details)

    def linked(self, url: str) -> None:
        """Note that the control link is open: ranks can join."""
        if self._outage:
            seconds = monotonic() - self._outage_began
            log.info("the orchestrator at %s answers again, after %.1f s", url, seconds)
        self._outage.clear()
        self._obstacle = None
        self._refused.clear()
        self._registered.set()

    def hindered(self, obstacle: AllfoldError, bug: Exception | None = None) -> None:
        """Note that the orchestrator cannot be reached; a problem that lasts is logged once."""
        if refuses_token(obstacle):
            self._refused.set()
        else:
            self._refused.clear()
        if obstacle.message not in self._outage:
            level = logging.ERROR if self._refused.is_set() else logging.WARNING
            log.log(
                level,
                "new ranks cannot join for now, trying again: %s",
                obstacle.message,
                exc_info=bug,
            )
        if not self._outage:
            self._outage_began = monotonic()
        self._outage.add(obstacle.message)
        self._obstacle = obstacle

    def forgotten(self, reason: str) -> None:
        """Note that the orchestrator does not know this life: it has to be registered again."""
        if self._is_known:
            log.info("registering again: %s", reason)
        self._obstacle = ServiceError(f"registering again: {reason}")
        self._is_known = False
        self._registered.clear()

    def renew(self) -> None:
        """Begin another life: this one was evicted, and never comes back."""
        self.forgotten("the orchestrator has evicted this node")
        self.incarnation = uuid.uuid4().hex

    # Requests

    async def enter(self) -> None:
        """Register, if need be; and measure once, so that plans are made for the links there are.

        Not while a job runs: it would disturb the measurement, and be disturbed.
        """
        if self._is_known:
            return
        peers = await self._register()
        self._log_registered()
        if peers and not self._has_measured and not self._groups():
            self._has_measured = True
            self._obstacle = ServiceError("measuring the links to other nodes")
            await self._measure(peers)
            if self._link is not None:
                await self._register()
        self._is_known = True

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
        self.beat_seconds = lease.heartbeat_seconds
        self._lease_seconds = lease.lease_seconds
        self.identity = identity
        return lease.peers

    async def say_goodbye(self) -> None:
        """Deregister, so that the orchestrator need not wait for the end of the lease."""
        if not self._is_known:
            return
        try:
            await self._client.call(
                "DELETE",
                f"/v1/nodes/{self.node}",
                params={"incarnation": self.incarnation},
                timeout=_GOODBYE_SECONDS,
            )
        except (AllfoldError, Forgotten) as error:
            log.info("the orchestrator did not acknowledge that this node leaves: %s", error)
