"""The messages of a peer link: a fixed header, then a body.

Two agents that share a group have one link. It carries the messages of their agreements, and pings.
The content of a message identifies it, so a message may come twice, or be lost with its connection.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

from allfold_core.protocol.frames import FrameError
from allfold_core.schema import read_object

MAGIC = 0xAF02
LINK_PROTOCOL = "allfold-link/1"
MAX_BODY = 16 << 20

_HEADER = struct.Struct("<HBxII")
_CHECK = struct.Struct("<I")
HEADER_SIZE = _HEADER.size + _CHECK.size

_CHOSEN = struct.Struct("<Q")
_PING = struct.Struct("<QH")
_GROUP = struct.Struct("<IH")
_PROGRESS = struct.Struct("<qqQ")
_FLOOR = struct.Struct("<qH")
_NAME = struct.Struct("<H")


class LinkMessageType(IntEnum):
    """The content of a message.

    The first four belong to the link itself. The others belong to a group, and their bodies are
    JSON objects that the link does not look into.

    ==========  =====================================================================
    HELLO       who is at this end; the first message of both ends
    CHOSEN      this connection is the link from here on; from the node of the earlier name
    PING        asks for a ``PONG``; and how far the sender's groups are
    PONG        the answer; and what the sender knows of how far all nodes are
    FREEZE      the leader begins a round
    FROZEN      the report of a node for a round
    INSTALL     the decision of a round
    DOWN        ranks of the sending node are dead, or have left
    DOUBT       an op cannot go on
    TERM        a term that the receiver may not know, or that leaves it out
    HELD        the sender holds its part of the result of an op
    CLOSED      the group is over on the sending node
    RATES       how fast other nodes have sent to the sender of late
    WISHES      ranks of the sending node want to join or to leave, or have come to a boundary
    OBSERVED    the sender has seen whom it waits for, how slow ranks are, or an incident
    ==========  =====================================================================
    """

    HELLO = 1
    CHOSEN = 2
    PING = 3
    PONG = 4
    FREEZE = 5
    FROZEN = 6
    INSTALL = 7
    DOWN = 9
    DOUBT = 10
    TERM = 11
    HELD = 12
    CLOSED = 13
    RATES = 14
    WISHES = 15
    OBSERVED = 16


_TYPES = frozenset(LinkMessageType)


class Hello(NamedTuple):
    """The node at one end of a connection, and which life of its agent this is."""

    node: str
    incarnation: str

    def pack(self) -> bytes:
        """The message as bytes."""
        return _packed(LinkMessageType.HELLO, _json(self._asdict()))


class Chosen(NamedTuple):
    """The choice of one connection; of two choices that of the higher number is the later one."""

    number: int

    def pack(self) -> bytes:
        """The message as bytes."""
        return _packed(LinkMessageType.CHOSEN, _CHOSEN.pack(self.number))


class GroupProgress(NamedTuple):
    """The progress of a node in one group.

    Attributes:
        group: the group's name.
        opening: the number that the orchestrator gave this opening of the name.
        watermark: all ops up to this one are final on the node; -1 for none.
        seq: its oldest open op; -1 for none.
        digest: of that op's fingerprint, as in frames to the receiver.
    """

    group: str
    opening: int
    watermark: int
    seq: int
    digest: int


class Floor(NamedTuple):
    """The sender's knowledge of the progress of all nodes of one group.

    Attributes:
        group: the group's name.
        opening: the number that the orchestrator gave this opening of the name.
        floor: the lowest watermark of all nodes.
        waits_for: the nodes whose reports the sender's round waits for; of a leader only.
    """

    group: str
    opening: int
    floor: int
    waits_for: tuple[str, ...] = ()


class Ping(NamedTuple):
    """A sign of life that asks for one.

    Attributes:
        number: grows with every ping to the receiver.
        progress: of the sender, by group.
    """

    number: int
    progress: tuple[GroupProgress, ...] = ()

    def pack(self) -> bytes:
        """The message as bytes."""
        parts = [_PING.pack(self.number, len(self.progress))]
        for group, opening, *numbers in self.progress:
            parts += [_group(group, opening), _PROGRESS.pack(*numbers)]
        return _packed(LinkMessageType.PING, b"".join(parts))


class Pong(NamedTuple):
    """The answer to the ping of the same number."""

    number: int
    floors: tuple[Floor, ...] = ()

    def pack(self) -> bytes:
        """The message as bytes."""
        parts = [_PING.pack(self.number, len(self.floors))]
        for group, opening, floor, waits_for in self.floors:
            parts += [_group(group, opening), _FLOOR.pack(floor, len(waits_for))]
            parts += map(_name, waits_for)
        return _packed(LinkMessageType.PONG, b"".join(parts))


class GroupMessage(NamedTuple):
    """A message of one opening of a group; its type says what the body, a JSON object, means."""

    type: LinkMessageType
    group: str
    opening: int
    body: dict[str, Any]

    def pack(self) -> bytes:
        """The message as bytes; :class:`FrameError` where it is too long."""
        return _packed(self.type, _group(self.group, self.opening) + _json(self.body))


LinkMessage = Hello | Chosen | Ping | Pong | GroupMessage


class LinkReader:
    """Cuts the bytes of one connection into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[LinkMessage]:
        """Take the next bytes; yield the messages that are complete with them.

        Raises:
            FrameError: they are no messages of this protocol. Nothing can be read any more.
        """
        self._data += data
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> LinkMessage | None:
        data = self._data
        if len(data) < HEADER_SIZE:
            return None
        kind, length, check = _unpack_header(bytes(data[:HEADER_SIZE]))
        end = HEADER_SIZE + length
        if len(data) < end:
            return None
        body = bytes(data[HEADER_SIZE:end])
        del data[:end]
        if zlib.crc32(body) != check:
            raise FrameError(f"a {kind.name} is damaged: the checksum of its body differs")
        return _unpack(kind, body)


def _packed(kind: LinkMessageType, body: bytes) -> bytes:
    if len(body) > MAX_BODY:
        raise FrameError(f"a {kind.name} has {len(body)} bytes, more than {MAX_BODY}")
    header = _HEADER.pack(MAGIC, kind, len(body), zlib.crc32(body))
    return header + _CHECK.pack(zlib.crc32(header)) + body


def _unpack_header(header: bytes) -> tuple[LinkMessageType, int, int]:
    """Type, length of the body and its checksum."""
    magic, kind, length, check = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise FrameError(f"not a message of a link: magic {magic:#06x}, expected {MAGIC:#06x}")
    if _CHECK.unpack_from(header, _HEADER.size) != (zlib.crc32(header[: _HEADER.size]),):
        raise FrameError("the header of a message is damaged: its checksum differs")
    if kind not in _TYPES:
        raise FrameError(f"a message of an unknown type: {kind}")
    if length > MAX_BODY:
        raise FrameError(f"a message has {length} bytes, more than {MAX_BODY}")
    return LinkMessageType(kind), length, check


def _unpack(kind: LinkMessageType, body: bytes) -> LinkMessage:
    parts = _Parts(body)
    try:
        message = _read(kind, parts)
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise FrameError(f"a {kind.name} cannot be read: {error}") from error
    if parts.left:
        raise FrameError(f"a {kind.name} has {parts.left} bytes too many")
    return message


def _read(kind: LinkMessageType, parts: _Parts) -> LinkMessage:
    match kind:
        case LinkMessageType.HELLO:
            body = parts.json()
            return Hello(_text(body["node"]), _text(body["incarnation"]))
        case LinkMessageType.CHOSEN:
            return Chosen(*parts.take(_CHOSEN))
        case LinkMessageType.PING:
            number, count = parts.take(_PING)
            entries = (GroupProgress(*parts.group(), *parts.take(_PROGRESS)) for _ in range(count))
            return Ping(number, tuple(entries))
        case LinkMessageType.PONG:
            number, count = parts.take(_PING)
            return Pong(number, tuple(parts.floor() for _ in range(count)))
        case _:
            group, opening = parts.group()
            return GroupMessage(kind, group, opening, parts.json())


class _Parts:
    """The parts of a body, one after the other."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    @property
    def left(self) -> int:
        """The bytes that nobody has taken."""
        return len(self._body) - self._at

    def take(self, structure: struct.Struct) -> tuple[Any, ...]:
        """The fields of a struct; ``struct.error`` where it is cut off."""
        fields = structure.unpack_from(self._body, self._at)
        self._at += structure.size
        return fields

    def group(self) -> tuple[str, int]:
        """The name and opening of a group."""
        opening, length = self.take(_GROUP)
        return self._decoded(length), opening

    def floor(self) -> Floor:
        """Read one group's entry of an answer to a ping."""
        group, opening = self.group()
        floor, count = self.take(_FLOOR)
        return Floor(group, opening, floor, tuple(self._name() for _ in range(count)))

    def _name(self) -> str:
        (length,) = self.take(_NAME)
        return self._decoded(length)

    def _decoded(self, length: int) -> str:
        text = self._body[self._at : self._at + length]
        if len(text) < length:
            raise ValueError("a name is cut off")
        self._at += length
        return text.decode()

    def json(self) -> dict[str, Any]:
        """The rest, a JSON object."""
        value = read_object(self._body[self._at :])
        self._at = len(self._body)
        return value


def _group(name: str, opening: int) -> bytes:
    encoded = name.encode()
    return _GROUP.pack(opening, len(encoded)) + encoded


def _name(name: str) -> bytes:
    encoded = name.encode()
    return _NAME.pack(len(encoded)) + encoded


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} in place of a text")
    return value
