"""Memory for the payloads that come in the short lane."""

from __future__ import annotations

LONGEST_PAYLOAD = 512 * 1024
"""Of a frame: short against the caches, long against what it takes to send one."""

_MOST_IDLE = 32

Payload = memoryview | bytearray


class Payloads:
    """Memory for long payloads; what was used last is used next, as the caches have it.

    Attributes:
        files_come: False once a frame of a node on this machine came without the file that it is
            in: something between the two passes bytes alone.
    """

    def __init__(self) -> None:
        self._idle: list[bytearray] = []
        self.files_come = True

    def take(self, nbytes: int) -> memoryview:
        """Return memory of a size, until it is given back."""
        memory = self._idle.pop() if self._idle else bytearray(LONGEST_PAYLOAD)
        return memoryview(memory)[:nbytes]

    def clear(self) -> None:
        """Give what is idle back to the system."""
        self._idle.clear()

    def give_back(self, payload: Payload) -> None:
        """Take a payload back, if it is of this memory."""
        memory = payload.obj if isinstance(payload, memoryview) else None
        if not isinstance(memory, bytearray) or len(memory) != LONGEST_PAYLOAD:
            return
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(memory)
