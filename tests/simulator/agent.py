"""An agent of the simulation: the real control plane of a node, on a network that is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from allfold_agent.groups.deadlines import Obstacles
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.registry import GroupRegistry
from allfold_agent.joins import Joins
from allfold_agent.local.memberships import JoinResult
from allfold_agent.membership.control_link import ControlLink
from allfold_agent.membership.draining import NodeDrain
from allfold_agent.membership.group_links import GroupLinks
from allfold_agent.membership.group_terms import EarlyNotices, GroupTerms
from allfold_agent.membership.peer_monitor import PeerMonitor
from allfold_agent.membership.registration import Identity, NodeRegistration
from allfold_agent.membership.seats import Entry, RankSeats
from allfold_control.messages import Progress
from allfold_core.errors import AllfoldError, LocalError
from allfold_core.protocol.peer_link import GroupMessage
from allfold_core.survival.instructions import Fetch
from allfold_core.survival.records import Stamp
from allfold_core.survival.suspicion import SuspicionKind
from allfold_core.topology import Member
from allfold_core.verdict import LEFT
from allfold_service.credentials import Credentials
from tests.simulator.channel import Client
from tests.simulator.group import SimulatedGroup
from tests.simulator.links import PeerLinks
from tests.support.virtual_loop import Process

if TYPE_CHECKING:
    from tests.simulator.ranks import Rank
    from tests.simulator.world import World

CLOSE_SECONDS = 0.05
PARKED_SECONDS, PARKED_TRIES = 0.05, 200


class Reactor:
    """The thread that reads the links: here it is the process itself."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def call(self, task: Callable[[], None]) -> None:
        """Do something soon."""
        self._process.call(task)

    def later(self, seconds: float, task: Callable[[], None]) -> None:
        """Do something after a while."""
        self._process.later(seconds, task)


class Agent:
    """One life of an agent's process.

    Attributes:
        node: its name, which is its host's.
        heard_on_edges: by node, when something came on an edge.
        says_goodbye: it was told to end.
    """

    def __init__(self, world: World, node: str) -> None:
        self.world = world
        self.node = node
        self.process = Process(world.loop, node, node)
        self.reactor = Reactor(self.process)
        self.registry = GroupRegistry()
        self.heard_on_edges: dict[str, float] = {}
        self.links: PeerLinks | None = None
        self.says_goodbye = False
        self.process.call(self._begin)

    @property
    def incarnation(self) -> str:
        """The present life of the node, which may be a later one than that of the process."""
        return self.registration.incarnation if self.links is not None else ""

    @property
    def groups(self) -> list[SimulatedGroup]:
        """The groups that are open here."""
        return cast(list[SimulatedGroup], self.registry.all())

    def _begin(self) -> None:
        world, node = self.world, self.node
        client = Client(world, self.process, world.urls_for(node))
        self.registration = NodeRegistration(
            client, node, self._identity, self.registry.all, _probe
        )
        self.links = links = PeerLinks(world, self.process, node, self.registration.incarnation)
        self.notices = EarlyNotices(self.registry)
        reactor = cast(Any, self.reactor)
        self.group_links = GroupLinks(node, cast(Any, links), self.registry, self.notices)
        self.terms = GroupTerms(
            node, lambda: self.registration.incarnation, self.registry, self.notices, reactor
        )
        self.monitor = PeerMonitor(
            cast(Any, links),
            reactor,
            self,
            heard_on_edges=self.group_links.last_heard,
            awaited=self.group_links.awaited,
            clock=world.loop.time,
        )
        self.group_links.on_link_down = self.monitor.look
        self.draining = NodeDrain(node, self.registry.all, self._ask_ranks_to_leave)
        self.control_link = ControlLink(
            client, self.registration, _Listener(self), cast(Credentials, None), client.dial
        )
        self.seats = RankSeats(client, self.control_link, self.registration)
        self._joins = Joins(
            self.seats,
            self.registry,
            self._make_group,
            self._opened,
            self.terms,
            self.draining.refusing,
        )
        self.terms.let_in = self._joins.let_in
        self.terms.register = self.control_link.opened
        self.monitor.start()
        self._keeping = self.process.spawn(self.control_link.keep())
        self.process.spawn(self.seats.keep_giving_back())

    def _identity(self) -> Identity:
        at = self.node
        return Identity(at, f"http://{at}:7401", f"{at}:7402", "cpu", "", "1", 1)

    # What the group, the peer monitor and the control link ask for, as of the real agent

    def suspect(
        self, node: str, incarnation: str, kind: SuspicionKind, since: float, lag: float
    ) -> None:
        self.control_link.suspect(node, incarnation, kind, since, lag)

    def withdraw(self, node: str, incarnation: str, kind: SuspicionKind) -> None:
        self.control_link.withdraw(node, incarnation, kind)

    def send(self, node: str, message: GroupMessage) -> None:
        assert self.links is not None
        self.links.send_message(node, message)

    def joined(self, group: Any, members: Collection[Member]) -> None:
        self.group_links.joined(group, members)

    def left_out(self, group: Any, nodes: Collection[str]) -> None:
        self.group_links.left_out(group, nodes)

    def obstacles(self, group: Any) -> Obstacles:
        return Obstacles(self.group_links.missing(group), self.registration.problem)

    def group_over(self, group: Any) -> None:
        self.process.later(CLOSE_SECONDS, self._close, group)

    def _close(self, group: SimulatedGroup) -> None:
        group.close(0.0)
        if self.registry.remove(group):
            self.group_links.over(group)

    def _make_group(self, entry: Entry) -> NodeGroup:
        group = cast(NodeGroup, SimulatedGroup(self, entry.plan, entry.record))
        self.group_links.opened(group)
        self.terms.opened(group)
        return group

    def _opened(self, group: NodeGroup) -> None:
        self.notices.opened(group)
        self.control_link.opened()

    def end_life(self, how: str) -> None:
        """The orchestrator has evicted this node, so its groups go on without it."""
        assert self.links is not None
        self.terms.evicted(how)
        self.links.renew(self.registration.incarnation)

    def _ask_ranks_to_leave(self, _: str) -> None:
        for rank in self.world.ranks_on(self):
            self.world.network.post(self.process, rank.process, rank.asked_to_leave)

    # Frames and results, on edges

    def send_frame(self, group: SimulatedGroup, node: str, seq: int, stamp: Stamp) -> None:
        """Send a node this one's part of an attempt."""
        self._on_edge(node, lambda there: there._take_frame(self.node, group, seq, stamp))

    def _on_edge(self, node: str, arrive: Callable[[Agent], None]) -> None:
        there = self.world.agents.get(node)
        if there is not None:
            self.world.network.post(self.process, there.process, arrive, there)

    def _twin(self, group: SimulatedGroup) -> SimulatedGroup | None:
        """Return this node's part of a group that another node has, too."""
        found = self.registry.look_for(group.name, group.opening, 0.0)
        return cast(SimulatedGroup | None, found)

    def _take_frame(
        self, node: str, group: SimulatedGroup, seq: int, stamp: Stamp, tries: int = PARKED_TRIES
    ) -> None:
        """Take a frame; it waits for a group that is to open here, perhaps for the second time."""
        self.heard_on_edges[node] = self.world.loop.time()
        twin = self._twin(group)
        if twin is not None and twin.evicted is None:
            twin.take_frame(node, seq, stamp)
        elif tries:
            again = partial(self._take_frame, node, group, seq, stamp, tries - 1)
            self.process.later(PARKED_SECONDS, again)

    def ask_result(self, group: SimulatedGroup, holder: str, each: Fetch) -> None:
        """Ask a holder for the result of an op."""
        self._on_edge(holder, lambda there: there._give_result(self, group, each))

    def _give_result(self, asker: Agent, group: SimulatedGroup, each: Fetch) -> None:
        twin = self._twin(group)
        if twin is not None and twin.holds(each.seq, each.stamp):
            self.world.network.post(self.process, asker.process, group.result_came, each)

    # Ranks

    def join(self, rank: Rank, request: dict[str, Any]) -> None:
        """Let a rank of this node join a group."""
        task = self.process.spawn(self._joins.join(request))
        rank.joining = task

        def resolve(done: asyncio.Task[JoinResult]) -> None:
            error = None if done.cancelled() else done.exception()
            if done.cancelled():
                return
            if error is not None:
                self.world.network.post(self.process, rank.process, rank.refused, error)
                return
            group = cast(SimulatedGroup, done.result().group)
            if rank.process.lives:
                group.ranks[rank.session] = rank
                epoch = done.result().epoch
                assert epoch is not None
                self.world.network.post(
                    self.process, rank.process, rank.admitted, group, epoch.record
                )
            else:
                self.lose(rank, group)

        task.add_done_callback(resolve)

    def lose(self, rank: Rank, group: SimulatedGroup | None) -> None:
        """A rank of this node is dead."""
        if group is None:
            if rank.joining is not None:
                rank.joining.cancel()
            return
        group.rank_ended(rank.session, "died")
        self.process.spawn(self._finish(rank, group, "lost"))

    def leave(self, rank: Rank, group: SimulatedGroup) -> None:
        """A rank leaves in order."""
        group.rank_ended(rank.session, LEFT)
        self.process.spawn(self._finish(rank, group, "finished"))

    async def _finish(self, rank: Rank, group: SimulatedGroup, reason: str) -> None:
        self.draining.look()
        sessions = group.plan.sessions
        number = sessions.index(rank.session) if rank.session in sessions else 0
        await self.seats.give_up_seat(group.name, number, rank.session, reason)
        if group.evicted is not None and group.is_empty:
            self._close(group)

    async def sign_off(self) -> None:
        """End in order: the groups go on without this node."""
        self.says_goodbye = True
        for group in self.groups:
            for session in sorted(group.current.record.sessions_on(self.node)):
                how = "had its node agent stopped"
                group.rank_ended(session, how, withdraws=True)
        await asyncio.sleep(0.5)
        self._keeping.cancel()
        await self.registration.say_goodbye()
        await self.control_link.close()
        self.world.loop.call_soon(self.world.end_agent, self)


class _Listener:
    """The agent, as its control link sees it; see ``NodeListener``."""

    def __init__(self, agent: Agent) -> None:
        self.held = agent.terms.held
        self.has_unsaid = agent.terms.has_unsaid
        self.term = agent.terms.term
        self.evicted = agent.end_life
        self.cleared = agent.monitor.cleared
        self.lag = agent.monitor.lag
        self.heard = agent.monitor.heard
        self.drain = agent.draining.begin
        self.limit = lambda _: None
        self._agent = agent

    def is_draining(self) -> bool:
        return self._agent.draining.reason is not None

    def registered(self, generation: int, out: Collection[str]) -> None:
        self._agent.terms.registered(generation, out)
        self._agent.monitor.again()

    def progress(self) -> list[Progress]:
        return [
            Progress(group=group.name, epoch=group.opening, last_seq=0, in_flight=0)
            for group in self._agent.groups
        ]


def _probe(_: str) -> Any:
    raise LocalError("links are not measured here")


__all__ = ["Agent", "AllfoldError"]
