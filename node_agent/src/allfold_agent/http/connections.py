"""The connections of a port: how many there may be, of whom, and which one makes room."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from threading import Thread
from time import monotonic

from allfold_agent.runtime.locks import make_lock
from allfold_core.errors import ServiceError


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits on a port's connections at a time. Open edges and links do not count.

    Attributes:
        strangers: connections that have not made an authorized request.
        greeting_seconds: how long a connection may be a stranger.
        opening: edges and links that are being opened. They have this room to themselves.
        served: connections with other requests.
        served_per_address: of these, those from one address.
    """

    strangers: int = 128
    greeting_seconds: float = 5.0
    opening: int = 256
    served: int = 128
    served_per_address: int = 64


class Stage(Enum):
    """The stage that a connection has reached."""

    STRANGER = "stranger"
    OPENING = "opening"
    SERVED = "served"


@dataclass(slots=True)
class PortConnection:
    """One connection of the port, while it is the port's.

    Attributes:
        address: where it comes from, without the port; empty for one of this machine.
        thread: serves it.
        began: when it was accepted (monotonic).
    """

    sock: socket.socket
    address: str
    thread: Thread | None = None
    stage: Stage = Stage.STRANGER
    began: float = 0.0


class Connections:
    """The open connections of a port, by stage; unauthenticated ones never displace others."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._lock = make_lock("connections")
        self._stages: dict[Stage, dict[socket.socket, PortConnection]] = {
            each: {} for each in Stage
        }

    def admit(
        self, sock: socket.socket, address: str
    ) -> tuple[PortConnection, socket.socket | None]:
        """Take a connection in; the second one returned has to make room for it, if any.

        That is the oldest stranger from the address that has most of them, so that whoever opens
        hundreds of connections pushes out nobody else.
        """
        connection = PortConnection(sock, address, began=monotonic())
        with self._lock:
            strangers = self._stages[Stage.STRANGER]
            strangers[sock] = connection
            if len(strangers) <= self.limits.strangers:
                return connection, None
            ((greedy, _),) = Counter(each.address for each in strangers.values()).most_common(1)
            victim = next(each for each in strangers.values() if each.address == greedy)
            del strangers[victim.sock]
            return connection, victim.sock

    def advance(self, connection: PortConnection, stage: Stage) -> None:
        """Note that a connection has made an authorized request.

        Raises:
            ServiceError: there is no room for another one.
            ConnectionAbortedError: it had to make room for another one.
        """
        with self._lock:
            if connection.stage is stage:
                return
            if connection.sock not in self._stages[connection.stage]:
                raise ConnectionAbortedError("the connection had to make room for another one")
            self._check(connection, stage)
            del self._stages[connection.stage][connection.sock]
            connection.stage = stage
            self._stages[stage][connection.sock] = connection

    def _check(self, connection: PortConnection, stage: Stage) -> None:
        others = self._stages[stage].values()
        if stage is Stage.OPENING:
            limit = self.limits.opening
            if len(others) >= limit:
                raise ServiceError(f"the data port opens {limit} edges at a time", limit=limit)
            return
        limit = self.limits.served
        if len(others) >= limit:
            raise ServiceError(f"the data port already serves {limit} connections", limit=limit)
        limit = self.limits.served_per_address
        if sum(each.address == connection.address for each in others) >= limit:
            where = connection.address or "this machine"
            raise ServiceError(
                f"the data port already serves {limit} connections from {where}", limit=limit
            )

    def remove(self, connection: PortConnection) -> None:
        """Forget a connection, which has ended or belongs to somebody else."""
        with self._lock:
            self._stages[connection.stage].pop(connection.sock, None)

    def all(self) -> list[PortConnection]:
        """Return all connections that the port still owns."""
        with self._lock:
            return [each for stage in self._stages.values() for each in stage.values()]
