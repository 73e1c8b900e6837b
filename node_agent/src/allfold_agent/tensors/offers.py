"""States that local ranks offer to others.

A rank is asked for each block when somebody wants it, and copies it from its live memory to a slot
of a window that it shares with this agent. So no second copy of a state is kept anywhere.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, LifoQueue
from time import monotonic

from allfold_agent.runtime.locks import make_condition, make_lock
from allfold_agent.tensors.span import check_id
from allfold_core.errors import PeerLost, PeerMissing
from allfold_core.wire.state_wire import BLOCK_BYTES, Block

log = logging.getLogger(__name__)
LONGEST_WAIT = 60.0
# The interval at which a wait checks whether its result is still wanted.
_GLANCE = 0.5
_MESSAGE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Description:
    """The form of a state: holders of one state have the same one.

    Attributes:
        head: the size of its head in bytes.
        total: the size of its head and its large tensors in bytes.
        layout: a digest of the types, shapes and order of its tensors.
    """

    head: int
    total: int
    layout: str


class Offer:
    """The state of one rank, for as long as its socket is open.

    Args:
        channel: the socket to the rank, over which it is asked for blocks.
        window: memory shared with the rank, a multiple of the block size.
        patience: seconds within which the rank has to deliver a block.
    """

    def __init__(
        self,
        state_id: str,
        description: Description,
        channel: socket.socket,
        window: memoryview,
        patience: float = 10.0,
    ) -> None:
        self.state_id = check_id(state_id)
        self.description = description
        self._channel = channel
        self._window = window
        self._asking = make_lock("offer")
        self._slots: LifoQueue[int] = LifoQueue()  # the last one is still in the caches
        for slot in range(len(window) // BLOCK_BYTES):
            self._slots.put(slot)
        channel.settimeout(patience)

    @contextmanager
    def block(self, start: int, stop: int, deadline: float) -> Iterator[memoryview]:
        """Have the rank copy a range of at most a block to a slot, which is held until the exit.

        Raises:
            PeerMissing: all slots are in use until the deadline (monotonic).
            PeerLost: the rank has withdrawn the offer, has ended, or does not answer.
        """
        try:
            slot = self._slots.get(timeout=max(0.0, deadline - monotonic()))
        except Empty:
            raise PeerMissing(f"too many wait for blocks of state {self.state_id}") from None
        try:
            with self._asking:
                self._fill(Block(start, stop - start, slot))
            begin = slot * BLOCK_BYTES
            yield self._window[begin : begin + stop - start]
        finally:
            self._slots.put(slot)

    def _fill(self, block: Block) -> None:
        try:
            self._channel.send(block.pack())
            answer = self._channel.recv(_MESSAGE_BYTES)
        except OSError as error:
            self.close()
            raise self._gone(f": {error}") from error
        if not answer:
            raise self._gone("")
        if answer != block.pack():
            self.close()
            raise self._gone(": it does not speak our protocol")

    def _gone(self, why: str) -> PeerLost:
        return PeerLost(f"the rank that offered state {self.state_id} is gone{why}")

    def await_end(self) -> None:
        """Wait until the rank withdraws the offer, or ends."""
        end = select.poll()
        end.register(self._channel, 0)
        end.poll()

    def close(self) -> None:
        """End the offer: the rank notices, and so does :meth:`await_end`."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the socket. The window is unmapped when the last response has let go of it."""
        self.close()
        with self._asking:
            self._channel.close()


class Offers:
    """The offers of this node by their ids."""

    def __init__(self) -> None:
        self._changed = make_condition("tensors")
        self._offers: dict[str, Offer] = {}

    def add(self, offer: Offer) -> None:
        """Let others pull a state; a new offer takes the place of an old one with its id."""
        with self._changed:
            old = self._offers.pop(offer.state_id, None)
            self._offers[offer.state_id] = offer
            self._changed.notify_all()
        if old is not None:
            old.close()

    def remove(self, offer: Offer) -> None:
        """Forget an offer, unless another has taken its place."""
        with self._changed:
            if self._offers.get(offer.state_id) is offer:
                del self._offers[offer.state_id]

    def get(
        self, state_id: str, wait: float = 0.0, *, wanted: Callable[[], bool] = lambda: True
    ) -> Offer:
        """Return an offer, as soon as there is one.

        Args:
            wait: seconds, at most :data:`LONGEST_WAIT`.
            wanted: ends the wait early; asked now and then, with the lock held.

        Raises:
            PeerMissing: there is none in time; 404.
        """
        deadline = monotonic() + min(wait, LONGEST_WAIT)
        with self._changed:
            while (offer := self._offers.get(check_id(state_id))) is None:
                left = deadline - monotonic()
                if left <= 0 or not wanted():
                    raise missing(state_id)
                self._changed.wait(min(left, _GLANCE))
            return offer


def missing(state_id: str) -> PeerMissing:
    """Return the error of a state that nobody offers here; its HTTP status is 404."""
    return PeerMissing(f"no rank of this node offers state {state_id}", http_status=404)
