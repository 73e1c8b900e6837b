"""Dialling the other end of a link: one dial at a time, again and again while it is needed."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from enum import Enum
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.reactor import Action, Reactor
from allfold_agent.runtime.threads import start_thread
from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, ServiceError

if TYPE_CHECKING:
    from allfold_agent.membership.link import PeerLink

CONFLICT = 409


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """The agent that is asked for.

    Attributes:
        node: its name.
        incarnation: the life of it that is meant; empty for any.
    """

    node: str
    incarnation: str = ""

    @property
    def target(self) -> str:
        """The request target whose query :meth:`parse` reads."""
        return f"/v1/link?{urlencode({'node': self.node, 'incarnation': self.incarnation})}"

    @classmethod
    def parse(cls, query: dict[str, str]) -> LinkRequest:
        """The request of a target's query; :class:`InvalidArgument` names what is wrong with it."""
        if unknown := sorted(query.keys() - {"node", "incarnation"}):
            raise InvalidArgument(f"unknown parameters of a link: {', '.join(unknown)}")
        if not query.get("node"):
            raise InvalidArgument("a link needs the name of the node that is asked for")
        return cls(query["node"], query.get("incarnation", ""))

    def check(self, node: str, incarnation: str) -> None:
        """Return if this is the agent that is asked for.

        Raises:
            LocalError: another node has its address now, or another incarnation its name.
        """
        if self.node != node or self.incarnation not in ("", incarnation):
            raise LocalError(
                f"this is node {node}, incarnation {incarnation}, and not node {self.node}, "
                f"incarnation {self.incarnation or 'any'}",
                http_status=CONFLICT,
                node=node,
                incarnation=incarnation,
            )


log = logging.getLogger(__name__)

DIAL_SECONDS = 1.0
_PAUSES = (0.0, 0.02, 0.04, 0.05)
# Dials that begin within this time of each other pause longer and longer.
_BURST_SECONDS = 1.0

Dialled = tuple[socket.socket, bytes]
"""A connection that has switched to the link's protocol, and what has come on it already."""


class DialRefusal(Enum):
    """The meaning of a failed dial for the peer."""

    NONE = "nothing: it may live"
    REFUSED = "nobody listens at its address"
    REPLACED = "another node or incarnation is at its address"


def refusal_of(error: AllfoldError) -> DialRefusal:
    """Return what the failure of a dial says about the peer."""
    if error.details.get("http_status") == CONFLICT:
        return DialRefusal.REPLACED
    if isinstance(error.__cause__, ConnectionRefusedError):
        return DialRefusal.REFUSED
    return DialRefusal.NONE


class Handover:
    """Sockets on their way from other threads to the reactor; late ones are closed."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._lock = make_lock("links")
        self._waiting: set[socket.socket] = set()
        self._closed = False

    def bring(self, connected: socket.socket, take: Action) -> None:
        """Call ``take()`` in the reactor's thread, which then owns the socket."""
        with self._lock:
            if not self._closed:
                self._waiting.add(connected)
                self._reactor.call(lambda: self._arrive(connected, take))
                return
        connected.close()

    def _arrive(self, connected: socket.socket, take: Action) -> None:
        with self._lock:
            self._waiting.remove(connected)
        take()

    def close(self) -> None:
        """Close what has not arrived; the reactor has ended."""
        with self._lock:
            self._closed = True
            for connected in self._waiting:
                connected.close()


class Redial:
    """Dials for one link. In the reactor's thread; each dial has a thread of its own."""

    def __init__(self, user: PeerLink, reactor: Reactor, handover: Handover) -> None:
        self._user = user
        self._reactor = reactor
        self._handover = handover
        self._is_dialling = False
        self._due: float | None = None
        self._tries = 0
        self._began = float("-inf")
        self._thread: Thread | None = None

    def start(self, after: float = 0.0) -> None:
        """Begin to dial after so many seconds, if that is not under way."""
        if self._is_dialling:
            return
        now = monotonic()
        if now > self._began + _BURST_SECONDS:
            self._began, self._tries = now, 0
        self._dial_after(after)

    def done(self) -> None:
        """Stop dialling: there is a link, or none is needed any more."""
        self._is_dialling = False

    def failed(self) -> None:
        """Dial again after a failed dial, if a link is still needed."""
        self._is_dialling = False
        if self._user.needs_dial():
            self._dial_after(0.0)

    def join(self) -> None:
        """Wait for the end of a dial that is under way."""
        if self._thread is not None:
            self._thread.join(2 * DIAL_SECONDS)

    def _dial_after(self, seconds: float) -> None:
        """Dial then, or when it was to be done anyway, whichever is sooner."""
        seconds = max(seconds, _PAUSES[min(self._tries, len(_PAUSES) - 1)])
        due = monotonic() + seconds
        if self._due is None or due < self._due:
            self._due = due
            self._reactor.later(seconds, lambda: self._begin(due))

    def _begin(self, due: float) -> None:
        if due != self._due:  # another one has taken its place
            return
        self._due = None
        if self._is_dialling or not self._user.needs_dial():
            return
        self._is_dialling = True
        self._tries += 1
        try:
            self._thread = start_thread(self._run, f"allfold-dial-{self._user.node}")
        except ServiceError as error:
            self._user.on_not_dialled(error)

    def _run(self) -> None:
        user = self._user
        try:
            dialled = user.dial()
        except AllfoldError as error:
            failure = error
        except Exception as error:
            log.exception("node %s cannot be dialled", user.node)
            failure = ServiceError(f"a dial failed: {error!r}")
        else:
            self._handover.bring(dialled[0], lambda: user.on_dialled(dialled))
            return
        self._reactor.call(lambda: user.on_not_dialled(failure))
