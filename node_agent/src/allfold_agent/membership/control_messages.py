"""The messages on a control link as an agent sees them: JSON objects with ``type`` and schema."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, field_validator

from allfold_core.incident import Incident
from allfold_core.schema import MESSAGE, read_object
from allfold_core.survival.suspicion import Charge

# The plan of the largest group that may be takes a quarter of this.
_LONGEST_BODY = 64 << 20
_GZIP = 16 + zlib.MAX_WBITS


class Registered(BaseModel):
    """The answer to REGISTER.

    Attributes:
        is_evicted: this life of the node is over; nothing else counts then.
        out: the groups that go on without this node.
        how: it is known that this life is over; a phrase to follow the node's name.
    """

    type: Literal["registered"]
    generation: int
    is_evicted: bool
    out: list[str]
    how: str = "was evicted by the orchestrator"


class BeatAnswered(BaseModel):
    """The answer to the BEAT of this number."""

    type: Literal["beat"]
    number: int


class TermAnnounced(BaseModel):
    """The term of a group, announced in a generation of the orchestrator's store."""

    type: Literal["term"]
    generation: int
    group: str
    record: dict[str, Any]


class Probe(BaseModel):
    """A question for a sign of life, to be answered at once."""

    type: Literal["probe"]
    nonce: str


class PingFor(BaseModel):
    """A question whether another node lives; its age in a BEAT is the answer."""

    type: Literal["ping_for"]
    node: str
    incarnation: str


class Cleared(BaseModel):
    """A node that this one has accused lives; it may be silent for ``patience`` seconds."""

    type: Literal["cleared"]
    node: str
    incarnation: str
    patience: float = Field(ge=0, allow_inf_nan=False)


class Recall(BaseModel):
    """The store may have lost something: the agent is to register again."""

    type: Literal["recall"]
    generation: int


class Drain(BaseModel):
    """The request of an operator that the node admit no more ranks and have its own leave."""

    type: Literal["drain"]


class Answer(BaseModel):
    """The answer to the requests of these numbers, as REST would give it."""

    type: Literal["answer"]
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


def parse(text: str | bytes) -> Down:
    """Return a message of the orchestrator.

    Raises:
        ValueError: it is none, or of another schema (``UnknownSchema``).
    """
    return _DOWN.validate_python(MESSAGE.read(read_object(text)))


def _decompressed(data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=_GZIP)
    try:
        found = unpacker.decompress(data, _LONGEST_BODY)
    except zlib.error as error:
        raise ValueError(f"a body cannot be decompressed: {error}") from error
    if not unpacker.eof:
        raise ValueError(f"a body is cut off, or has more than {_LONGEST_BODY} bytes")
    return found


def _message(kind: str, fields: Mapping[str, Any]) -> str:
    return json.dumps(MESSAGE.stamp({"type": kind, **fields}), separators=(",", ":"))


def register(generation: int, incarnation: str, groups: list[dict[str, Any]]) -> str:
    """Return what an agent holds; ``generation``: of the store with which it registered last."""
    fields = {"generation": generation, "incarnation": incarnation, "groups": groups}
    return _message("register", fields)


def beat(
    number: int,
    lag: float,
    heard: Mapping[str, float],
    progress: list[dict[str, Any]],
    *,
    draining: bool = False,
) -> str:
    """Return a sign of life, with the seconds since each other node was heard."""
    fields = {"number": number, "lag": lag, "heard": heard, "progress": progress}
    return _message("beat", {**fields, "draining": draining})


def accuse(node: str, incarnation: str, charge: Charge, since: float, lag: float) -> str:
    """Return an accusation of another node, with how late the accuser is itself."""
    life = {"node": node, "incarnation": incarnation}
    return _message("accuse", {**life, "charge": charge, "since": since, "lag": lag})


def withdraw(node: str, incarnation: str, charge: Charge) -> str:
    """Return that what another node was accused of is over."""
    return _message("withdraw", {"node": node, "incarnation": incarnation, "charge": charge})


def alive(nonce: str, lag: float) -> str:
    """Return the answer to PROBE."""
    return _message("alive", {"nonce": nonce, "lag": lag})


def incident(found: Incident) -> str:
    """Return the news of an incident: it was found, has changed, lasts or is over."""
    return _message("incident", {"incident": found.to_dict()})


def join(number: int, body: Mapping[str, Any]) -> str:
    """Return a request for a rank's seat; its answer is the plan, or what that waits for."""
    return _message("join", {"number": number, "body": body})


def leave(number: int, body: Mapping[str, Any]) -> str:
    """Return a request to take a rank's seat back."""
    return _message("leave", {"number": number, "body": body})
