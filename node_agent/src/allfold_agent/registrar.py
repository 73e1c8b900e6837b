"""The ranks of this node on the control plane: they join and leave; empty groups are closed."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Coroutine
from concurrent.futures import Future
from logging import INFO, WARNING
from time import monotonic
from typing import Any, TypeVar

from allfold_agent.groups.flight_recorder import Recordings
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.registry import GroupRegistry
from allfold_agent.joins import Joins
from allfold_agent.local.memberships import PROCESS_ENDED, JoinResult
from allfold_agent.local.rank_connection import LocalMembership
from allfold_agent.membership.draining import NodeDrain
from allfold_agent.membership.group_links import GroupLinks
from allfold_agent.membership.seats import RankSeats
from allfold_agent.observation.failures import ExitObserver
from allfold_core.errors import AgentLost

log = logging.getLogger(__name__)

T = TypeVar("T")

_LINGER_SECONDS = 5.0
# After the end of a group, until nobody uses it any more.
_COLLECT_SECONDS = 0.5
# How long a rank that leaves waits for the others to agree that it has.
_DEPARTURE_SECONDS = 2.0
_STOPPED = "the node agent was told to end while the rank waited for its group"


class ControlTasks:
    """The tasks of the control plane. Made inside its running event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()

    def hold(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine, whose outcome somebody waits for."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine; its failure is logged, never lost."""
        self.hold(work).add_done_callback(_log_failure)

    def spawn_from_thread(self, work: Coroutine[Any, Any, None]) -> None:
        """:meth:`spawn`, from any thread."""
        self.loop.call_soon_threadsafe(self.spawn, work)

    async def end(self) -> None:
        """Cancel all; the last words of some are requests."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a task of the control plane failed", exc_info=error)


class RankRegistrar:
    """Seats ranks in groups and gives their seats back, for the local server.

    :meth:`join`, :meth:`leave`, :meth:`lose` and :meth:`group_over` are for any thread, and do not
    wait.
    """

    def __init__(
        self,
        tasks: ControlTasks,
        registry: GroupRegistry,
        joins: Joins,
        seats: RankSeats,
        draining: NodeDrain,
        exits: ExitObserver,
        recordings: Recordings,
        group_links: GroupLinks,
    ) -> None:
        self._tasks = tasks
        self._registry = registry
        self._joins = joins
        self._seats = seats
        self._draining = draining
        self._exits = exits
        self._recordings = recordings
        self._group_links = group_links
        self.groups = registry.all

    def join(self, request: dict[str, Any], *, is_new: bool = True) -> Future[JoinResult]:
        """Seat a rank; see ``Registrar``."""
        future: Future[JoinResult] = Future()
        self._tasks.loop.call_soon_threadsafe(self._start_join, request, future, is_new)
        return future

    def _start_join(
        self, request: dict[str, Any], future: Future[JoinResult], is_new: bool
    ) -> None:
        """Not ``run_coroutine_threadsafe``, which loses a result that a cancellation crosses."""
        task = self._tasks.hold(self._joins.join(request, is_new=is_new))

        def resolve(done: asyncio.Task[JoinResult]) -> None:
            error = AgentLost(_STOPPED) if done.cancelled() else done.exception()
            if not future.set_running_or_notify_cancel():
                if error is None:  # the rank is dead, and has a seat
                    self.lose(LocalMembership(request["session"], done.result().group))
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())

        def withdraw(cancelled: Future[JoinResult]) -> None:
            if cancelled.cancelled():
                self._tasks.loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(resolve)
        future.add_done_callback(withdraw)

    def leave(self, membership: LocalMembership, how: str, failed: bool) -> Future[None]:
        """Take a rank out of its group in order; see ``Registrar``."""
        gone: Future[None] = Future()
        rank = _describe(membership)
        log.log(WARNING if failed else INFO, "%s of '%s' %s", rank, membership.group.name, how)
        if failed:
            self._exits.rank_ended(membership.group, membership.session, how)
        self._tasks.spawn_from_thread(self._finish_leaving(membership, how, failed, gone))
        return gone

    def lose(
        self, membership: LocalMembership, reason: str = PROCESS_ENDED, *, withdraws: bool = False
    ) -> None:
        """Take a rank out of its group that can go on no more; see ``Registrar``."""
        if reason == PROCESS_ENDED:
            self._exits.rank_ended(membership.group, membership.session, reason)
        membership.group.rank_ended(membership.session, reason, withdraws=withdraws)
        self._tasks.spawn_from_thread(self._finish_loss(membership))

    def group_over(self, group: NodeGroup) -> None:
        """Close a group whose nodes have agreed that no rank is left."""
        self._tasks.spawn_from_thread(self._close(group))

    async def leave_groups(self) -> None:
        """End the local ranks of all groups; the nodes agree on that without orchestrator."""
        await asyncio.gather(*map(self._leave_group, self._registry.all()))

    async def _leave_group(self, group: NodeGroup) -> None:
        sessions = [seat.session for seat in group.current.record.seats if seat.node == group.node]
        for session in sessions:
            group.rank_ended(session, "had its node agent stopped", withdraws=True)
        departures = (
            asyncio.to_thread(group.await_departure, session, _DEPARTURE_SECONDS)
            for session in sessions
        )
        await asyncio.gather(*departures)

    async def _finish_leaving(
        self, membership: LocalMembership, how: str, failed: bool, gone: Future[None]
    ) -> None:
        group, session = membership.group, membership.session
        # Whoever sent to this rank must know that it has received before it hears that it is gone.
        await asyncio.to_thread(group.p2p.finish, monotonic() + _LINGER_SECONDS)
        group.rank_ended(session, how)
        try:
            await asyncio.gather(
                asyncio.to_thread(group.await_departure, session, _DEPARTURE_SECONDS),
                self._give_up_seat(membership, "lost" if failed else "finished"),
            )
        finally:
            gone.set_result(None)
            self._draining.look()
        await self._close_if_evicted(group)

    async def _finish_loss(self, membership: LocalMembership) -> None:
        self._draining.look()
        await self._give_up_seat(membership, "lost")
        await self._close_if_evicted(membership.group)

    async def _give_up_seat(self, membership: LocalMembership, reason: str) -> None:
        group, session = membership.group, membership.session
        sessions = group.plan.sessions
        rank = sessions.index(session) if session in sessions else 0  # found by its session
        await self._seats.give_up_seat(group.name, rank, session, reason)

    async def _close_if_evicted(self, group: NodeGroup) -> None:
        """Any other group is over when all nodes have agreed that no rank is left."""
        if group.evicted is not None and group.is_empty:
            await self._close(group)

    async def _close(self, group: NodeGroup) -> None:
        await asyncio.to_thread(group.close, _LINGER_SECONDS)
        if self._registry.remove(group):
            self._recordings.keep(group)
            self._group_links.over(group)
            # Its parts refer to each other, and some hold files. What came with the process is
            # frozen, so to look through the rest takes some milliseconds.
            self._tasks.loop.call_later(_COLLECT_SECONDS, gc.collect)


def _describe(membership: LocalMembership) -> str:
    epoch = membership.epoch
    return "a rank" if epoch is None else f"rank {epoch.rank_of(membership.session)}"
