"""The messages of a node's ranks to other nodes, from the offer to the receiver's answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from time import monotonic

from allfold_agent.edges.connections import RECONNECT_SECONDS
from allfold_agent.edges.edges import Edges
from allfold_agent.p2p.messages import (
    MessageSender,
    PendingCall,
    content_frames,
    control_frame,
    error_frame,
)
from allfold_agent.p2p.seats import NodesOfSeats
from allfold_core.errors import AllfoldError
from allfold_core.mailbox import Envelope
from allfold_core.protocol.frames import FrameType

# A longer message is sent when a receive has taken its offer. A shorter one takes no longer than
# the asking would.
EAGER_BYTES = 127 * 1024
# How long a node may take to say whether it has received a message that was withdrawn, from when
# its edges last moved: on a slow link question and answer come after what was sent before them.
ANSWER_SECONDS = 10.0


class Outbox:
    """The sends to other nodes that have no outcome yet. Its owner's lock protects it.

    Args:
        seats: of the group.
        edges: to the other nodes.
        enqueue: queues frames for a node.
        end: ends a send, with an error or without.
    """

    def __init__(
        self,
        seats: NodesOfSeats,
        edges: Edges,
        enqueue: Callable[[str, MessageSender], None],
        end: Callable[[PendingCall, AllfoldError | None], None],
    ) -> None:
        self._seats = seats
        self._edges = edges
        self._enqueue = enqueue
        self._end = end
        self._numbers = count()
        self._sends: dict[int, PendingCall] = {}
        # The last thing of each that was queued, its offer or its content: it may still be unsent.
        self._queued: dict[int, MessageSender] = {}

    def offer(self, node: str, call: PendingCall, envelope: Envelope) -> None:
        """Offer a message to a node; a short one has its content in the offer."""
        number = call.number = next(self._numbers)
        self._sends[number] = call
        content = call.memory.tobytes() if envelope.nbytes <= EAGER_BYTES else b""
        offer = self._queued[number] = control_frame(
            FrameType.OFFER, number, envelope.pack() + content
        )
        self._enqueue(node, offer)

    def send_content(self, node: str, number: int) -> None:
        """Send what a receive has taken the offer of, unless it is withdrawn or over."""
        call = self._sends.get(number)
        if call is None or call.last_word is not None:
            return
        content = self._queued[number] = content_frames(number, call.memory)
        self._enqueue(node, content)

    def conclude(self, number: int, error: AllfoldError | None) -> None:
        """End a send with its outcome, unless it has one."""
        call = self._sends.pop(number, None)
        queued = self._queued.pop(number, None)
        if call is not None:
            if queued is not None:
                self._cancel(call, queued)
            self._end(call, error)

    def conclude_all(self, error: AllfoldError) -> None:
        """End all sends with an error."""
        for number in list(self._sends):
            self.conclude(number, error)

    def withdraw(self, call: PendingCall, error: AllfoldError) -> None:
        """Give up a message to another node, which may have it already: its answer decides."""
        if call.last_word is not None:  # it cannot have been received, or its node is given up
            self.conclude(call.number, error)
            return
        queued = self._queued[call.number]
        is_unsent = self._cancel(call, queued)
        if is_unsent and queued.kind is FrameType.OFFER:
            self.conclude(call.number, error)
            return
        in_doubt = _may_be_received(call, queued)
        call.last_word = monotonic() + (ANSWER_SECONDS if in_doubt else RECONNECT_SECONDS)
        node = self._node_of(call)
        call.frames_moved = self._edges.frames_moved(node)
        self._enqueue(node, error_frame(FrameType.WITHDRAWN, call.number, error))

    def is_in_doubt(self, call: PendingCall) -> bool:
        """Return True for a withdrawn send that its receiver may have taken, without an answer."""
        if call.last_word is None:
            return False
        queued = self._queued.get(call.number)
        return queued is not None and _may_be_received(call, queued)

    def extend_patience(self, now: float) -> None:
        """Wait longer for the answers of nodes whose edges have moved since the last look."""
        for call in self._sends.values():
            if self.is_in_doubt(call):
                moved = self._edges.frames_moved(self._node_of(call))
                if moved != call.frames_moved:
                    call.frames_moved = moved
                    call.last_word = now + ANSWER_SECONDS

    def wait_on(self, call: PendingCall, now: float) -> None:
        """Wait once more for the answer to a send that may have been received."""
        call.last_word = now + ANSWER_SECONDS

    def _cancel(self, call: PendingCall, queued: MessageSender) -> bool:
        """Take back what is queued of a message; return True if nothing of that was sent."""
        return self._edges.out(self._node_of(call)).cancel(queued.cancel)

    def _node_of(self, call: PendingCall) -> str:
        return self._seats.node_of(call.message.peer)


def _may_be_received(call: PendingCall, queued: MessageSender) -> bool:
    """Return True if the receiver may have the whole content, which it gets without a word."""
    has_content = queued.kind is FrameType.PARCEL or call.message.nbytes <= EAGER_BYTES
    return has_content and queued.was_sent
