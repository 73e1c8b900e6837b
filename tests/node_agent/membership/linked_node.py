"""The parts of an agent that keep it registered, with a listener that notes what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from allfold_agent.edges.link_probe import MeasuredLink
from allfold_agent.membership.control_link import ControlLink
from allfold_agent.membership.orchestrator_client import OrchestratorClient
from allfold_agent.membership.registration import Identity, NodeRegistration
from allfold_agent.membership.seats import RankSeats
from allfold_control.messages import Held, Progress
from allfold_control.records import record_fields
from allfold_core.protocol.traffic import Cap
from allfold_core.survival.records import Term
from allfold_core.survival.term_record import TermRecord, Voter
from tests.support.credentials import with_token

IDENTITY = Identity("a", "http://a:1", "a:2", "cpu", "", "0", cores=2)
LINKS = {"near:1": MeasuredLink(1e-4, 1e8), "far:1": MeasuredLink(1e-2, 1e9)}
RECORD = TermRecord(1, Term(1, 1, ("a",), (1,)), {"a": Voter("1", "a:2", "http://a:1")}, (), 1)
FIELDS = record_fields(RECORD)
GROUP: Any = SimpleNamespace(name="train", opening=3)


@dataclass
class NotedByListener:
    """A control link's listener.

    Attributes:
        calls: the names and arguments of all calls that bring news.
        groups: what the node holds.
        unsaid: groups that have opened since it was asked for these.
    """

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    groups: list[Held] = field(default_factory=list)
    unsaid: list[Held] = field(default_factory=list)
    ages: dict[str, float] = field(default_factory=dict)
    incarnation: Callable[[], str] = lambda: ""

    def held(self) -> list[Held]:
        self.groups, self.unsaid = self.groups + self.unsaid, []
        return self.groups

    def has_unsaid(self) -> bool:
        return bool(self.unsaid)

    def registered(self, generation: int, out: Sequence[str]) -> None:
        self.calls.append(("registered", generation, list(out)))

    def term(self, generation: int, group: str, record: TermRecord) -> None:
        self.calls.append(("term", generation, group, record))

    def evicted(self, how: str) -> None:
        self.calls.append(("evicted", self.incarnation(), how))

    def cleared(self, node: str, incarnation: str, patience: float) -> None:
        self.calls.append(("cleared", node, incarnation, patience))

    def lag(self) -> float:
        return 0.25

    def heard(self) -> dict[str, float]:
        return self.ages

    def limit(self, caps: Sequence[Cap]) -> None:
        self.calls.append(("limit", list(caps)))

    def drain(self, reason: str) -> None:
        self.calls.append(("drain", reason))

    def is_draining(self) -> bool:
        return bool(self.of("drain"))

    def progress(self) -> list[Progress]:
        return [Progress(group="train", epoch=1, last_seq=7, in_flight=0)]

    def of(self, kind: str) -> list[list[Any]]:
        return [rest for name, *rest in self.calls if name == kind]


@dataclass
class LinkedNode:
    """One node and what keeps it registered."""

    client: OrchestratorClient
    registration: NodeRegistration
    seats: RankSeats
    link: ControlLink
    listener: NotedByListener
    keeping: asyncio.Task[None]

    async def end(self) -> None:
        """End as an agent does: no more tries, goodbye, and then the link."""
        self.keeping.cancel()
        with suppress(asyncio.CancelledError):
            await self.keeping
        await self.registration.say_goodbye()
        await self.link.close()


@asynccontextmanager
async def linked_node(
    *urls: str,
    probe: Callable[[str], MeasuredLink] = LINKS.__getitem__,
    held: list[Any] | None = None,
    identify: Callable[[], Identity] = lambda: IDENTITY,
    listener: NotedByListener | None = None,
    token: str = "",
) -> AsyncIterator[LinkedNode]:
    """Keep a node registered at these replicas until the end of the block."""
    client = OrchestratorClient(",".join(urls), with_token(token))
    registration = NodeRegistration(client, "a", identify, lambda: held or [], probe)
    noted = listener or NotedByListener()
    noted.incarnation = lambda: registration.incarnation
    link = ControlLink(client, registration, noted, with_token(token))
    seats = RankSeats(client, link, registration)
    keeping = asyncio.create_task(link.keep())
    giving_back = asyncio.create_task(seats.keep_giving_back())
    node = LinkedNode(client, registration, seats, link, noted, keeping)
    try:
        yield node
        assert keeping.cancelled() or not keeping.done()
    finally:
        giving_back.cancel()
        await node.end()
        await client.close()
