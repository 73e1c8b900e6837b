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

from allfold_core.dtypes import NO_ALIAS, Alias, DType

ANY_SOURCE = -1
_ENVELOPE = struct.Struct("<iiqBBxxIQ")

Sent = TypeVar("Sent")
Waiting = TypeVar("Waiting")


@dataclass(frozen=True, slots=True)
class Envelope:
    """The envelope of a message.

    Attributes:
        source: the rank that sends it.
        target: the rank that it is for.
        tag: any number of 63 bits; only a receive with the same one gets it.
        dtype: in which its elements travel.
        nbytes: its size.
        alias: the type of the caller's elements, where it is another one.
    """

    source: int
    target: int
    tag: int
    dtype: DType
    nbytes: int
    alias: Alias = NO_ALIAS

    def pack(self) -> bytes:
        """The bytes of it, the first of a message."""
        name, width = self.alias.encode(), self.alias.width
        code = self.dtype.code
        head = (self.source, self.target, self.tag, code, len(name), width, self.nbytes)
        return _ENVELOPE.pack(*head) + name

    @classmethod
    def unpack(cls, data: memoryview) -> tuple[Envelope, memoryview]:
        """Return the envelope of a message, and what is behind it.

        Raises:
            ValueError: it has none.
        """
        if len(data) < _ENVELOPE.size:
            raise ValueError(f"an envelope has {_ENVELOPE.size} bytes, not {len(data)}")
        source, target, tag, dtype, nname, width, nbytes = _ENVELOPE.unpack_from(data)
        end = _ENVELOPE.size + nname
        if len(data) < end:
            raise ValueError(f"an envelope of {end} bytes was cut to {len(data)}")
        alias = Alias.decode(data[_ENVELOPE.size : end], width)
        return cls(source, target, tag, DType.from_code(dtype), nbytes, alias), data[end:]

    def describe_tensor(self) -> str:
        """The content, for people: ``float32[12]``."""
        return describe_tensor(self.dtype, self.alias, self.nbytes)


def describe_tensor(dtype: DType, alias: Alias, nbytes: int) -> str:
    """Describe the tensor of a message for people: ``float32[12]``.

    Args:
        dtype: in which its elements travel.
        alias: the type of the caller's elements, where it is another one.
        nbytes: its size.
    """
    itemsize = dtype.itemsize * alias.width
    return f"{alias.label(dtype)}[{nbytes // itemsize if itemsize else 0}]"


@dataclass(frozen=True, slots=True)
class WantedMessage:
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
        self._receives: dict[int, list[tuple[WantedMessage, Waiting]]] = defaultdict(list)

    def arrive(self, envelope: Envelope, message: Sent) -> Waiting | None:
        """A message has come: return the oldest receive that takes it, else keep the message."""
        receives = self._receives[envelope.target]
        for index, (wanted, receive) in enumerate(receives):
            if wanted.takes(envelope):
                del receives[index]
                return receive
        self._messages[envelope.target].append((envelope, message))
        return None

    def receive(self, wanted: WantedMessage, receive: Waiting) -> Sent | None:
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
