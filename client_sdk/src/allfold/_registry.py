"""The groups that this process is in, and its one connection to a node agent."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from time import monotonic
from typing import TYPE_CHECKING, Unpack

from allfold._calls.call import SeatRequest
from allfold._group import Group
from allfold._membership import RankMembership
from allfold._process.draining import LeaveRequest, Parting, at_exit, by_call
from allfold._process.fork_memory import disown_in_children
from allfold._process.settings import GroupSettings, socket_path
from allfold._session.session import Session
from allfold._starting.surroundings import are_wanted
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    MultipleRegister,
    MultipleUnregister,
    PeerMissing,
    RegisterNotFirstOperation,
)
from allfold_core.group_options import Given

if TYPE_CHECKING:
    from allfold._starting.offers import OwnServices

log = logging.getLogger("allfold")

_EXIT_SECONDS = 1.0
_FAILED_EXIT_SECONDS = 0.2


class JoinedGroups:
    """Opens and leaves groups. The connection lasts from the first of them to the last, or longer
    where it is held.

    Threads may open and leave groups at the same time, and on every rank in another order: what
    waits for other ranks, or for a GPU, does so without the lock.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._session: Session | None = None
        self._opening: dict[str, SeatRequest] = {}
        self._groups: dict[str, Group] = {}
        self._draining = LeaveRequest(lambda parting: self.leave(parting=parting))
        self._holders: set[str] = set()
        self._services: OwnServices | None = None  # for the next session, or this one
        self._used: OwnServices | None = None  # of this one
        disown_in_children(self)

    def __len__(self) -> int:
        return len(self._groups)

    def default(self) -> Group:
        """The group that was opened first."""
        group = next(iter(self._groups.values()), None)
        if group is None:
            raise RegisterNotFirstOperation("allfold.init must be called before any other function")
        return group

    def open(self, seat: SeatRequest, settings: GroupSettings, agent: str | None) -> Group:
        """Take a seat, and wait until every rank has taken its own.

        Args:
            agent: path of the node agent's socket; by default what the environment says.
        """
        self._forget_lost_agent()
        with self._lock:
            self._check_is_new(seat.group)
            session = self._connected(agent, seat, settings)
            self._opening[seat.group] = seat
        try:
            membership = RankMembership.join(session, seat, settings)
            return self._opened(membership, settings)
        except PeerMissing as error:
            if self._used is not None:
                error.message += self._used.who_meets
            raise
        finally:
            with self._closing_if_idle():
                if self._opening.get(seat.group) is seat:
                    del self._opening[seat.group]

    def _opened(self, membership: RankMembership, settings: GroupSettings) -> Group:
        """The group of a seat that was taken; ``AgentLost`` if the seat is gone by now."""
        with self._lock:
            session, name = membership.session, membership.view.group
            if session.connection.lost is not None:
                raise session.connection.lost
            group = Group(membership, settings, self._draining, self._forget)
            self._groups[name] = group
            self._draining.watch(watching=self._has_elastic)
            return group

    def leave(self, group: Group | None = None, parting: Parting | None = None) -> None:
        """Leave a group, or all of them, in order; raises the first error once all are left."""
        parting = parting or by_call()
        with self._lock:
            leaving = [group] if group is not None else list(self._groups.values())
        if not leaving and self._draining.has_left:
            return
        if not leaving:
            raise MultipleUnregister("this process is in no group; allfold.init comes first")
        failures: list[AllfoldError] = []
        for each in leaving:
            try:
                each.leave(parting)
            except AllfoldError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def hold(self, holder: str) -> None:
        """Keep the connection, once there is one, even while this process is in no group.

        Tensors in the memory that is shared with the agent stay where they are.
        """
        with self._lock:
            self._holders.add(holder)

    def release(self, holder: str) -> None:
        """Keep the connection no longer."""
        with self._closing_if_idle():
            self._holders.discard(holder)

    def leave_at_exit(self) -> None:
        """Leave all groups in order, unless ops are in flight."""
        if self._session is None or self._session.connection.pid != os.getpid():
            return
        seconds = patience_at_exit()
        if not all(group.quiesce(seconds) for group in list(self._groups.values())):
            # Most likely an error is on its way out of the script: it must not wait for others.
            log.warning("ops are still in flight at exit; their groups lose this rank")
            self._abandon_all(self._session)
            return
        try:
            if self._groups:
                self.leave(parting=at_exit())
        except AllfoldError as error:
            log.warning("could not leave in order at exit: %s", error)

    def _abandon_all(self, session: Session) -> None:
        """Tell the other ranks why they lose this one, if the agent answers soon."""
        deadline = monotonic() + _EXIT_SECONDS
        for group in list(self._groups.values()):
            if session.connection.lost is None and monotonic() < deadline:
                group.abandon(at_exit())
        session.close()

    def _check_is_new(self, name: str) -> None:
        for seated in (self._groups.get(name), self._opening.get(name)):
            if seated is not None:
                what = "a rank" if seated.rank is None else f"rank {seated.rank}"
                raise MultipleRegister(f"this process is {what} of group '{name}' already")

    @property
    def is_connected(self) -> bool:
        """True while this process has a connection to an agent."""
        return self._session is not None and self._session.connection.lost is None

    @property
    def services(self) -> OwnServices | None:
        """The services that its job has started for itself, while they last."""
        services = self._services
        return services if services is not None and services.last else None

    @property
    def agent(self) -> str | None:
        """The agent for a group that is opened now, where no other one may be started for it."""
        return None if self._session or self._services else socket_path()

    def use(self, services: OwnServices | None) -> None:
        """Connect to the agent of these services, once there is a group to open."""
        with self._lock:
            before, self._services = self._services, services
        if before is not None and before is not self._used:
            before.close()

    def _connected(self, agent: str | None, seat: SeatRequest, settings: GroupSettings) -> Session:
        """The connection, made now if there is none; ``InvalidArgument`` if it is to another."""
        if self._session is None:
            self._session = self._session_at(agent, seat, settings)
            self._draining.begin_anew()
            self._session.connection.requests.on_drain = self._told_to_leave
        self._session.connection.check_process()
        used = self._session.connection.path
        if agent and agent != used:
            raise InvalidArgument(
                f"this process uses the node agent at {used} already, and can use "
                f"only one at a time, not also {agent}; leave its groups first"
            )
        return self._session

    def _session_at(self, agent: str | None, seat: SeatRequest, settings: GroupSettings) -> Session:
        """Connect to an agent: the one that is named, else one of the job's own services."""
        patience = settings.options.join_timeout
        deadline = monotonic() + patience
        if self._services is None and are_wanted(agent):
            from allfold._starting.offers import started_alone

            grows = settings.options.max_world is not None
            self._services = started_alone(seat.world_size, grows=grows)
        services = self._services
        if agent or services is None:
            return Session(agent or socket_path(), patience)
        try:
            path = services.agent(deadline)
            session = Session(path, max(1.0, deadline - monotonic()))
        except BaseException:
            self._services = None
            services.close()
            raise
        session.connection.why_gone = services.why_lost
        self._used = services
        return session

    def disown(self) -> None:
        """In a forked child: be in no group, as its parent's groups and services are not its own.

        It is a rank of its own once it opens a group.
        """
        self._lock = RLock()  # another thread of the parent may have held it
        for services in (self._services, self._used):
            if services is not None:
                services.close()
        self._session = self._services = self._used = None
        self._groups.clear()
        self._opening.clear()
        self._holders.clear()

    def _told_to_leave(self, reason: str) -> None:
        """The agent asks this process to leave, which may be on its way into its first group."""
        if self._groups:
            self._draining.tell(reason)
        else:
            self._draining.ask(reason)  # it is refused, or leaves once it is in

    def _forget(self, group: Group) -> None:
        """A group was left, by whichever way."""
        with self._closing_if_idle():
            if self._groups.get(group.name) is group:
                del self._groups[group.name]
                self._draining.watch(watching=self._has_elastic)

    @property
    def _has_elastic(self) -> bool:
        """True while this process is in a group that it may leave when it is told to."""
        return any(group.elastic for group in self._groups.values())

    def _forget_lost_agent(self) -> None:
        """An agent that died took its groups along: they must not stand in the way of new ones."""
        with self._closing_if_idle():
            if self._session is not None and self._session.connection.lost is not None:
                self._groups.clear()
                self._opening.clear()
                self._draining.watch(watching=False)

    def _is_held(self) -> bool:
        """Return True if somebody will open a group with the connection; never with a lost one."""
        return (
            bool(self._holders)
            and self._session is not None
            and self._session.connection.lost is None
        )

    @contextmanager
    def _closing_if_idle(self) -> Iterator[None]:
        """With the lock; closes the connection afterwards if nobody needs it any more.

        Without the lock, as that may take a while: a GPU may have work to finish before.
        """
        idle, used = None, None
        with self._lock:
            yield
            if not (self._groups or self._opening or self._is_held()):
                idle, self._session = self._session, None
                used, self._used = self._used, None
                if used is self._services:  # else the next session has others
                    self._services = None
        if idle is not None:
            idle.close()
        if used is not None:
            used.close()


def patience_at_exit() -> float:
    """Seconds that ops in flight have when the interpreter ends.

    After an error that nobody has caught they most likely wait for this very rank.
    """
    return _FAILED_EXIT_SECONDS if hasattr(sys, "last_value") else _EXIT_SECONDS


registry = JoinedGroups()
atexit.register(registry.leave_at_exit)


def open_group(
    name: str,
    rank: int | None,
    world_size: int,
    *,
    agent: str | None = None,
    fixed: bool = False,
    **given: Unpack[Given],
) -> Group:
    """Like :func:`allfold.init` for a rank that the caller knows, whatever the environment says.

    For frameworks, which number the ranks of their groups themselves.

    Args:
        fixed: the numbers must never change; after a loss all calls fail.
        given: the options of the group, as :func:`allfold.init` takes them.
    """
    settings = GroupSettings.resolve(world_size, fixed=fixed, **given)
    return registry.open(SeatRequest(name, rank, world_size), settings, agent)
