"""The messages to the ranks of a node that nobody has received yet, and the receives that wait."""

from __future__ import annotations

from collections.abc import Callable

from allfold_agent.p2p.messages import PendingCall, Transfer
from allfold_core.mailbox import Mailbox, Wanted

# What is kept of messages that nobody has received yet; beyond it their content is asked for again.
KEPT_BYTES = 16 << 20


class Inbox:
    """A mailbox that keeps the contents of messages within :data:`KEPT_BYTES`.

    Its owner's lock protects it.

    Attributes:
        kept_bytes: of the contents that are kept.
    """

    def __init__(self) -> None:
        self._mailbox: Mailbox[Transfer, PendingCall] = Mailbox()
        self.kept_bytes = 0

    def arrive(self, transfer: Transfer) -> PendingCall | None:
        """Return the receive that takes a message, or ``None``, and the message is kept."""
        receive = self._mailbox.arrive(transfer.envelope, transfer)
        if receive is None and transfer.content is not None:
            self._keep(transfer, transfer.content)
        return receive

    def receive(self, wanted: Wanted, call: PendingCall) -> Transfer | None:
        """Return the message that a receive takes, or ``None``, and the receive waits."""
        transfer = self._mailbox.receive(wanted, call)
        if transfer is not None:
            self._unkeep(transfer)
        return transfer

    def withdraw_if(self, is_withdrawn: Callable[[Transfer], bool]) -> list[Transfer]:
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

    def _keep(self, transfer: Transfer, content: memoryview) -> None:
        """Copy the content where it fits: the memory of its frame goes back."""
        fits = self.kept_bytes + len(content) <= KEPT_BYTES
        transfer.content = memoryview(bytearray(content)) if fits else None
        if fits:
            self.kept_bytes += len(content)

    def _unkeep(self, transfer: Transfer) -> None:
        if transfer.content is not None:
            self.kept_bytes -= len(transfer.content)
