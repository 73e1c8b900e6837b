"""Matching of messages with the receives of local ranks: small, large, and within the node."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from allfold_agent.p2p import messages
from allfold_agent.p2p.messages import (
    MessageSender,
    MessageTransfer,
    PendingCall,
    control_frame,
    error_frame,
)
from allfold_agent.p2p.sink import IncomingMessages
from allfold_agent.runtime.buffers import BufferPool, copy_bytes
from allfold_agent.runtime.threads import WorkerPool
from allfold_core.errors import AllfoldError
from allfold_core.mailbox import Mailbox, WantedMessage
from allfold_core.protocol.frames import FrameType

# What is kept of messages that nobody has received yet; beyond it their content is asked for again.
KEPT_BYTES = 16 << 20
# A hand-over to a worker costs more than to copy so much.
_INLINE_COPY_BYTES = 256 * 1024


class Inbox:
    """A mailbox that keeps the contents of messages within :data:`KEPT_BYTES`.

    Its owner's lock protects it.

    Attributes:
        kept_bytes: of the contents that are kept.
    """

    def __init__(self) -> None:
        self._mailbox: Mailbox[MessageTransfer, PendingCall] = Mailbox()
        self.kept_bytes = 0

    def arrive(self, transfer: MessageTransfer) -> PendingCall | None:
        """Return the receive that takes a message, or ``None``, and the message is kept."""
        receive = self._mailbox.arrive(transfer.envelope, transfer)
        if receive is None and transfer.content is not None:
            self._keep(transfer, transfer.content)
        return receive

    def receive(self, wanted: WantedMessage, call: PendingCall) -> MessageTransfer | None:
        """Return the message that a receive takes, or ``None``, and the receive waits."""
        transfer = self._mailbox.receive(wanted, call)
        if transfer is not None:
            self._unkeep(transfer)
        return transfer

    def withdraw_if(self, is_withdrawn: Callable[[MessageTransfer], bool]) -> list[MessageTransfer]:
        """Forget messages that nobody has received; returns them."""
        withdrawn = self._mailbox.withdraw_if(is_withdrawn)
        for transfer in withdrawn:
            self._unkeep(transfer)
        return withdrawn

    def cancel_if(self, is_cancelled: Callable[[PendingCall], bool]) -> list[PendingCall]:
        """Forget receives that wait; returns them."""
        return self._mailbox.cancel_if(is_cancelled)

    def sort_receives(self, target: int) -> None:
        """Put the receives of a rank in the order of their calls, after one has come back."""
        self._mailbox.sort_receives(target, lambda call: call.began)

    def _keep(self, transfer: MessageTransfer, content: memoryview) -> None:
        """Copy the content where it fits: the memory of its frame goes back."""
        fits = self.kept_bytes + len(content) <= KEPT_BYTES
        transfer.content = memoryview(bytearray(content)) if fits else None
        if fits:
            self.kept_bytes += len(content)

    def _unkeep(self, transfer: MessageTransfer) -> None:
        if transfer.content is not None:
            self.kept_bytes -= len(transfer.content)


class MessageMatching(IncomingMessages):
    """The messages and the receives of the ranks of a node.

    Args:
        group: its name.
        workers: who copies what is large.
        buffers: where frames land.
        edge_lost: called when nothing more can be received from a node.
    """

    def __init__(
        self,
        group: str,
        workers: WorkerPool,
        buffers: BufferPool,
        edge_lost: Callable[[str, AllfoldError], None],
    ) -> None:
        super().__init__(buffers, edge_lost)
        self._group = group
        self._workers = workers
        self._inbox = Inbox()
        self._calls: set[PendingCall] = set()

    @abstractmethod
    def _enqueue(self, node: str, note: MessageSender) -> None:
        """Queue frames for a node."""

    def _receive(self, call: PendingCall) -> None:
        message = call.message
        transfer = self._inbox.receive(WantedMessage(message.peer, call.rank, message.tag), call)
        if transfer is not None:
            self._meet(transfer, call)

    def _take_kept(self, call: PendingCall) -> bool:
        """Receive what has come in full from ranks that are gone; false where there is nothing."""
        self._calls.add(call)
        self._receive(call)
        if self._inbox.cancel_if(lambda waiting: waiting is call):
            self._calls.remove(call)
            return False
        return True

    def _arrive(self, transfer: MessageTransfer) -> None:
        receive = self._inbox.arrive(transfer)
        if receive is not None:
            self._meet(transfer, receive)

    def _meet(self, transfer: MessageTransfer, receive: PendingCall) -> None:
        envelope = transfer.envelope
        transfer.receive = receive
        if not receive.fits(envelope):
            self._reject(transfer, messages.mismatch(self._group, envelope, receive))
        elif transfer.send is not None:
            self._copy(transfer.send, receive)
        elif transfer.content is not None:
            self._fill(transfer, 0, transfer.content)
        else:
            self._transfers[transfer.node, transfer.number] = transfer
            self._enqueue(transfer.node, control_frame(FrameType.GRANT, transfer.number))

    def _copy(self, send: PendingCall, receive: PendingCall) -> None:
        """Both ranks are here: nothing can fail any more, and a copy must not hold up others."""
        self._calls -= {send, receive}

        def copy() -> None:
            copy_bytes(receive.memory, send.memory)
            send.report()
            receive.report(source=send.rank)

        if send.message.nbytes <= _INLINE_COPY_BYTES:
            copy()
        else:
            self._workers.submit(copy)

    def _fill(self, transfer: MessageTransfer, offset: int, content: memoryview) -> None:
        assert transfer.receive is not None
        if content:
            copy_bytes(transfer.receive.memory[offset : offset + len(content)], content)
        transfer.received += len(content)
        if transfer.received == transfer.envelope.nbytes:
            self._complete(transfer)

    def _complete(self, transfer: MessageTransfer) -> None:
        assert transfer.receive is not None
        self._transfers.pop((transfer.node, transfer.number), None)
        self._enqueue(transfer.node, control_frame(FrameType.TAKEN, transfer.number))
        self._end(transfer.receive, source=transfer.envelope.source)

    def _reject(self, transfer: MessageTransfer, error: AllfoldError) -> None:
        """Both sides of a message that is not received get the same error."""
        self._transfers.pop((transfer.node, transfer.number), None)
        if transfer.send is not None:
            self._end(transfer.send, error)
        else:
            self._enqueue(transfer.node, error_frame(FrameType.REFUSED, transfer.number, error))
        if transfer.receive is not None:
            self._end(transfer.receive, error)

    def _end(self, call: PendingCall, error: AllfoldError | None = None, source: int = -1) -> None:
        if call in self._calls:
            self._calls.remove(call)
            call.report(error, source)
