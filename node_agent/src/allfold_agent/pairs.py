"""Sends and receives of one group on this node: point-to-point messages between two ranks.

A send is done when the receiver has the content, so both sides have one outcome. A small message
travels with its offer; the content of a large one follows when a receive has taken the offer, so
little is buffered that nobody wants. Between ranks of one node it is copied directly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import Lock
from time import monotonic

import torch

from allfold_agent.buffers import BufferPool
from allfold_agent.edge_request import Lane
from allfold_agent.edges import DialFrom, Edges
from allfold_agent.letters import (
    Call,
    Letter,
    Note,
    Spot,
    content_note,
    error_note,
    note,
    tell,
)
from allfold_agent.op import RankConnection
from allfold_agent.out_edge import INLINE_BYTES, RECONNECT_SECONDS, OutEdge
from allfold_agent.reactor import Reactor
from allfold_agent.workers import WorkerPool
from allfold_core.dtypes import DType
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    MismatchError,
    PeerLost,
    PeerMissing,
    PeerSentIncoherentTensor,
    from_dict,
)
from allfold_core.frames import FrameHeader, FrameType
from allfold_core.local_wire import Message, PairMessage, check_timeout
from allfold_core.mailbox import ANY_SOURCE, ENVELOPE_SIZE, Envelope, Mailbox, Wanted
from allfold_core.plan import Plan

# A longer message is sent when a receive has taken its offer. A shorter one takes no longer than
# the asking would.
EAGER_BYTES = 127 * 1024
_LONGEST_NOTE = 128 * 1024
# What is kept of messages that nobody has received yet; beyond it their content is asked for again.
KEPT_BYTES = 16 << 20


class Pairs:
    """The point-to-point messages of one group epoch on this node.

    Args:
        plan: of the group.
        me: this node's index.
        dial: opens an edge.
        workers: who copies what is large.
        buffers: where frames land.
        edge_lost: called when a node cannot be reached any more.
        reactor: reads short frames.
    """

    def __init__(
        self,
        plan: Plan,
        me: int,
        dial: DialFrom,
        workers: WorkerPool,
        buffers: BufferPool,
        edge_lost: Callable[[int, AllfoldError], None],
        reactor: Reactor,
    ) -> None:
        self.edges = Edges(plan, me, dial, self, reactor, Lane.PAIRS)
        self._plan = plan
        self._me = me
        self._workers = workers
        self._buffers = buffers
        self._edge_lost = edge_lost
        self._lock = Lock()
        self._touched: set[int] = set()
        self._mailbox: Mailbox[Letter, Call] = Mailbox()
        self._calls: set[Call] = set()
        self._numbers = count()
        self._sends: dict[int, Call] = {}
        # The last thing of each that was queued, its offer or its content: it may still be unsent.
        self._queued: dict[int, Note] = {}
        self._letters: dict[tuple[int, int], Letter] = {}
        self._kept_bytes = 0
        self._left: set[int] = set()
        self._broken: AllfoldError | None = None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One change of the state. What it has to send is sent afterwards, without the lock."""
        with self._lock:
            yield
            touched, self._touched = self._touched, set()
        for node in touched:
            self.edges.kick(node)

    @property
    def waiting(self) -> bool:
        """Whether a local rank waits for anything."""
        return bool(self._calls)

    def waiting_calls(self) -> list[Call]:
        """The sends and receives of local ranks that have no outcome yet, the oldest first."""
        with self._lock:
            return sorted(self._calls, key=lambda call: call.began)

    def serve_edge(self, destination: int) -> OutEdge:
        """The out-edge that another node has opened."""
        with self._lock:
            return self.edges.out(destination)

    # Calls of the local ranks

    def submit(
        self, rank: int, connection: RankConnection, number: int, message: PairMessage
    ) -> None:
        """A local rank sends or receives."""
        try:
            call = self._checked(rank, connection, number, message)
        except ValueError as error:
            refusal = error if isinstance(error, AllfoldError) else InvalidArgument(str(error))
            tell(connection, number, message.seq, refusal)
            return
        with self._turn():
            hopeless = self._broken or self._peer_has_left(call)
            if hopeless is not None:
                tell(connection, number, message.seq, hopeless)
                return
            self._calls.add(call)
            if call.is_send:
                self._send(call)
            else:
                self._receive(call)

    def _checked(
        self, rank: int, connection: RankConnection, number: int, message: PairMessage
    ) -> Call:
        check_timeout(message.timeout)
        peer, world = message.peer, self._plan.world_size
        dtype = DType.from_code(message.dtype)
        anyone = peer == ANY_SOURCE and message.kind is Message.RECV
        if not anyone and not 0 <= peer < world:
            raise InvalidArgument(
                f"rank {peer} is not one of group '{self._plan.group}': its ranks are 0 to "
                f"{world - 1}"
            )
        if peer == rank:
            raise InvalidArgument(f"rank {rank} cannot exchange a message with itself")
        if message.nbytes % dtype.itemsize:
            raise InvalidArgument(f"{message.nbytes} bytes are no {dtype.label} elements")
        memory = connection.memory(message.memory, message.nbytes)
        return Call(rank, connection, number, message, memory, monotonic())

    def _send(self, call: Call) -> None:
        message = call.message
        envelope = Envelope(call.rank, message.peer, message.tag, call.dtype, message.nbytes)
        node = self._plan.index_of_rank(message.peer)
        if node == self._me:
            self._arrive(Letter(envelope, node, send=call))
            return
        number = call.number = next(self._numbers)
        self._sends[number] = call
        content = call.memory.numpy().tobytes() if message.nbytes <= EAGER_BYTES else b""
        self.edges.open_in(node)
        offer = self._queued[number] = note(FrameType.OFFER, number, envelope.pack() + content)
        self._enqueue(node, offer)

    def _receive(self, call: Call) -> None:
        message = call.message
        for node in self._nodes_of(message.peer):
            self.edges.open_in(node)
        letter = self._mailbox.receive(Wanted(message.peer, call.rank, message.tag), call)
        if letter is not None:
            self._unkeep(letter)
            self._meet(letter, call)

    def _nodes_of(self, peer: int) -> Iterator[int]:
        nodes = range(len(self._plan.members))
        if peer != ANY_SOURCE:
            nodes = range(node := self._plan.index_of_rank(peer), node + 1)
        return (node for node in nodes if node != self._me)

    # A message and a receive

    def _arrive(self, letter: Letter) -> None:
        receive = self._mailbox.arrive(letter.envelope, letter)
        if receive is not None:
            self._meet(letter, receive)
        elif letter.content is not None:
            self._keep(letter, letter.content)

    def _keep(self, letter: Letter, content: memoryview) -> None:
        """Nobody wants it yet, and the memory of its frame goes back."""
        fits = self._kept_bytes + len(content) <= KEPT_BYTES
        letter.content = memoryview(bytearray(content)) if fits else None
        if fits:
            self._kept_bytes += len(content)

    def _unkeep(self, letter: Letter) -> None:
        """It is in the mailbox no more."""
        if letter.content is not None:
            self._kept_bytes -= len(letter.content)

    def _meet(self, letter: Letter, receive: Call) -> None:
        envelope = letter.envelope
        letter.receive = receive
        if (envelope.dtype, envelope.nbytes) != (receive.dtype, receive.message.nbytes):
            self._reject(letter, self._mismatch(envelope, receive))
        elif letter.send is not None:
            self._copy(letter.send, receive)
        elif letter.content is not None:
            self._fill(letter, 0, letter.content)
        else:
            self._letters[letter.node, letter.number] = letter
            self._enqueue(letter.node, note(FrameType.GRANT, letter.number))

    def _copy(self, send: Call, receive: Call) -> None:
        """Both ranks are here: nothing can fail any more, and a copy must not hold up others."""
        self._calls -= {send, receive}

        def copy() -> None:
            receive.memory.copy_(send.memory)
            send.tell()
            receive.tell(source=send.rank)

        if send.message.nbytes <= INLINE_BYTES:
            copy()
        else:
            self._workers.submit(copy)

    def _fill(self, letter: Letter, offset: int, content: memoryview) -> None:
        assert letter.receive is not None
        if content:
            piece = torch.frombuffer(content, dtype=torch.uint8)
            letter.receive.memory[offset : offset + len(content)].copy_(piece)
        letter.received += len(content)
        if letter.received == letter.envelope.nbytes:
            self._complete(letter)

    def _complete(self, letter: Letter) -> None:
        assert letter.receive is not None
        self._letters.pop((letter.node, letter.number), None)
        self._enqueue(letter.node, note(FrameType.TAKEN, letter.number))
        self._end(letter.receive, source=letter.envelope.source)

    def _mismatch(self, envelope: Envelope, receive: Call) -> MismatchError:
        return MismatchError(
            f"in group '{self._plan.group}' rank {envelope.source} sends rank {envelope.target} "
            f"a {envelope.describe_tensor()} with tag {envelope.tag}, but the receive that takes "
            f"it is {receive.describe()}. Nothing was moved and the group is usable; make both "
            "agree.",
            group=self._plan.group,
            ranks=[envelope.source, envelope.target],
        )

    def _reject(self, letter: Letter, error: AllfoldError) -> None:
        """Both sides of a message that is not received get the same error."""
        self._letters.pop((letter.node, letter.number), None)
        if letter.send is not None:
            self._end(letter.send, error)
        else:
            self._enqueue(letter.node, error_note(FrameType.REFUSED, letter.number, error))
        if letter.receive is not None:
            self._end(letter.receive, error)

    def _end(self, call: Call, error: AllfoldError | None = None, source: int = -1) -> None:
        if call in self._calls:
            self._calls.remove(call)
            call.tell(error, source)

    # Frames

    def _enqueue(self, node: int, note: Note) -> None:
        self.edges.out(node).enqueue(note)
        self._touched.add(node)

    def sink_for(self, _source: int, _header: FrameHeader, _seconds: float) -> Pairs:
        """All frames of these edges are for this object."""
        return self

    def edge_lost(self, source: int, error: AllfoldError) -> None:
        """An in-edge is gone for good."""
        self._edge_lost(source, error)

    def incoherent(self, _seq: int, error: AllfoldError) -> None:
        """A frame does not fit, or is damaged: its edge cannot be trusted any more."""
        raise error

    def is_ready(self, _source: int) -> bool:
        """No frame ever waits."""
        return True

    def admit(self, source: int, header: FrameHeader) -> Spot | None:
        """Where to receive a frame."""
        if header.type is FrameType.PARCEL:
            with self._lock:
                letter = self._letters.get((source, header.seq))
            if letter is None:
                return None  # withdrawn, or its receive has failed
            fits = header.offset + header.length <= letter.envelope.nbytes
        else:
            fits = header.length <= _LONGEST_NOTE
        if not fits or header.type in (FrameType.DATA, FrameType.SIGNAL):
            raise PeerSentIncoherentTensor(
                f"message {header.seq}: a {header.type.name} of {header.length} bytes at "
                f"{header.offset} cannot be"
            )
        buffer = self._buffers.take(header.length)
        return Spot(source, header, buffer.view[: header.length], buffer)

    def retract(self, _source: int, landing: Spot) -> None:
        """The frame broke off."""
        landing.release()

    def all_received(self, _source: int) -> bool:
        """Every frame is acknowledged at once: its sender may be waiting to leave."""
        return True

    def received(self, landing: Spot) -> None:
        """Read a frame that has landed."""
        try:
            with self._turn():
                self._handle(landing.source, landing.header, landing.view)
        finally:
            landing.release()

    def _handle(self, source: int, header: FrameHeader, view: memoryview) -> None:
        number = header.seq
        match header.type:
            case FrameType.OFFER:
                envelope = Envelope.unpack(view)
                content = view[ENVELOPE_SIZE:]
                complete = len(content) == envelope.nbytes
                self._arrive(
                    Letter(envelope, source, number, content=content if complete else None)
                )
            case FrameType.GRANT:
                self._send_content(source, number)
            case FrameType.PARCEL:
                letter = self._letters.get((source, number))
                if letter is not None:
                    self._fill(letter, header.offset, view)
            case FrameType.TAKEN:
                self._conclude(number, None)
            case FrameType.REFUSED:
                self._conclude(number, from_dict(json.loads(bytes(view))))
            case FrameType.WITHDRAWN:
                self._forget(source, number, from_dict(json.loads(bytes(view))))

    def _send_content(self, node: int, number: int) -> None:
        call = self._sends.get(number)
        if call is None:
            return
        content = self._queued[number] = content_note(number, call.memory)
        self._enqueue(node, content)

    def _conclude(self, number: int, error: AllfoldError | None) -> None:
        """The outcome of a send, as the receiver says."""
        call = self._sends.pop(number, None)
        queued = self._queued.pop(number, None)
        if queued is not None:
            queued.cancelled = True
        if call is not None:
            self._end(call, error)

    def _forget(self, node: int, number: int, error: AllfoldError) -> None:
        """The sender wants to give up. It hears what has become of the message, as always."""
        letter = self._letters.get((node, number))
        if letter is not None:
            self._reject(letter, error)
            return
        for kept in self._mailbox.withdraw_if(
            lambda each: (each.node, each.number) == (node, number)
        ):
            self._unkeep(kept)
            self._enqueue(node, error_note(FrameType.REFUSED, number, error))

    # Outcomes that are no success

    def expire(self, now: float) -> None:
        """Fail the calls whose deadline has passed."""
        if not self._calls:
            return
        with self._turn():
            overdue = [call for call in self._calls if now >= call.deadline]
            self._give_up(
                {call: self._peer_has_left(call) or self._overdue(call) for call in overdue}
            )

    def _overdue(self, call: Call) -> PeerMissing:
        message = call.message
        if call.is_send:
            what = f"rank {message.peer} has not received it"
        else:
            peer = "no rank" if message.peer == ANY_SOURCE else f"rank {message.peer}"
            what = f"{peer} has {'' if message.peer == ANY_SOURCE else 'not '}sent it"
        return PeerMissing(
            f"{call.describe()} of rank {call.rank} in group '{self._plan.group}' missed its "
            f"timeout of {message.timeout:g} s: {what} (a message is received by a recv with the "
            "same tag, and the dtype and size are compared then)",
            group=self._plan.group,
            missing_ranks=[] if message.peer == ANY_SOURCE else [message.peer],
            timeout=message.timeout,
        )

    def _give_up(self, errors: dict[Call, AllfoldError]) -> None:
        """End calls, and tell the other side where it has one."""
        if not errors:
            return
        self._mailbox.cancel_if(lambda receive: receive in errors)
        self._mailbox.withdraw_if(lambda kept: kept.send in errors)
        for letter in [each for each in self._letters.values() if each.receive in errors]:
            assert letter.receive is not None
            self._reject(letter, errors[letter.receive])
        for call, error in errors.items():
            if call.number < 0:
                self._end(call, error)
            else:
                self._withdraw(call, error)

    def _withdraw(self, call: Call, error: AllfoldError) -> None:
        """Give up a message to another node, which may have it already: its word decides."""
        queued = self._queued.get(call.number)
        is_offer = queued is not None and queued.kind is FrameType.OFFER
        unsent = is_offer and queued is not None and not queued.has_begun
        if unsent or call.last_word is not None:
            self._conclude(call.number, error)
            return
        if queued is not None:
            queued.cancelled = True
        call.last_word = monotonic() + RECONNECT_SECONDS
        node = self._plan.index_of_rank(call.message.peer)
        self._enqueue(node, error_note(FrameType.WITHDRAWN, call.number, error))

    def _peer_has_left(self, call: Call) -> PeerLost | None:
        message = call.message
        others = {message.peer}
        if message.peer == ANY_SOURCE:
            others = set(range(self._plan.world_size)) - {call.rank}
        if not others <= self._left:
            return None
        who = "every other rank" if message.peer == ANY_SOURCE else f"rank {message.peer}"
        return PeerLost(
            f"{call.describe()} of rank {call.rank} can never be done: {who} has left group "
            f"'{self._plan.group}'",
            ranks=sorted(others),
        )

    def rank_left(self, rank: int) -> None:
        """A rank has left in order: it neither sends nor receives any more."""
        with self._turn():
            self._left.add(rank)
            hopeless = {call: self._peer_has_left(call) for call in self._calls}
            self._give_up({call: error for call, error in hopeless.items() if error is not None})

    def break_(self, error: AllfoldError) -> None:
        """The group has lost a member: fail what waits, and whatever comes."""
        with self._turn():
            if self._broken is None:
                self._broken = error
            for call in list(self._calls):
                self._end(call, self._broken)
            self._mailbox = Mailbox()
            self._kept_bytes = 0
            for number in list(self._sends):
                self._conclude(number, self._broken)
            self._letters.clear()

    def finish(self, deadline: float) -> None:
        """Let peers hear what they are owed, until ``deadline`` (monotonic)."""
        self.edges.finish(deadline)

    def close(self) -> None:
        """End the edges."""
        self.edges.close()
