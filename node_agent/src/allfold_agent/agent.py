"""The agent as a whole: its parts, and the calls between them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Collection
from functools import partial

from allfold_agent import __version__
from allfold_agent.data_port import DataPort
from allfold_agent.edges import link_probe
from allfold_agent.gpu.completions import FencePoller
from allfold_agent.gpu.gpus import Gpus
from allfold_agent.groups.deadlines import Obstacles
from allfold_agent.groups.epoch import NodeResources
from allfold_agent.groups.flight_recorder import Recordings
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.registry import GroupRegistry
from allfold_agent.groups.results import ResultShares, fetch_result
from allfold_agent.http.transport import Transport
from allfold_agent.joins import Joins
from allfold_agent.local.server import LocalServer
from allfold_agent.local.state_transfers import StateTransfers
from allfold_agent.membership.control_link import ControlLink
from allfold_agent.membership.draining import NodeDrain
from allfold_agent.membership.group_links import GroupLinks
from allfold_agent.membership.group_terms import EarlyNotices, GroupTerms, NodeListener
from allfold_agent.membership.links import PeerLinks
from allfold_agent.membership.orchestrator_client import OrchestratorClient
from allfold_agent.membership.peer_monitor import PeerMonitor
from allfold_agent.membership.registration import Identity, NodeRegistration
from allfold_agent.membership.seats import Entry, RankSeats
from allfold_agent.observation.failures import ExitObserver
from allfold_agent.observation.incidents import Incidents
from allfold_agent.observation.link_observer import Retransmits
from allfold_agent.observation.observer import Observer
from allfold_agent.peer_connections import PeerConnections
from allfold_agent.registrar import ControlTasks, RankRegistrar
from allfold_agent.runtime.buffers import BufferPool
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_agent.runtime.reactor import LagMeter, Reactor
from allfold_agent.runtime.threads import WorkerPool
from allfold_agent.settings import AgentSettings
from allfold_agent.tensors.offers import Offers
from allfold_agent.traffic.pacer import Pacer
from allfold_agent.traffic.rates import ZoneBytes
from allfold_core.incident import Incident
from allfold_core.protocol.peer_link import GroupMessage
from allfold_core.survival.suspicion import SuspicionKind
from allfold_core.topology import Member
from allfold_core.verdict import counted
from allfold_service import addresses
from allfold_service.addresses import bound

log = logging.getLogger(__name__)

_IDLE_BUFFER_BYTES = 64 << 20


class NodeAgent:
    """One node. Made inside the running event loop of the control plane.

    Args:
        control: bound to the control port, which uvicorn serves.
        data: bound to the data port.
    """

    def __init__(
        self, settings: AgentSettings, control: socket.socket, data: socket.socket
    ) -> None:
        self.settings = settings
        self.registry = GroupRegistry()
        self.recordings = Recordings()
        credentials = settings.credentials
        self.transport = Transport(credentials, settings.threads)
        self._tasks = ControlTasks()
        # Threads, memory, GPUs
        self._workers = WorkerPool(settings.threads)
        self._reactor = Reactor("allfold-reactor")
        self._edge_reactor = Reactor("allfold-edges")
        self._lane_thread = LaneThread("allfold-short-lane")
        self.buffers = BufferPool(_IDLE_BUFFER_BYTES, self._reactor.later)
        self.lags = {
            "control": LagMeter(self._tasks.loop.call_later),
            "reactor": LagMeter(self._reactor.later),
        }
        self._poller = FencePoller("allfold-gpus")
        self.gpus = Gpus(settings.gpu == "auto", self._poller)
        self.device_type = settings.device_type or ("cuda" if self.gpus.names else "cpu")
        self.retention = ResultShares(settings.retain_bytes)
        self.zone_bytes = ZoneBytes()
        self.pacer = Pacer(settings.name, settings.zone, settings.limit, self._edge_reactor.later)
        peers = PeerConnections(self.transport, self.registry)
        self._resources = self._node_resources(peers)
        self.errors = self._resources.errors
        # Other nodes
        self._orchestrator = OrchestratorClient(settings.orchestrator, credentials)
        self.registration = self._make_registration(control, data)
        self.notices = EarlyNotices(self.registry)
        self.links = PeerLinks(
            settings.name, self.registration.incarnation, self._reactor, peers.dial_link
        )
        self.group_links = GroupLinks(settings.name, self.links, self.registry, self.notices)
        self.terms = self._make_terms()
        self.monitor = self._make_monitor()
        # The orchestrator
        self.draining = NodeDrain(settings.name, self.registry.all, self._ask_ranks_to_leave)
        self.control_link = self._make_control_link()
        self.terms.register = self.control_link.opened
        self.seats = RankSeats(self._orchestrator, self.control_link, self.registration)
        self.incidents = Incidents(settings.name, self._tell_incident)
        self.registrar = self._make_registrar()
        # The data port, and the ranks of this node
        offers = Offers()
        self._transfers = StateTransfers(offers, self.transport)
        self._data = self._make_data_port(data, peers, offers)
        self.local_server = self._make_local_server()
        # Observation
        self.retransmits = Retransmits()
        self._observes = settings.observer == "on"
        self.observer = Observer(
            self.registry.all, self.local_server.processes_of_ranks, self.incidents
        )

    def _node_resources(self, peers: PeerConnections) -> NodeResources:
        return NodeResources(
            self.settings.name,
            workers=self._workers,
            buffers=self.buffers,
            dial=peers.dial_edge,
            reactor=self._reactor,
            edge_reactor=self._edge_reactor,
            pins=self.gpus.pins,
            fetch=partial(fetch_result, self.transport),
            retention=self.retention,
            pacer=self.pacer,
            avoid_slow_links=self.settings.slow_links == "avoid",
            lane_thread=self._lane_thread,
            short_lane=self.settings.short_lane == "on",
        )

    def _make_registration(self, control: socket.socket, data: socket.socket) -> NodeRegistration:
        settings = self.settings
        ports = bound(control), bound(data)
        return NodeRegistration(
            self._orchestrator,
            settings.name,
            lambda: _identify(settings, self.device_type, self._orchestrator.url, *ports),
            self.registry.all,
            lambda address: link_probe.measure(self.transport, address),
        )

    def _make_monitor(self) -> PeerMonitor:
        monitor = PeerMonitor(
            self.links,
            self._reactor,
            self,
            heard_on_edges=self.group_links.last_heard,
            awaited=self.group_links.awaited,
        )
        self.group_links.on_link_down = monitor.look
        return monitor

    def _make_control_link(self) -> ControlLink:
        listener = NodeListener(
            self.terms,
            self.monitor,
            self.registry.all,
            self._end_life,
            self.draining,
            self.pacer.take,
        )
        return ControlLink(
            self._orchestrator, self.registration, listener, self.settings.credentials
        )

    def _make_terms(self) -> GroupTerms:
        return GroupTerms(
            self.settings.name,
            lambda: self.registration.incarnation,
            self.registry,
            self.notices,
            self._reactor,
        )

    def _make_registrar(self) -> RankRegistrar:
        joins = Joins(
            self.seats,
            self.registry,
            self._make_group,
            self._opened,
            self.terms,
            self.draining.refusing,
        )
        self.terms.let_in = joins.let_in
        return RankRegistrar(
            self._tasks,
            self.registry,
            joins,
            self.seats,
            self.draining,
            ExitObserver(self.incidents),
            self.recordings,
            self.group_links,
        )

    def _make_data_port(
        self, data: socket.socket, peers: PeerConnections, offers: Offers
    ) -> DataPort:
        return DataPort(
            data,
            transport=self.transport,
            open_edge=peers.open_edge,
            open_link=self.links.open,
            find_result=peers.find_result,
            offers=offers,
        )

    def _make_local_server(self) -> LocalServer:
        welcome = {"node": self.settings.name, "pid": os.getpid(), "version": __version__}
        return LocalServer(
            self.settings.socket,
            self.registrar,
            welcome,
            reactor=self._reactor,
            workers=self._workers,
            poller=self._poller,
            gpus=self.gpus,
            transfers=self._transfers,
        )

    def start(self) -> None:
        """Serve ranks and peers, and register with the orchestrator as soon as it answers."""
        self._data.start()
        self._reactor.start()
        self._edge_reactor.start()
        self.monitor.start()
        if self._observes:
            self.observer.start()
        for meter in self.lags.values():
            meter.start()
        self._tasks.spawn(self.control_link.keep())
        self._tasks.spawn(self.seats.keep_giving_back())

    async def stop(self) -> None:
        """Take this node out of its groups, sign off, then end every thread."""
        await self.registrar.leave_groups()
        await self._tasks.end()
        await asyncio.to_thread(self.observer.close)
        await self.registration.say_goodbye()
        await self.control_link.close()
        await asyncio.to_thread(self._reactor.close)
        await asyncio.to_thread(self.links.close)
        self.local_server.close()
        self._transfers.close()
        for group in self.registry.all():
            await asyncio.to_thread(group.close, 0.0)
        await asyncio.to_thread(self._edge_reactor.close)
        await asyncio.to_thread(self._lane_thread.close)
        await asyncio.to_thread(self._data.close)
        await asyncio.to_thread(self.transport.close)
        self._poller.close()
        self._workers.close()
        await self._tasks.end()  # what ranks asked for meanwhile
        await self._orchestrator.close()

    # What the peer monitor asks for (the reactor's thread, without waiting)

    def suspect(
        self, node: str, incarnation: str, kind: SuspicionKind, since: float, lag: float
    ) -> None:
        self.control_link.suspect(node, incarnation, kind, since, lag)

    def withdraw(self, node: str, incarnation: str, kind: SuspicionKind) -> None:
        self.control_link.withdraw(node, incarnation, kind)

    # What the observer asks for (any thread, without waiting)

    def _tell_incident(self, found: Incident) -> None:
        """Tell the orchestrator, and the other nodes of the group, so that all say the same."""
        self.control_link.report(found)
        for group in self.registry.all():
            if (group.name, group.opening) == (found.group, found.opening):
                group.tell_others_of(found)

    # What groups ask for (any thread, without waiting)

    def send(self, node: str, message: GroupMessage) -> None:
        self.group_links.send(node, message)

    def joined(self, group: NodeGroup, members: Collection[Member]) -> None:
        self.group_links.joined(group, members)

    def left_out(self, group: NodeGroup, nodes: Collection[str]) -> None:
        self.group_links.left_out(group, nodes)

    def obstacles(self, group: NodeGroup) -> Obstacles:
        return Obstacles(self.group_links.missing(group), self.registration.problem)

    def group_over(self, group: NodeGroup) -> None:
        self.registrar.group_over(group)

    def _make_group(self, entry: Entry) -> NodeGroup:
        plan = entry.plan
        if entry.record is None:
            ranks = counted(plan.world_size, "rank")
            log.info("group '%s' opening %d: %s", plan.group, plan.opening, ranks)
        else:
            nodes = counted(len(plan.members), "node")
            log.info("joining group '%s' opening %d on %s", plan.group, plan.opening, nodes)
        group = NodeGroup(plan, self._resources, self, entry.record)
        self.group_links.opened(group)
        self.terms.opened(group)
        if self._observes:
            self.observer.opened(group)
        return group

    def _opened(self, group: NodeGroup) -> None:
        self.notices.opened(group)
        self.control_link.opened()

    def _ask_ranks_to_leave(self, reason: str) -> None:
        self.local_server.drain(reason)

    def _end_life(self, how: str) -> None:
        """The orchestrator has evicted this node, so its groups go on without it."""
        self.terms.evicted(how)
        self.links.renew(self.registration.incarnation)


def _identify(
    settings: AgentSettings,
    device_type: str,
    orchestrator: str,
    control: tuple[str, int],
    data: tuple[str, int],
) -> Identity:
    def advertised(bound: tuple[str, int]) -> str:
        return addresses.advertised(bound, settings.advertise, orchestrator)

    return Identity(
        node=settings.name,
        control_url=f"{settings.credentials.scheme}://{advertised(control)}",
        data_address=advertised(data),
        device_type=device_type,
        zone=settings.zone,
        version=__version__,
        cores=len(os.sched_getaffinity(0)),
    )
