"""Matching of messages with the receives of local ranks: small, large, and within the node."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch

from allfold_agent.edges.out_edge import INLINE_MESSAGE_BYTES
from allfold_agent.p2p import refusals
from allfold_agent.p2p.inbox import Inbox
from allfold_agent.p2p.messages import (
    MessageSender,
    PendingCall,
    Transfer,
    control_frame,
    error_frame,
)
from allfold_agent.p2p.sink import IncomingMessages
from allfold_agent.runtime.buffers import BufferPool
from allfold_agent.runtime.workers import WorkerPool
from allfold_core.errors import AllfoldError
from allfold_core.mailbox import Wanted
from allfold_core.wire.frames import FrameType


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
        transfer = self._inbox.receive(Wanted(message.peer, call.rank, message.tag), call)
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

    def _arrive(self, transfer: Transfer) -> None:
        receive = self._inbox.arrive(transfer)
        if receive is not None:
            self._meet(transfer, receive)

    def _meet(self, transfer: Transfer, receive: PendingCall) -> None:
        envelope = transfer.envelope
        transfer.receive = receive
        if not receive.fits(envelope):
            self._reject(transfer, refusals.mismatch(self._group, envelope, receive))
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
            receive.memory.copy_(send.memory)
            send.report()
            receive.report(source=send.rank)

        if send.message.nbytes <= INLINE_MESSAGE_BYTES:
            copy()
        else:
            self._workers.submit(copy)

    def _fill(self, transfer: Transfer, offset: int, content: memoryview) -> None:
        assert transfer.receive is not None
        if content:
            piece = torch.frombuffer(content, dtype=torch.uint8)
            transfer.receive.memory[offset : offset + len(content)].copy_(piece)
        transfer.received += len(content)
        if transfer.received == transfer.envelope.nbytes:
            self._complete(transfer)

    def _complete(self, transfer: Transfer) -> None:
        assert transfer.receive is not None
        self._transfers.pop((transfer.node, transfer.number), None)
        self._enqueue(transfer.node, control_frame(FrameType.TAKEN, transfer.number))
        self._end(transfer.receive, source=transfer.envelope.source)

    def _reject(self, transfer: Transfer, error: AllfoldError) -> None:
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
