"""The agent as a whole: who calls whom."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import Any

from allfold_agent import __version__, addresses, http_client, link_probe
from allfold_agent.buffers import BufferPool
from allfold_agent.data_server import DataServer, SocketTaker
from allfold_agent.edge_request import EdgeRequest, Lane
from allfold_agent.enrolment import Enrolment, Identity
from allfold_agent.gpu.gpus import Gpus
from allfold_agent.group import Group
from allfold_agent.hub import PROCESS_ENDED, Hub
from allfold_agent.in_edge import Dial
from allfold_agent.orchestrator_client import OrchestratorClient
from allfold_agent.peers import Peers
from allfold_agent.ranks import Membership
from allfold_agent.reactor import Reactor
from allfold_agent.registry import PLAN_LAG_SECONDS, Registry
from allfold_agent.settings import AgentSettings
from allfold_agent.tensor_store import TensorStore
from allfold_agent.watch import Watch
from allfold_agent.workers import WorkerPool
from allfold_core.errors import AllfoldError, PeerLost
from allfold_core.frames import EDGE_PROTOCOL
from allfold_core.plan import Plan
from allfold_core.verdict import name_ranks

log = logging.getLogger(__name__)

_IDLE_BUFFER_BYTES = 64 << 20
_DIAL_SECONDS = 5.0
_LINGER_SECONDS = 5.0


class Agent:
    """One node. Made inside the running event loop of the control plane.

    Args:
        control: bound to the control port, which somebody else serves.
        data: bound to the data port.
    """

    def __init__(
        self, settings: AgentSettings, control: socket.socket, data: socket.socket
    ) -> None:
        self.settings = settings
        self.registry = Registry()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers = WorkerPool(settings.threads)
        self._reactor = Reactor("allfold-reactor")
        self._buffers = BufferPool(_IDLE_BUFFER_BYTES, self._reactor.later)
        self._watch = Watch("allfold-gpus")
        self.gpus = Gpus(settings.gpu == "auto", self._watch)
        self.device_type = settings.device_type or ("cuda" if self.gpus.names else "cpu")
        self._orchestrator = OrchestratorClient(settings.orchestrator, settings.token)
        self.enrolment = Enrolment(
            self._orchestrator,
            settings.name,
            lambda: _identify(settings, self.device_type, control, data),
            self.registry.all,
            lambda address: link_probe.measure(address, settings.token or None),
        )
        self.peers = Peers(settings.name, settings.token)
        self._data = DataServer(
            data,
            token=settings.token or None,
            open_edge=self._open_edge,
            tensors=TensorStore(),
        )
        welcome = {"node": settings.name, "pid": os.getpid(), "version": __version__}
        self.hub = Hub(
            settings.socket,
            self,
            welcome,
            reactor=self._reactor,
            workers=self._workers,
            watch=self._watch,
            gpus=self.gpus,
        )

    def start(self) -> None:
        """Serve ranks and peers, and register with the orchestrator as soon as it is there."""
        self._data.start()
        self._reactor.start()
        self._spawn(self.enrolment.keep())

    async def stop(self) -> None:
        """Tell the others, then end every thread."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*map(self._announce_end, self.registry.all()))
        await self.enrolment.say_goodbye()
        await asyncio.to_thread(self._reactor.close)
        self.hub.close()
        for group in self.registry.all():
            await asyncio.to_thread(group.close, 0.0)
        await asyncio.to_thread(self._data.close)
        self._watch.close()
        self._workers.close()
        await self.peers.close()
        await self._orchestrator.close()

    async def _announce_end(self, group: Group) -> None:
        here = [rank for rank in group.ranks if rank not in group.fates.left]
        if here:
            await self.peers.announce_loss(group, _lost(group, here, "its node agent stopped"))

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

    # What the hub asks for (any thread, without waiting)

    def groups(self) -> list[Group]:
        return self.registry.all()

    def join(self, request: dict[str, Any]) -> Future[Group]:
        future: Future[Group] = Future()
        self._loop.call_soon_threadsafe(self._start_join, request, future)
        return future

    def _start_join(self, request: dict[str, Any], future: Future[Group]) -> None:
        """Not ``run_coroutine_threadsafe``, which loses a result that a cancellation crosses."""
        task = self._loop.create_task(self._join(request))

        def resolve(done: asyncio.Task[Group]) -> None:
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            if not future.set_running_or_notify_cancel():
                if error is None:  # the rank is dead, and has a seat
                    self.lose(Membership(request["rank"], request["session"], done.result()))
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())

        def withdraw(cancelled: Future[Group]) -> None:
            if cancelled.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(resolve)
        future.add_done_callback(withdraw)

    def leave(self, membership: Membership) -> Future[None]:
        group, rank = membership.group, membership.rank
        group.rank_left(rank, group.last_seq[rank])
        gone: Future[None] = Future()
        self._from_thread(self._see_off(membership, gone))
        return gone

    def lose(self, membership: Membership, reason: str = PROCESS_ENDED) -> None:
        group, rank = membership.group, membership.rank
        error = _lost(group, [rank], reason)
        group.fates.left[rank] = group.last_seq[rank]
        group.break_(error)
        self._from_thread(self._mourn(membership, error))

    def suspect(self, group: Group, seq: int, reason: str, waited: float = 0.0) -> None:
        self._from_thread(self.peers.suspect(group, seq, reason, waited))

    def report_lost(self, group: Group, error: PeerLost) -> None:
        group.break_(error)
        self._from_thread(self.peers.announce_loss(group, error))

    async def _join(self, request: dict[str, Any]) -> Group:
        plan = await self.enrolment.join(request)
        return self.registry.open(plan, lambda: self._make_group(plan))

    def _make_group(self, plan: Plan) -> Group:
        log.info("group '%s' epoch %d: %d ranks", plan.group, plan.epoch, plan.world_size)
        return Group(
            plan,
            self.settings.name,
            workers=self._workers,
            buffers=self._buffers,
            detective=self,
            dial=self._dial,
            reactor=self._reactor,
            pins=self.gpus.pins,
        )

    async def _see_off(self, membership: Membership, gone: Future[None]) -> None:
        group, rank = membership.group, membership.rank
        # Whoever sent to this rank must know that it has received before it hears that it is gone.
        await asyncio.to_thread(group.pairs.finish, monotonic() + _LINGER_SECONDS)
        try:
            await asyncio.gather(
                self.peers.announce_departure(group, rank, group.fates.left[rank]),
                self.enrolment.give_up_seat(group.name, rank, membership.session, "finished"),
            )
        finally:
            gone.set_result(None)
        await self._close_if_empty(group)

    async def _mourn(self, membership: Membership, error: PeerLost) -> None:
        group = membership.group
        await self.peers.announce_loss(group, error)
        await self.enrolment.give_up_seat(group.name, membership.rank, membership.session, "lost")
        await self._close_if_empty(group)

    async def _close_if_empty(self, group: Group) -> None:
        if all(rank in group.fates.left for rank in group.ranks):
            await asyncio.to_thread(group.close, _LINGER_SECONDS)
            self.registry.remove(group)

    # Edges

    def _dial(self, plan: Plan, source: int, destination: int, lane: Lane) -> Dial:
        address = plan.members[source].data_address

        def dial(from_frame: int) -> tuple[socket.socket, bytes]:
            request = EdgeRequest(plan.group, plan.epoch, source, destination, from_frame, lane)
            token = self.settings.token or None
            try:
                return http_client.upgrade(
                    address, request.target, EDGE_PROTOCOL, token, _DIAL_SECONDS
                )
            except PeerLost:
                raise
            except AllfoldError as error:
                raise PeerLost(f"{address} refuses the edge: {error.message}") from error

        return dial

    def _open_edge(self, request: EdgeRequest) -> SocketTaker:
        group = self.registry.find(request.group, request.epoch, PLAN_LAG_SECONDS)
        return group.serve_edge(request.dst, request.lane).attach(request.from_frame)


def _identify(
    settings: AgentSettings, device_type: str, control: socket.socket, data: socket.socket
) -> Identity:
    def advertised(listener: socket.socket) -> str:
        return addresses.advertised(listener, settings.advertise, settings.orchestrator)

    return Identity(
        node=settings.name,
        control_url=f"http://{advertised(control)}",
        data_address=advertised(data),
        device_type=device_type,
        zone=settings.zone,
        version=__version__,
    )


def _lost(group: Group, ranks: Sequence[int], reason: str) -> PeerLost:
    node = group.plan.members[group.me].node
    return PeerLost(
        f"group '{group.name}' has lost {name_ranks(ranks)} on node {node}: {reason}",
        ranks=list(ranks),
        node=node,
    )
