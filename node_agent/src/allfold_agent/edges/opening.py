"""The opening of an in-edge: retries while its peer restarts or is busy, and a limit of damage."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from itertools import chain, repeat
from threading import Event
from time import monotonic

from allfold_core.errors import PeerLost, PeerSentIncoherentTensor, ServiceError

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

    def _note_refusal(self, reason: str) -> None:
        """Log why the edge cannot be opened yet, once per reason: a peer may be gone for long."""
        if reason != self._refusal:
            log.info("edge %s cannot be opened yet: %s", self._name, reason)
        self._refusal = reason

    def note_damage(self, frame: int, error: ValueError) -> None:
        """Let a damaged frame come again, on a new connection; not without end.

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
