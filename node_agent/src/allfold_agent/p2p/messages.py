"""The parts of point-to-point messages: calls and their checks, transfers, frames, errors."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from allfold_agent.edges.outgoing import Payload
from allfold_agent.execution.op import RankEndpoint
from allfold_agent.runtime.buffers import Buffer
from allfold_core.dtypes import DType
from allfold_core.errors import AllfoldError, InvalidArgument, MismatchError, PeerLost, PeerMissing
from allfold_core.mailbox import ANY_SOURCE, Envelope, describe_tensor
from allfold_core.protocol.frames import UNKNOWN_BEHIND, FrameHeader, FrameType
from allfold_core.protocol.rank_messages import Message, Outcome, P2PMessage, check_timeout
from allfold_core.verdict import LEFT, numbering

PARCEL_BYTES = 512 * 1024


@dataclass(eq=False, slots=True)
class PendingCall:
    """A local rank's send or receive that has no outcome yet. It knows ranks by seat numbers.

    Attributes:
        rank: whose call it is.
        seats: by the numbers that the rank knows the others by, their seat numbers.
        number: of a send to another node, among the messages of this one; -1 elsewhere.
        extension: in seconds, for how long nothing of the group could be decided.
        last_word: of a send that was withdrawn, how long the other node's word on it is awaited.
        frames_moved: of such a send, what the edges had carried when that was decided.
    """

    rank: int
    connection: RankEndpoint
    group_number: int
    message: P2PMessage
    memory: memoryview
    began: float
    seats: Sequence[int]
    number: int = -1
    extension: float = 0.0
    last_word: float | None = None
    frames_moved: int = 0

    @property
    def deadline(self) -> float:
        """The time at which it fails (monotonic)."""
        if self.last_word is not None:
            return self.last_word
        return self.began + self.message.timeout + self.extension

    def extend(self, seconds: float) -> None:
        """Give it more time, as nothing could be decided meanwhile."""
        self.extension += seconds
        if self.last_word is not None:
            self.last_word += seconds

    @property
    def is_send(self) -> bool:
        return self.message.kind is Message.SEND

    @property
    def dtype(self) -> DType:
        return DType.from_code(self.message.dtype)

    def fits(self, envelope: Envelope) -> bool:
        """Return True if a message has the dtype and the size that this receive asks for."""
        message = self.message
        return (
            envelope.nbytes == message.nbytes
            and envelope.dtype is self.dtype
            and envelope.alias == message.alias
        )

    def report(self, error: AllfoldError | None = None, source: int = -1) -> None:
        """Send the rank the outcome; that of a receive names the rank that sent the message."""
        body = None if self.is_send else {"source": self._number_of(source)}
        send_outcome(self.connection, self.group_number, self.message, error, body)

    def _number_of(self, seat: int) -> int:
        """The number by which the caller knows a rank; the seat number if it knows it no more."""
        return self.seats.index(seat) if seat in self.seats else seat

    def describe(self, rank: int | None = None) -> str:
        """For people: ``recv(float32[12], from rank 1, tag 0)``.

        Args:
            rank: the number of the peer, if not that of its seat.
        """
        message = self.message
        tensor = describe_tensor(self.dtype, message.alias, message.nbytes)
        number = message.peer if rank is None else rank
        peer = "any rank" if message.peer == ANY_SOURCE else f"rank {number}"
        verb, way = ("send", "to") if self.is_send else ("recv", "from")
        return f"{verb}({tensor}, {way} {peer}, tag {message.tag})"


@dataclass(eq=False, slots=True)
class MessageTransfer:
    """A message on its way to a local rank.

    Attributes:
        node: the name of that where it comes from.
        number: of it among the messages of that node; -1 for one of this node.
        send: the call that sends it, where that is a local rank's.
        content: all of it, where it came with the offer.
        receive: the receive that has taken it.
        received: bytes that are there.
    """

    envelope: Envelope
    node: str
    number: int = -1
    send: PendingCall | None = None
    content: memoryview | None = None
    receive: PendingCall | None = None
    received: int = 0


@dataclass(slots=True)
class MessageLanding:
    """Memory for the payload of one frame: the agent's own, never a rank's.

    A rank whose receive has failed may use its memory again while a frame is still coming in.
    """

    header: FrameHeader
    view: memoryview
    buffer: Buffer

    def release(self) -> None:
        self.buffer.release()


class MessageSender:
    """One frame of few bytes, or the pieces of one message, as an edge sends them."""

    stamp = 0
    fingerprint = 0
    behind = UNKNOWN_BEHIND

    def __init__(
        self, kind: FrameType, number: int, pieces: list[tuple[int, memoryview | bytes]]
    ) -> None:
        self.seq = number
        self.kind = kind
        self._pieces = pieces
        self._next = 0
        self.cancelled = False

    @property
    def was_sent(self) -> bool:
        """Return True if all of it was taken to be sent."""
        return self._next == len(self._pieces)

    def cancel(self) -> bool:
        """Send nothing more of it; return True if nothing was sent.

        :meth:`OutEdge.cancel` calls it, so that no frame is taken meanwhile.
        """
        self.cancelled = True
        return self._next == 0

    def is_finished(self) -> bool:
        return self.cancelled or self._next == len(self._pieces)

    def is_ready(self) -> bool:
        return not self.is_finished()

    def next_is_shared(self) -> bool:
        """Return False: the memory of a message is its rank's."""
        return False

    def next_size(self) -> int:
        return 0 if self.is_finished() else len(self._pieces[self._next][1])

    def take(self) -> Payload | None:
        if self.is_finished():
            return None
        offset, piece = self._pieces[self._next]
        self._next += 1
        # A copy: the frame may be sent again when the rank has long got its memory back.
        payload = bytes(piece)
        return Payload(self.kind, offset, lambda: payload, _nothing)


def control_frame(kind: FrameType, number: int, payload: bytes = b"") -> MessageSender:
    """A single frame."""
    return MessageSender(kind, number, [(0, payload)])


def error_frame(kind: FrameType, number: int, error: AllfoldError) -> MessageSender:
    """A frame that carries an error."""
    return control_frame(kind, number, json.dumps(error.to_dict()).encode())


def content_frames(number: int, memory: memoryview) -> MessageSender:
    """The content of a message, in pieces."""
    starts = range(0, len(memory), PARCEL_BYTES)
    return MessageSender(
        FrameType.PARCEL,
        number,
        [(start, memory[start : start + PARCEL_BYTES]) for start in starts],
    )


def send_outcome(
    connection: RankEndpoint,
    number: int,
    message: P2PMessage,
    error: AllfoldError | None,
    body: dict[str, Any] | None = None,
) -> None:
    """Send a rank the outcome of its call.

    It leaves the rank in its epoch: only collectives are the same point of all programs.
    """
    kind = Message.DONE if error is None else Message.FAILED
    said = body if error is None else error.to_dict()
    connection.send_outcome(Outcome(kind, number, message.seq, message.view, body=said))


def _nothing() -> None:
    """Do nothing when a frame of a message has been written."""


def checked_call(
    group: str,
    seat: int,
    connection: RankEndpoint,
    number: int,
    message: P2PMessage,
    seats: Sequence[int],
) -> PendingCall:
    """Return the call of a rank that sends or receives.

    Args:
        group: its name.
        seat: the seat number of the rank.
        connection: to the rank, which has the memory.
        number: the group's, on that connection.
        message: has the number of the peer as the rank knows it.
        seats: the seat numbers of all ranks that it knows.

    Raises:
        ValueError: the message cannot be; mostly an :class:`InvalidArgument`.
    """
    check_timeout(message.timeout)
    peer, world = message.peer, len(seats)
    dtype = DType.from_code(message.dtype)
    anyone = peer == ANY_SOURCE and message.kind is Message.RECV
    if not anyone and not 0 <= peer < world:
        raise InvalidArgument(f"rank {peer} is not one of group '{group}': its {numbering(world)}")
    if not anyone:
        message = message._replace(peer=seats[peer])
    if message.peer == seat:
        raise InvalidArgument(f"rank {peer} cannot exchange a message with itself")
    if message.nbytes % dtype.itemsize:
        raise InvalidArgument(
            f"{message.nbytes} bytes are no whole number of {dtype.label} elements"
        )
    memory = connection.memory(message.memory, message.nbytes)
    return PendingCall(seat, connection, number, message, memory, monotonic(), seats)


def mismatch(group: str, envelope: Envelope, receive: PendingCall) -> MismatchError:
    """Return the error of a message that does not fit the receive that takes it."""
    return MismatchError(
        f"in group '{group}' rank {envelope.source} sends rank {envelope.target} "
        f"a {envelope.describe_tensor()} with tag {envelope.tag}, but the receive that takes "
        f"it is {receive.describe()}. Nothing was moved and the group is usable; make both "
        "agree.",
        group=group,
        ranks=[envelope.source, envelope.target],
    )


def overdue(group: str, call: PendingCall, hindered: Mapping[int, str]) -> PeerMissing:
    """Return the error of a call whose deadline has passed.

    Args:
        hindered: by rank, what is known of those that keep others waiting: a phrase.
    """
    message = call.message
    why = f"; {hindered[message.peer]}" if message.peer in hindered else ""
    if call.is_send:
        what = f"rank {message.peer} has not received it"
    else:
        peer = "no rank" if message.peer == ANY_SOURCE else f"rank {message.peer}"
        what = f"{peer} has {'' if message.peer == ANY_SOURCE else 'not '}sent it"
    return PeerMissing(
        f"{call.describe()} of rank {call.rank} in group '{group}' timed out after its timeout of "
        f"{message.timeout:g} s: {what}{why} (a message is received by a recv with the same tag, "
        "and the dtype and size are compared then)",
        group=group,
        missing_ranks=[] if message.peer == ANY_SOURCE else [message.peer],
        timeout=message.timeout,
    )


def unanswered(group: str, call: PendingCall, seconds: float) -> str:
    """Describe a withdrawn send that its receiver may have received."""
    return (
        f"{call.describe()} of rank {call.rank} in group '{group}' was withdrawn, and rank "
        f"{call.message.peer} has not said for {seconds:g} s whether it has received it; without "
        "its word, or the loss of its node, the send has no outcome"
    )


def peer_left(
    group: str, call: PendingCall, ranks: Collection[int], how: Mapping[int, str]
) -> PeerLost:
    """Return the error of a call whose every possible peer has left the group.

    Args:
        how: of each rank that has left, a phrase to follow its name.
    """
    peer = call.message.peer
    who = f"every other rank {LEFT}" if peer == ANY_SOURCE else f"rank {peer} {how.get(peer)}"
    return PeerLost(
        f"{call.describe()} of rank {call.rank} in group '{group}' can never be done: {who}",
        ranks=sorted(ranks),
    )
