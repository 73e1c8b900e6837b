"""The agent as a whole: its parts, and the calls between them."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from functools import partial
from logging import INFO, WARNING
from time import monotonic
from typing import Any

from allfold_agent import __version__
from allfold_agent.data_port import DataPort
from allfold_agent.edges import link_probe
from allfold_agent.gpu.completions import FencePoller
from allfold_agent.gpu.gpus import Gpus
from allfold_agent.groups.agreeing_group import AgreeingGroup
from allfold_agent.groups.epoch import NodeResources
from allfold_agent.groups.flight_recorder import Recordings
from allfold_agent.groups.group import Group
from allfold_agent.groups.registry import Registry
from allfold_agent.groups.result_transfer import fetch_result
from allfold_agent.groups.results import Retention
from allfold_agent.groups.standstill import Obstacles
from allfold_agent.http.transport import Transport
from allfold_agent.joins import Joins
from allfold_agent.local.rank_connection import Membership
from allfold_agent.local.server import PROCESS_ENDED, Admission, LocalServer
from allfold_agent.local.state_transfers import StateTransfers
from allfold_agent.membership.control_link import ControlLink
from allfold_agent.membership.control_listener import NodeOnControlLink
from allfold_agent.membership.draining import Draining
from allfold_agent.membership.group_links import GroupLinks
from allfold_agent.membership.group_terms import EarlyNotices, GroupTerms
from allfold_agent.membership.links import PeerLinks
from allfold_agent.membership.orchestrator_client import OrchestratorClient
from allfold_agent.membership.registration import Identity, Registration
from allfold_agent.membership.seats import Entry, Seats
from allfold_agent.membership.witness import Witness
from allfold_agent.observation.failures import ExitObserver
from allfold_agent.observation.incidents import Incidents
from allfold_agent.observation.link_observer import Retransmits
from allfold_agent.observation.observer import Observer
from allfold_agent.peer_connections import PeerConnections
from allfold_agent.runtime.buffers import BufferPool
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_agent.runtime.reactor import LagMeter, Reactor
from allfold_agent.runtime.threads import WorkerPool
from allfold_agent.settings import AgentSettings
from allfold_agent.tensors.offers import Offers
from allfold_core.errors import AgentLost
from allfold_core.incident import Incident
from allfold_core.protocol.peer_link import GroupMessage
from allfold_core.survival.suspicion import Charge
from allfold_core.topology import Member
from allfold_core.verdict import counted
from allfold_service import addresses
from allfold_service.addresses import bound

log = logging.getLogger(__name__)

_IDLE_BUFFER_BYTES = 64 << 20
_LINGER_SECONDS = 5.0
# After the end of a group, until nobody uses it any more.
_COLLECT_SECONDS = 0.5
# How long a rank that leaves waits for the others to agree that it has.
_DEPARTURE_SECONDS = 2.0
_STOPPED = "the node agent was told to end while the rank waited for its group"


class Agent:
    """One node. Made inside the running event loop of the control plane.

    Args:
        control: bound to the control port, which uvicorn serves.
        data: bound to the data port.
    """

    def __init__(
        self, settings: AgentSettings, control: socket.socket, data: socket.socket
    ) -> None:
        self.settings = settings
        self.registry = Registry()
        self.recordings = Recordings()
        credentials = settings.credentials
        self.transport = Transport(credentials, settings.threads)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        # Threads, memory, GPUs
        self._workers = WorkerPool(settings.threads)
        self._reactor = Reactor("allfold-reactor")
        self._lane_thread = LaneThread("allfold-short-lane")
        self.buffers = BufferPool(_IDLE_BUFFER_BYTES, self._reactor.later)
        self.lags = {
            "control": LagMeter(self._loop.call_later),
            "reactor": LagMeter(self._reactor.later),
        }
        self._poller = FencePoller("allfold-gpus")
        self.gpus = Gpus(settings.gpu == "auto", self._poller)
        self.device_type = settings.device_type or ("cuda" if self.gpus.names else "cpu")
        self.retention = Retention(settings.retain_bytes)
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
        self.witness = self._make_witness()
        # The orchestrator
        self.draining = Draining(settings.name, self.registry.all, self._ask_ranks_to_leave)
        self.control_link = self._make_control_link()
        self.terms.register = self.control_link.opened
        self.seats = Seats(self._orchestrator, self.control_link, self.registration)
        self._joins = self._make_joins()
        # The data port, and the ranks of this node
        offers = Offers()
        self._transfers = StateTransfers(offers, self.transport)
        self._data = self._make_data_port(data, peers, offers)
        self.local_server = self._make_local_server()
        # Observation
        self.incidents = Incidents(settings.name, self._tell_incident)
        self.retransmits = Retransmits()
        self._exits = ExitObserver(self.incidents)
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
            pins=self.gpus.pins,
            fetch=partial(fetch_result, self.transport),
            retention=self.retention,
            avoid_slow_links=self.settings.slow_links == "avoid",
            lane_thread=self._lane_thread,
            short_lane=self.settings.short_lane == "on",
        )

    def _make_registration(self, control: socket.socket, data: socket.socket) -> Registration:
        settings = self.settings
        ports = bound(control), bound(data)
        return Registration(
            self._orchestrator,
            settings.name,
            lambda: _identify(settings, self.device_type, self._orchestrator.url, *ports),
            self.registry.all,
            lambda address: link_probe.measure(self.transport, address),
        )

    def _make_witness(self) -> Witness:
        witness = Witness(
            self.links,
            self._reactor,
            self,
            heard_on_edges=self.group_links.last_heard,
            awaited=self.group_links.awaited,
        )
        self.group_links.on_link_down = witness.look
        return witness

    def _make_control_link(self) -> ControlLink:
        listener = NodeOnControlLink(
            self.terms, self.witness, self.registry.all, self._end_life, self.draining
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

    def _make_joins(self) -> Joins:
        joins = Joins(
            self.seats,
            self.registry,
            self._make_group,
            self._opened,
            self.terms,
            self.draining.refusing,
        )
        self.terms.let_in = joins.let_in
        return joins

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
            self,
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
        self.witness.start()
        if self._observes:
            self.observer.start()
        for meter in self.lags.values():
            meter.start()
        self._spawn(self.control_link.keep())
        self._spawn(self.seats.keep_giving_back())

    async def stop(self) -> None:
        """Have the groups go on without this node, sign off, then end every thread."""
        await asyncio.gather(*map(self._leave, self.registry.all()))
        await self._end_tasks()
        await asyncio.to_thread(self.observer.close)
        await self.registration.say_goodbye()
        await self.control_link.close()
        await asyncio.to_thread(self._reactor.close)
        await asyncio.to_thread(self.links.close)
        self.local_server.close()
        self._transfers.close()
        for group in self.registry.all():
            await asyncio.to_thread(group.close, 0.0)
        await asyncio.to_thread(self._lane_thread.close)
        await asyncio.to_thread(self._data.close)
        await asyncio.to_thread(self.transport.close)
        self._poller.close()
        self._workers.close()
        await self._end_tasks()  # what ranks asked for meanwhile
        await self._orchestrator.close()

    async def _end_tasks(self) -> None:
        """Cancel the tasks of the control plane; the last words of some are requests."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave(self, group: Group) -> None:
        """End the local ranks of a group, and let the nodes agree on that without orchestrator."""
        sessions = [seat.session for seat in group.current.record.seats if seat.node == group.node]
        for session in sessions:
            group.rank_ended(session, "had its node agent stopped", withdraws=True)
        departures = (
            asyncio.to_thread(group.await_departure, session, _DEPARTURE_SECONDS)
            for session in sessions
        )
        await asyncio.gather(*departures)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine of the control plane; its failure is logged, never lost."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the control plane failed", exc_info=error)

    def _from_thread(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(self._spawn, work)

    # What the local server asks for (any thread, without waiting)

    def groups(self) -> list[Group]:
        return self.registry.all()

    def join(self, request: dict[str, Any], *, is_new: bool = True) -> Future[Admission]:
        future: Future[Admission] = Future()
        self._loop.call_soon_threadsafe(self._start_join, request, future, is_new)
        return future

    def _start_join(
        self, request: dict[str, Any], future: Future[Admission], is_new: bool = True
    ) -> None:
        """Not ``run_coroutine_threadsafe``, which loses a result that a cancellation crosses."""
        task = self._loop.create_task(self._joins.join(request, is_new=is_new))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def resolve(done: asyncio.Task[Admission]) -> None:
            error = AgentLost(_STOPPED) if done.cancelled() else done.exception()
            if not future.set_running_or_notify_cancel():
                if error is None:  # the rank is dead, and has a seat
                    self.lose(Membership(request["session"], done.result().group))
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())

        def withdraw(cancelled: Future[Admission]) -> None:
            if cancelled.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(resolve)
        future.add_done_callback(withdraw)

    def leave(self, membership: Membership, how: str, failed: bool) -> Future[None]:
        gone: Future[None] = Future()
        rank = _describe(membership)
        log.log(WARNING if failed else INFO, "%s of '%s' %s", rank, membership.group.name, how)
        if failed:
            self._exits.note(membership.group, membership.session, how)
        self._from_thread(self._finish_leaving(membership, how, failed, gone))
        return gone

    def lose(
        self, membership: Membership, reason: str = PROCESS_ENDED, *, withdraws: bool = False
    ) -> None:
        if reason == PROCESS_ENDED:
            self._exits.note(membership.group, membership.session, reason)
        membership.group.rank_ended(membership.session, reason, withdraws=withdraws)
        self._from_thread(self._finish_loss(membership))

    # What the witness asks for (the reactor's thread, without waiting)

    def accuse(self, node: str, incarnation: str, charge: Charge, since: float, lag: float) -> None:
        self.control_link.accuse(node, incarnation, charge, since, lag)

    def withdraw(self, node: str, incarnation: str, charge: Charge) -> None:
        self.control_link.withdraw(node, incarnation, charge)

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

    def joined(self, group: AgreeingGroup, members: Collection[Member]) -> None:
        self.group_links.joined(group, members)

    def left_out(self, group: AgreeingGroup, nodes: Collection[str]) -> None:
        self.group_links.left_out(group, nodes)

    def obstacles(self, group: AgreeingGroup) -> Obstacles:
        return Obstacles(self.group_links.missing(group), self.registration.problem)

    def group_over(self, group: AgreeingGroup) -> None:
        self._from_thread(self._close(group))

    def _make_group(self, entry: Entry) -> Group:
        plan = entry.plan
        if entry.record is None:
            ranks = counted(plan.world_size, "rank")
            log.info("group '%s' opening %d: %s", plan.group, plan.epoch, ranks)
        else:
            nodes = counted(len(plan.members), "node")
            log.info("joining group '%s' opening %d on %s", plan.group, plan.epoch, nodes)
        group = Group(plan, self._resources, self, entry.record)
        self.group_links.opened(group)
        self.terms.opened(group)
        if self._observes:
            self.observer.opened(group)
        return group

    def _opened(self, group: Group) -> None:
        self.notices.opened(group)
        self.control_link.opened()

    async def _finish_leaving(
        self, membership: Membership, how: str, failed: bool, gone: Future[None]
    ) -> None:
        group, session = membership.group, membership.session
        # Whoever sent to this rank must know that it has received before it hears that it is gone.
        await asyncio.to_thread(group.finish_messages, monotonic() + _LINGER_SECONDS)
        group.rank_ended(session, how)
        try:
            await asyncio.gather(
                asyncio.to_thread(group.await_departure, session, _DEPARTURE_SECONDS),
                self._give_up_seat(membership, "lost" if failed else "finished"),
            )
        finally:
            gone.set_result(None)
            self.draining.look()
        await self._close_if_evicted(group)

    async def _finish_loss(self, membership: Membership) -> None:
        self.draining.look()
        await self._give_up_seat(membership, "lost")
        await self._close_if_evicted(membership.group)

    async def _give_up_seat(self, membership: Membership, reason: str) -> None:
        group, session = membership.group, membership.session
        sessions = group.plan.sessions
        rank = sessions.index(session) if session in sessions else 0  # found by its session
        await self.seats.give_up_seat(group.name, rank, session, reason)

    async def _close_if_evicted(self, group: Group) -> None:
        """Any other group is over when all nodes have agreed that no rank is left."""
        if group.evicted is not None and group.is_empty:
            await self._close(group)

    async def _close(self, group: AgreeingGroup) -> None:
        await asyncio.to_thread(group.close, _LINGER_SECONDS)
        if self.registry.remove(group):
            self.recordings.keep(group)
            self.group_links.over(group)
            # Its parts refer to each other, and some hold files. What came with the process is
            # frozen, so to look through the rest takes some milliseconds.
            self._loop.call_later(_COLLECT_SECONDS, gc.collect)

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


def _describe(membership: Membership) -> str:
    epoch = membership.epoch
    return "a rank" if epoch is None else f"rank {epoch.rank_of(membership.session)}"
