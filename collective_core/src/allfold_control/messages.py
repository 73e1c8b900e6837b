"""The messages on a control link, of both directions: JSON objects with ``type`` and the schema.

Reading is checking. What an agent says may have no other fields: it is a mistake of whoever wrote
it. What the orchestrator says may: a newer one may have more to say.
"""

from __future__ import annotations

import zlib
from base64 import b64decode
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator

from allfold_control.records import Record, checked
from allfold_core.incident import MAX_EVIDENCE_TEXT, MAX_SENTENCE, Cause, Effect
from allfold_core.schema import (
    FIELD,
    MESSAGE,
    Generation,
    LastSeq,
    Name,
    OpeningNumber,
    Rank,
    Seq,
    read_object,
)
from allfold_core.survival.suspicion import SuspicionKind

MAX_MESSAGE_BYTES = 16 << 20
"""The record of the largest group that may be takes half of this."""
MAX_PEERS = 16_384
MAX_GROUPS_OF_A_NODE = 4096
# The plan of the largest group that may be takes a quarter of this.
_LONGEST_BODY = 64 << 20
_GZIP = 16 + zlib.MAX_WBITS

_Age = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Given(BaseModel):
    """A part of a request: no conversions, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


# What an agent says


class Held(Given, strict=False):
    """One group of an agent that registers: the newest term that it was told, with its seats."""

    group: Name
    record: Record
    is_out: bool = False


class Register(Given):
    """The first message, and the answer to RECALL: what the agent holds.

    It is a promise to take no term that was announced in an earlier generation of the store.
    """

    type: Literal["register"] = "register"
    generation: Generation = Field(description="It registered with last.")
    incarnation: Name
    groups: list[Held] = Field(default_factory=list, max_length=MAX_GROUPS_OF_A_NODE)


class Progress(Given):
    """The progress of one group on one node."""

    group: Name
    epoch: OpeningNumber
    last_seq: LastSeq = Field(description="The last op that is done; -1 before the first.")
    in_flight: Seq = Field(description="Ops that have begun.")


class Beat(Given):
    """Every half second: how late the agent is, and how long ago it heard each other node."""

    type: Literal["beat"] = "beat"
    number: Seq
    lag: _Age = 0.0
    heard: dict[Name, _Age] = Field(default_factory=dict, max_length=MAX_PEERS)
    progress: list[Progress] = Field(default_factory=list, max_length=MAX_GROUPS_OF_A_NODE)
    draining: bool = Field(default=False, description="It takes no ranks, and lets its own leave.")


class Suspect(Given):
    """Another node is refused, silent or stuck, for ``since`` seconds; ``lag`` is its reporter's.

    A node that is stuck answers, but does not do its part: only WITHDRAW clears it.
    """

    type: Literal["suspect"] = "suspect"
    node: Name
    incarnation: Name
    kind: SuspicionKind
    since: _Age = 0.0
    lag: _Age = 0.0


class Withdraw(Given):
    """Takes a suspicion back: the node was heard, or does its part again."""

    type: Literal["withdraw"] = "withdraw"
    node: Name
    incarnation: Name
    kind: SuspicionKind


class Alive(Given):
    """The answer to PROBE; ``lag`` is how late the thread is that reads the links to agents."""

    type: Literal["alive"] = "alive"
    nonce: Name
    lag: _Age


_UnixSeconds = Annotated[float, Field(ge=0, allow_inf_nan=False, description="Since 1970.")]
_Figure = Annotated[str, Field(max_length=MAX_EVIDENCE_TEXT)] | int | float | None


class IncidentCulprit(Given):
    """The rank, node, link or store that causes an incident."""

    kind: Literal["rank", "node", "link", "store"]
    node: str = Field(max_length=128)
    rank: Rank | None
    to: str = Field(max_length=128, description="The node at the other end of a link.")


class IncidentReport(Given):
    """One incident: what keeps ops from going on, and who causes it."""

    id: str = Field(min_length=1, max_length=256, description="The same as long as it lasts.")
    cause: Annotated[Cause, Field(strict=False)]
    communication: bool = Field(description="Links or agents are at fault, not ranks.")
    effect: Annotated[Effect, Field(strict=False)]
    culprit: IncidentCulprit
    sentence: str = Field(max_length=MAX_SENTENCE, description="The evidence, for people.")
    group: str = Field(max_length=128)
    opening: OpeningNumber
    seq: Seq | None = Field(description="The op that waits, or has failed.")
    began: _UnixSeconds
    seen: _UnixSeconds
    ended: _UnixSeconds | None = Field(description="null while it lasts.")
    reporter: str = Field(max_length=128, description="The node that has found it.")
    evidence: dict[Annotated[str, Field(max_length=64)], _Figure] = Field(max_length=32)


class Told(Given):
    """An incident that the agent has found: it is new, has changed, lasts or is over."""

    type: Literal["incident"] = "incident"
    incident: IncidentReport


class Ask(Given):
    """A request for a rank: ``body`` is that of REST, refused by itself if invalid.

    It is asked again, perhaps of another replica, where the link ends before its answer: a join is
    known by its session, and leaving twice is fine.
    """

    type: Literal["join", "leave"]
    number: Seq
    body: dict[str, Any]


Up = Register | Beat | Suspect | Withdraw | Alive | Told | Ask
_UP: TypeAdapter[Up] = TypeAdapter(Annotated[Up, Field(discriminator="type")])

# What the orchestrator says


class Registered(BaseModel):
    """The answer to REGISTER.

    Attributes:
        is_evicted: this life of the node is over; nothing else counts then.
        out: the groups that go on without this node.
        how: it is known that this life is over; a phrase to follow the node's name.
    """

    type: Literal["registered"] = "registered"
    generation: int = 0
    is_evicted: bool = False
    out: list[str] = []
    how: str = "was evicted by the orchestrator"


class BeatAnswered(BaseModel):
    """The answer to the BEAT of this number.

    Attributes:
        limits: all caps on what the agent sends, where they have changed, see ``Cap``.
    """

    type: Literal["beat"] = "beat"
    number: int
    limits: list[dict[str, Any]] | None = None


class TermAnnounced(BaseModel):
    """The term of a group, announced in a generation of the orchestrator's store."""

    type: Literal["term"] = "term"
    generation: int
    group: str
    record: Record


class Probe(BaseModel):
    """A question for a sign of life, to be answered at once."""

    type: Literal["probe"] = "probe"
    nonce: str


class PingFor(BaseModel):
    """A question whether another node lives; its age in a BEAT is the answer."""

    type: Literal["ping_for"] = "ping_for"
    node: str
    incarnation: str


class Cleared(BaseModel):
    """A node that this one has suspected lives; it may be silent for ``patience`` seconds."""

    type: Literal["cleared"] = "cleared"
    node: str
    incarnation: str
    patience: float = Field(ge=0, allow_inf_nan=False)


class Recall(BaseModel):
    """The store may have lost something: the agent is to register again."""

    type: Literal["recall"] = "recall"
    generation: int


class Drain(BaseModel):
    """The request of an operator that the node admit no more ranks and have its own leave."""

    type: Literal["drain"] = "drain"


class Answer(BaseModel):
    """The answer to the requests of these numbers, as REST would give it."""

    type: Literal["answer"] = "answer"
    numbers: list[int]
    status: int
    body: dict[str, Any]

    @field_validator("body", mode="before")
    @classmethod
    def _unpacked(cls, body: object) -> object:
        """A plan of many ranks comes compressed, as a string."""
        return read_object(_decompressed(b64decode(body))) if isinstance(body, str) else body


Down = (
    Registered | BeatAnswered | TermAnnounced | Probe | PingFor | Cleared | Recall | Answer | Drain
)
_DOWN: TypeAdapter[Down] = TypeAdapter(Annotated[Down, Field(discriminator="type")])


def from_agent(text: str) -> Up:
    """Return a message of an agent.

    Raises:
        ValueError: it is none, or of another schema (``UnknownSchema``).
    """
    return checked(_UP, MESSAGE.read(read_object(text)))


def from_orchestrator(text: str | bytes) -> Down:
    """Return a message of the orchestrator; raises as :func:`from_agent`."""
    return checked(_DOWN, MESSAGE.read(read_object(text)))


def dump(message: Up | Down) -> str:
    """Return a message as it is sent."""
    return f'{{"{FIELD}":{MESSAGE.number},{message.model_dump_json()[1:]}'


def answer(numbers: Sequence[int], body: str, status: int = 200) -> str:
    """Return the :class:`Answer` to some requests: what REST answers, and its HTTP status.

    Args:
        body: JSON, or a JSON string that is JSON after base64 and gzip. It goes as it is: one that
            many wait for is written once.
    """
    head = dump(Answer(numbers=[*numbers], status=status, body={}))
    return f"{head.removesuffix('{}}')}{body}}}"


def _decompressed(data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=_GZIP)
    try:
        found = unpacker.decompress(data, _LONGEST_BODY)
    except zlib.error as error:
        raise ValueError(f"a body cannot be decompressed: {error}") from error
    if not unpacker.eof:
        raise ValueError(f"a body is cut off, or has more than {_LONGEST_BODY} bytes")
    return found
