"""The opening of an edge: its request, and the retries while the peer restarts or is busy."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain, repeat
from threading import Event
from time import monotonic
from urllib.parse import quote, urlencode

from allfold_agent.http.server import whole_number
from allfold_agent.runtime.event_loop import EventLoop
from allfold_agent.runtime.threads import start_thread
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    PeerLost,
    PeerSentIncoherentTensor,
    ServiceError,
)

_PARAMETERS = frozenset({"from_frame", "lane", "lives"})
_LONGEST_NAME = 256


class Traffic(Enum):
    """The kind of traffic of an edge. Messages must not wait behind ops, nor ops behind them."""

    OPS = "ops"
    PAIRS = "pairs"
    SHORT = "short"


@dataclass(frozen=True, slots=True)
class EdgeRequest:
    """The directed link that a peer asks for, and the first of its frames that it has not got.

    Attributes:
        group: its name.
        opening: tells this opening of that name from others.
        src: the name of the node that sends.
        dst: the name of the node that receives, which asks for the edge.
        lives: of these two nodes in the group, as far as it knows them. One that was restarted, or
            has come back, numbers its frames anew.
    """

    group: str
    opening: int
    src: str
    dst: str
    from_frame: int = 0
    lane: Traffic = Traffic.OPS
    lives: tuple[str, str] = ("", "")

    @property
    def target(self) -> str:
        """The request target that :meth:`parse` reads."""
        group, src, dst = (quote(name, safe="") for name in (self.group, self.src, self.dst))
        parameters = {
            "from_frame": self.from_frame,
            "lane": self.lane.value,
            "lives": ",".join(self.lives),
        }
        edge = f"/v1/groups/{group}/openings/{self.opening}/edges/{src}/{dst}"
        return f"{edge}?{urlencode(parameters, safe=',')}"

    @classmethod
    def parse(
        cls, group: str, opening: str, src: str, dst: str, query: dict[str, str]
    ) -> EdgeRequest:
        """The request of a target's parts; :class:`InvalidArgument` names the bad one."""
        for what, name in (("group", group), ("src", src), ("dst", dst)):
            if not 0 < len(name) <= _LONGEST_NAME:
                raise InvalidArgument(
                    f"the {what} of an edge is a name of 1 to {_LONGEST_NAME} characters",
                    group=group[:_LONGEST_NAME],
                )
        if unknown := sorted(query.keys() - _PARAMETERS):
            raise InvalidArgument(f"unknown parameters of an edge: {', '.join(unknown)}")
        if src == dst:
            raise InvalidArgument(f"an edge from node {src} to itself", group=group)
        return cls(
            group,
            whole_number("opening", opening, 2**32),
            src,
            dst,
            whole_number("from_frame", query.get("from_frame", "0"), 2**64),
            _lane(query.get("lane", Traffic.OPS.value)),
            _lives(query.get("lives", ",")),
        )


def _lane(name: str) -> Traffic:
    try:
        return Traffic(name)
    except ValueError:
        known = ", ".join(lane.value for lane in Traffic)
        raise InvalidArgument(f"an edge has the lane {known}, not {name[:50]!r}") from None


def _lives(text: str) -> tuple[str, str]:
    src, comma, dst = text.partition(",")
    if not comma or "," in dst:
        raise InvalidArgument(f"lives are those of src and dst, not {text[:100]!r}")
    return src, dst


log = logging.getLogger(__name__)

# Pauses after failed dials, for about a second; after that, each pause is the long one.
_RETRY_SECONDS = (0.02, 0.04, *(0.05,) * 20)
_LONG_RETRY_SECONDS = 0.5
# From one opened connection to the next dial at least: a peer that resets each of them must not
# keep a core busy.
_BETWEEN_SECONDS = 0.003
# How long an edge is asked for where the peer answers, but cannot serve it at the moment, or this
# node has no file descriptor for it.
_BUSY_SECONDS = 30.0
_BUSY_RETRY_SECONDS = 0.2

# So often in a row one frame may come damaged.
_DAMAGE_TRIES = 5

Dial = Callable[[int], tuple[socket.socket, bytes]]


class EdgeOpener:
    """Opens the connections of an in-edge, one after the other.

    Args:
        name: of the edge, for messages.
        dial: opens the edge from a frame number on: (socket, bytes received already).
        closed: set when the edge is wanted no more; ends the retries.
    """

    def __init__(self, name: str, dial: Dial, closed: Event) -> None:
        self._name = name
        self._dial = dial
        self._closed = closed
        self._damaged_frame = -1
        self._damaged_tries = 0
        self._refusal = ""
        self._opened = float("-inf")

    def open(self, from_frame: int) -> tuple[socket.socket, bytes]:
        """Open the edge, trying again until it is closed; others decide whether the peer is lost.

        Returns:
            The connection, and the bytes of frames that were received already.

        Raises:
            PeerLost: the edge was closed while the peer could not be reached.
            ServiceError: an agent that lives, the peer or this one, could not serve it for long.
        """
        began = monotonic()
        pauses = chain(_RETRY_SECONDS, repeat(_LONG_RETRY_SECONDS))
        self._closed.wait(max(0.0, self._opened + _BETWEEN_SECONDS - began))
        while True:
            try:
                opened = self._dial(from_frame)
                self._opened = monotonic()
                was_refused, self._refusal = bool(self._refusal), ""
                break
            except PeerLost as error:
                pause = next(pauses)
                if pause == _LONG_RETRY_SECONDS:
                    self._note_refusal(error.message)
                if self._closed.wait(pause):
                    raise
            except ServiceError as error:
                self._note_refusal(error.message)
                if self._closed.wait(_BUSY_RETRY_SECONDS) or monotonic() > began + _BUSY_SECONDS:
                    raise
        if from_frame or was_refused:
            which = f" again, from frame {from_frame} on" if from_frame else ""
            log.info("edge %s is open%s, after %.1f s", self._name, which, self._opened - began)
        return opened

    def open_in_thread(
        self,
        from_frame: int,
        loop: EventLoop,
        take: Callable[[socket.socket, bytes], None],
        fail: Callable[[AllfoldError], None],
    ) -> None:
        """Open the edge in a thread of its own, as that may take long.

        Args:
            loop: in whose thread one of the other two is called.

        Raises:
            ServiceError: no thread can be started for it.
        """

        def open_it() -> None:
            try:
                connected, early = self.open(from_frame)
            except AllfoldError as error:
                loop.call(partial(fail, error))
            except Exception as error:
                log.exception("edge %s cannot be opened", self._name)
                loop.call(partial(fail, PeerLost(f"edge {self._name} failed: {error}")))
            else:
                if loop.running:
                    loop.call(partial(take, connected, early))
                else:
                    connected.close()

        start_thread(open_it, f"allfold-dial-{self._name}")

    def _note_refusal(self, reason: str) -> None:
        """Log why the edge cannot be opened yet, once per reason: a peer may be gone for long."""
        if reason != self._refusal:
            log.info("edge %s cannot be opened yet: %s", self._name, reason)
        self._refusal = reason

    def note_damage(self, frame: int, error: ValueError) -> None:
        """Count a damaged frame, which comes again on a new connection; not without end.

        Raises:
            PeerSentIncoherentTensor: it came damaged too many times in a row.
        """
        if self._damaged_frame != frame:
            self._damaged_frame, self._damaged_tries = frame, 0
        self._damaged_tries += 1
        if self._damaged_tries >= _DAMAGE_TRIES:
            raise PeerSentIncoherentTensor(
                f"edge {self._name}: frame {frame} came damaged {_DAMAGE_TRIES} times in a "
                f"row ({error}); the memory of a node or the network between them is faulty"
            ) from error
        log.warning("edge %s: %s; it is asked for again", self._name, error)
