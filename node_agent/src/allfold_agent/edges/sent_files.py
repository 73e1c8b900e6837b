"""The files that the receiver of a connection has mapped, as the sender knows them."""

from __future__ import annotations

from allfold_agent.runtime.buffers import Buffer

# A mapping costs the receiver address space, and a new one page faults.
SLOTS = 8


class SentFiles:
    """The work buffers whose files were passed on one connection, each in a slot.

    A buffer that is used for op after op keeps its slot. Where there are more buffers than slots,
    a new one takes the slot of the one that was passed first.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._passed = 0

    def slot_of(self, buffer: Buffer) -> int | None:
        """Return the slot of a buffer; ``None`` if the receiver does not have its file."""
        return self._slots.get(buffer.serial)

    @property
    def next_slot(self) -> int:
        """The slot that the next file takes."""
        return self._passed % SLOTS

    def note(self, buffer: Buffer) -> None:
        """The file of a buffer was passed: it is in :attr:`next_slot`."""
        if self._passed >= SLOTS:
            del self._slots[next(iter(self._slots))]  # passed first, so it has that slot
        self._slots[buffer.serial] = self.next_slot
        self._passed += 1
