"""Sends and receives of one group on this node: point-to-point messages between two ranks.

A send is done when the receiver has the content, so both sides have the same outcome. A small
message travels with its offer. The content of a large one follows only when a receive has taken the
offer, so little is buffered for messages that nobody receives. Between ranks of one node it is
copied directly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from allfold_agent.edges.edges import DialFrom, Edges, SenderTo
from allfold_agent.edges.in_edge import InEdge
from allfold_agent.edges.members import GroupLife, GroupNodes
from allfold_agent.edges.opening import Traffic
from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.execution.op import RankEndpoint
from allfold_agent.p2p import messages
from allfold_agent.p2p.matching import Inbox, MessageMatching
from allfold_agent.p2p.messages import (
    MessageSender,
    MessageTransfer,
    PendingCall,
    checked_call,
    error_frame,
    send_outcome,
)
from allfold_agent.p2p.outbox import ANSWER_SECONDS, Outbox
from allfold_agent.p2p.seats import GoneSeats, NodesOfSeats
from allfold_agent.runtime.buffers import BufferPool
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.threads import WorkerPool
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    ServiceError,
    from_json,
)
from allfold_core.mailbox import ANY_SOURCE, Envelope
from allfold_core.plan import Plan
from allfold_core.protocol.frames import FrameHeader, FrameType
from allfold_core.protocol.rank_messages import P2PMessage
from allfold_core.survival.plans import first_epoch
from allfold_core.survival.records import Seat
from allfold_core.verdict import LEFT

log = logging.getLogger(__name__)

NOBODY: Mapping[int, str] = {}


class P2PEngine(MessageMatching):
    """The point-to-point messages of a group on this node, over all its epochs.

    It knows a rank by the number of its seat for as long as the group lasts.

    Args:
        plan: with which the group was opened.
        me: the name of this node.
        members: all nodes of the group.
        dial: opens edges.
        workers: who copies what is large.
        buffers: where frames land.
        edge_lost: called when nothing more can be received from a node.
        reactor: exchanges frames with other nodes.
        sender: has what is sent paced.
    """

    def __init__(
        self,
        plan: Plan,
        me: str,
        members: GroupNodes,
        dial: DialFrom,
        workers: WorkerPool,
        buffers: BufferPool,
        edge_lost: Callable[[str, AllfoldError], None],
        reactor: Reactor,
        sender: SenderTo,
    ) -> None:
        super().__init__(plan.group, workers, buffers, edge_lost)
        self.edges = Edges(
            plan.group, plan.opening, me, members, dial, self, reactor, sender, Traffic.PAIRS
        )
        self._seats = NodesOfSeats(first_epoch(plan).seats)
        self._me = me
        self._members = members
        self._touched: set[str] = set()
        self._outbox = Outbox(self._seats, self.edges, self._enqueue, self._end)
        self._gone = GoneSeats(plan.group, self._seats)
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
        """True while a local rank waits for a message."""
        return bool(self._calls)

    @property
    def open_calls(self) -> int:
        """The number of sends and receives of local ranks that have no outcome yet."""
        return len(self._calls)

    def waiting_calls(self) -> list[PendingCall]:
        """The sends and receives of local ranks that have no outcome yet, the oldest first."""
        with self._lock:
            return sorted(self._calls, key=lambda call: call.began)

    def unmatched_calls(self) -> list[PendingCall]:
        """The sends and receives of local ranks for which no message is under way to this node.

        The rank at the other end of a send may have called its side of it: only its node knows.
        """
        with self._lock:
            served = {transfer.receive for transfer in self._transfers.values()}
            return [call for call in self._calls if call not in served]

    def serve_edge(self, destination: str) -> OutEdge:
        """The out-edge that another node has opened."""
        with self._lock:
            return self.edges.out(destination)

    # Calls of the local ranks

    def submit(
        self,
        seat: int,
        connection: RankEndpoint,
        number: int,
        message: P2PMessage,
        seats: Sequence[int],
    ) -> None:
        """A local rank sends or receives.

        Args:
            seat: the seat number of the rank.
            seats: by the numbers that it knows the others by, their seat numbers.
        """
        try:
            call = checked_call(self._group, seat, connection, number, message, seats)
        except ValueError as error:
            refusal = error if isinstance(error, AllfoldError) else InvalidArgument(str(error))
            send_outcome(connection, number, message, refusal)
            return
        with self._turn():
            hopeless = self._broken or self._gone.error_of(call)
            if hopeless is not None:
                of_lost = call.message.peer == ANY_SOURCE or self._gone.is_lost(call.message.peer)
                if self._broken or call.is_send or not (of_lost and self._take_kept(call)):
                    send_outcome(connection, number, message, hopeless)
                return
            try:
                self._open_edges(call)
            except ServiceError as error:
                send_outcome(connection, number, message, error)
                return
            self._calls.add(call)
            if call.is_send:
                self._send(call)
            else:
                self._receive(call)

    def _open_edges(self, call: PendingCall) -> None:
        """Open what the call needs, before anything depends on it: both ways to its peers."""
        for node in self._nodes_of(call.message.peer):
            self.edges.out(node)
            self.edges.open_in(node)

    def _send(self, call: PendingCall) -> None:
        message = call.message
        envelope = Envelope(
            call.rank, message.peer, message.tag, call.dtype, message.nbytes, message.alias
        )
        node = self._seats.node_of(message.peer)
        if node == self._me:
            self._arrive(MessageTransfer(envelope, node, send=call))
        else:
            self._outbox.offer(node, call, envelope)

    def _nodes_of(self, peer: int) -> list[str]:
        nodes = self._seats.nodes if peer == ANY_SOURCE else {self._seats.node_of(peer)}
        return [node for node in nodes if node != self._me and self._members.life_of(node)]

    # Frames

    def _enqueue(self, node: str, note: MessageSender) -> None:
        """Queue frames; words about messages go ahead, they need not wait for any content.

        Only offers have an order, among themselves; and a message is withdrawn after its offer was
        sent, and nothing of it comes later.
        """
        urgent = note.kind not in (FrameType.OFFER, FrameType.PARCEL)
        self.edges.out(node).enqueue(note, urgent=urgent)
        self._touched.add(node)

    def read(self, source: str, header: FrameHeader, view: memoryview) -> None:
        with self._turn():
            self._handle(source, header, view)

    def _handle(self, source: str, header: FrameHeader, view: memoryview) -> None:
        number = header.seq
        match header.type:
            case FrameType.OFFER:
                envelope, content = Envelope.unpack(view)
                if self._gone.is_lost(envelope.source) or self._gone.is_lost(envelope.target):
                    return
                complete = len(content) == envelope.nbytes
                self._arrive(
                    MessageTransfer(envelope, source, number, content=content if complete else None)
                )
            case FrameType.GRANT:
                self._outbox.send_content(source, number)
            case FrameType.PARCEL:
                transfer = self._transfers.get((source, number))
                if transfer is not None:
                    self._fill(transfer, header.offset, view)
            case FrameType.TAKEN:
                self._outbox.conclude(number, None)
            case FrameType.REFUSED:
                self._outbox.conclude(number, from_json(bytes(view)))
            case FrameType.WITHDRAWN:
                self._forget(source, number, from_json(bytes(view)))

    def _forget(self, node: str, number: int, error: AllfoldError) -> None:
        """Withdraw a message for its sender, which is answered unless it was answered before."""
        transfer = self._transfers.get((node, number))
        if transfer is not None:
            self._reject(transfer, error)
            return
        withdrawn = self._inbox.withdraw_if(lambda each: (each.node, each.number) == (node, number))
        for _ in withdrawn:
            self._enqueue(node, error_frame(FrameType.REFUSED, number, error))

    # Failures

    def expire(self, now: float, hindered: Mapping[int, str] = NOBODY) -> None:
        """Fail the calls whose deadline has passed.

        Args:
            hindered: by seat number, what is known of ranks that keep others waiting: a phrase.
        """
        if not self._calls:
            return
        with self._turn():
            self._outbox.extend_patience(now)
            overdue = [call for call in self._calls if now >= call.deadline]
            unanswered = [call for call in overdue if self._is_in_doubt(call)]
            for call in unanswered:
                self._wait_on(call, now)
            self._give_up(
                {
                    call: self._gone.error_of(call) or messages.overdue(self._group, call, hindered)
                    for call in overdue
                    if call not in unanswered
                }
            )

    def _wait_on(self, call: PendingCall, now: float) -> None:
        """Wait for the answer that decides: it comes, or the group goes on without its node."""
        log.warning("%s", messages.unanswered(self._group, call, ANSWER_SECONDS))
        self._outbox.wait_on(call, now)

    def _is_in_doubt(self, call: PendingCall) -> bool:
        """Return True for a withdrawn send whose receiver owes an answer that decides.

        Not where the receiver has left: before that it saw to its answers being sent.
        """
        return self._outbox.is_in_doubt(call) and self._gone.error_of(call) is None

    def _give_up(self, errors: dict[PendingCall, AllfoldError]) -> None:
        """End calls, and tell the other side where it has one."""
        if not errors:
            return
        self._inbox.cancel_if(lambda receive: receive in errors)
        self._inbox.withdraw_if(lambda kept: kept.send in errors)
        for transfer in [each for each in self._transfers.values() if each.receive in errors]:
            assert transfer.receive is not None
            self._reject(transfer, errors[transfer.receive])
        for call, error in errors.items():
            if call.number < 0:
                self._end(call, error)
            else:
                self._outbox.withdraw(call, error)

    def seats_added(self, seats: Sequence[Seat]) -> None:
        """Ranks have joined: their messages count, also for receives that wait for any rank."""
        with self._turn():
            self._seats.add(seats)
            for call in [each for each in self._calls if each.message.peer == ANY_SOURCE]:
                self._open_edges(call)

    def rank_left(self, seat: int, how: str = LEFT) -> None:
        """Fail what waits for a rank that has left in order: it neither sends nor receives.

        Args:
            how: a phrase to follow its name.
        """
        with self._turn():
            self._gone.leave(seat, how)
            hopeless = {call: self._gone.error_of(call) for call in self._calls}
            self._give_up({call: error for call, error in hopeless.items() if error is not None})

    def seat_lost(self, seat: int, error: AllfoldError, *, fail_any_source: bool = False) -> None:
        """A rank is lost: fail what was sent to it, and what waits for a message of it.

        A message of it that has come in full can still be received, even later.

        Args:
            error: of these calls.
            fail_any_source: whether receives from any rank fail as well, where no message has been
                found yet. Else they fail only where no other rank is left.
        """
        with self._turn():
            self._gone.lose(seat, error)
            self._inbox.withdraw_if(lambda kept: _is_void(kept, seat))
            underway = [each for each in self._transfers.values() if each.envelope.source == seat]
            served = {each.receive for each in self._transfers.values()} - {
                each.receive for each in underway
            }

            def fails(call: PendingCall) -> bool:
                if seat in (call.rank, call.message.peer):
                    return True
                of_any = call.message.peer == ANY_SOURCE and call not in served
                return of_any and (fail_any_source or self._gone.error_of(call) is not None)

            failed = {call for call in self._calls if fails(call)}
            self._abandon(failed, error)
            for transfer in underway:
                self._transfers.pop((transfer.node, transfer.number), None)
                if transfer.receive is not None and transfer.receive not in failed:
                    self._receive(transfer.receive)
                    self._inbox.sort_receives(transfer.receive.rank)

    def _abandon(self, calls: set[PendingCall], error: AllfoldError) -> None:
        """End calls whose other side hears of the reason by itself."""
        self._inbox.cancel_if(calls.__contains__)
        self._inbox.withdraw_if(lambda kept: kept.send in calls)
        for key, transfer in list(self._transfers.items()):
            if transfer.receive in calls:
                del self._transfers[key]
        for call in calls:
            if call.number < 0:
                self._end(call, error)
            else:
                self._outbox.conclude(call.number, error)

    def break_(self, error: AllfoldError) -> None:
        """The group has lost a member: fail what waits, and whatever comes."""
        with self._turn():
            if self._broken is None:
                self._broken = error
            for call in list(self._calls):
                self._end(call, self._broken)
            self._inbox = Inbox()
            self._outbox.conclude_all(self._broken)
            self._transfers.clear()

    def detach(self, lives: Collection[GroupLife]) -> list[OutEdge | InEdge]:
        """Return the edges to and from nodes without which the group goes on, to be closed."""
        with self._lock:
            return self.edges.detach(lives)

    def finish(self, deadline: float) -> None:
        """Wait until peers have what was sent to them, or ``deadline`` (monotonic)."""
        self.edges.finish(deadline)

    def close(self) -> None:
        """End the edges."""
        self.edges.close()


def _is_void(kept: MessageTransfer, seat: int) -> bool:
    """Return True for a message to a lost rank, or one of it that has not come in full."""
    envelope = kept.envelope
    return envelope.target == seat or (envelope.source == seat and kept.content is None)
