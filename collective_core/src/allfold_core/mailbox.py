"""Point-to-point messages: their envelopes, and how they are matched with receives. Pure.

The rules are those of MPI: a receive names a source, or any, and a tag; between two ranks and with
one tag, what was sent first is received first.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from allfold_core.dtypes import DType

ANY_SOURCE = -1
_ENVELOPE = struct.Struct("<iiqBxxxxxxxQ")

Sent = TypeVar("Sent")
Waiting = TypeVar("Waiting")


@dataclass(frozen=True, slots=True)
class Envelope:
    """The envelope of a message.

    Attributes:
        source: the rank that sends it.
        target: the rank that it is for.
        tag: any number of 63 bits; only a receive with the same one gets it.
        dtype: of its elements.
        nbytes: its size.
    """

    source: int
    target: int
    tag: int
    dtype: DType
    nbytes: int

    def pack(self) -> bytes:
        """The :data:`ENVELOPE_SIZE` bytes of it."""
        return _ENVELOPE.pack(self.source, self.target, self.tag, self.dtype.code, self.nbytes)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Envelope:
        """The inverse of :meth:`pack`, reading no more; ``ValueError`` for what is none."""
        if len(data) < _ENVELOPE.size:
            raise ValueError(f"an envelope has {_ENVELOPE.size} bytes, not {len(data)}")
        source, target, tag, dtype, nbytes = _ENVELOPE.unpack_from(data)
        return cls(source, target, tag, DType.from_code(dtype), nbytes)

    def describe_tensor(self) -> str:
        """The content, for people: ``float32[12]``."""
        return f"{self.dtype.label}[{self.nbytes // self.dtype.itemsize}]"


ENVELOPE_SIZE = _ENVELOPE.size


@dataclass(frozen=True, slots=True)
class Wanted:
    """The messages that a receive takes: ``source`` may be :data:`ANY_SOURCE`."""

    source: int
    target: int
    tag: int

    def takes(self, envelope: Envelope) -> bool:
        """Return True for a message, to the same rank, that this receive takes."""
        return self.tag == envelope.tag and self.source in (ANY_SOURCE, envelope.source)


class Mailbox(Generic[Sent, Waiting]):
    """The messages and the receives of some ranks that are not matched yet.

    Messages and receives are kept with whatever object their owner knows them by.
    """

    def __init__(self) -> None:
        self._messages: dict[int, list[tuple[Envelope, Sent]]] = defaultdict(list)
        self._receives: dict[int, list[tuple[Wanted, Waiting]]] = defaultdict(list)

    def arrive(self, envelope: Envelope, message: Sent) -> Waiting | None:
        """A message has come: return the oldest receive that takes it, else keep the message."""
        receives = self._receives[envelope.target]
        for index, (wanted, receive) in enumerate(receives):
            if wanted.takes(envelope):
                del receives[index]
                return receive
        self._messages[envelope.target].append((envelope, message))
        return None

    def receive(self, wanted: Wanted, receive: Waiting) -> Sent | None:
        """A rank receives: return the oldest message that fits, else keep the receive."""
        messages = self._messages[wanted.target]
        for index, (envelope, message) in enumerate(messages):
            if wanted.takes(envelope):
                del messages[index]
                return message
        self._receives[wanted.target].append((wanted, receive))
        return None

    def withdraw_if(self, is_withdrawn: Callable[[Sent], bool]) -> list[Sent]:
        """Forget unmatched messages; return them."""
        withdrawn: list[Sent] = []
        for target, kept in self._messages.items():
            staying: list[tuple[Envelope, Sent]] = []
            for envelope, message in kept:
                if is_withdrawn(message):
                    withdrawn.append(message)
                else:
                    staying.append((envelope, message))
            self._messages[target] = staying
        return withdrawn

    def cancel_if(self, is_cancelled: Callable[[Waiting], bool]) -> list[Waiting]:
        """Forget unmatched receives; return them."""
        cancelled: list[Waiting] = []
        for target, kept in self._receives.items():
            cancelled += [each for _, each in kept if is_cancelled(each)]
            self._receives[target] = [each for each in kept if not is_cancelled(each[1])]
        return cancelled

    def sort_receives(self, target: int, key: Callable[[Waiting], float]) -> None:
        """Order the receives of a rank, of which the first that takes a message gets it."""
        self._receives[target].sort(key=lambda each: key(each[1]))
