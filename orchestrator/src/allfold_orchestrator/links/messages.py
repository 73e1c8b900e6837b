"""The messages on a control link: JSON objects with a ``type`` and the schema number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from allfold_core.schema import MESSAGE, read_object
from allfold_orchestrator.membership.group_state import Life
from allfold_orchestrator.membership.term_record import Registration, TermRecord
from allfold_orchestrator.wire import (
    MAX_GROUPS_OF_A_NODE,
    MAX_WORLD_SIZE,
    Address,
    ControlUrl,
    EpochNumber,
    Given,
    IncidentReport,
    JoinGroup,
    LeaveReason,
    Name,
    Progress,
    Rank,
)

MAX_MESSAGE_BYTES = 16 << 20
"""The record of the largest group that may be takes half of this."""
MAX_GENERATION = (1 << 12) - 1
MAX_PEERS = 16_384
_Age = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Pair = Annotated[list[Name], Field(min_length=2, max_length=2)]
_Loss = Annotated[list[str], Field(min_length=2, max_length=2)]


class _Voter(Given):
    incarnation: Name
    data_address: Address
    control_url: ControlUrl
    device_type: str = Field(default="cpu", max_length=32)
    zone: str = Field(default="", max_length=128)


class _Newcomer(_Voter):
    node: Name


class _Term(Given):
    number: EpochNumber
    generation: int = Field(ge=0, le=MAX_GENERATION)
    voters: list[Name] = Field(min_length=1, max_length=MAX_PEERS)
    joined: list[EpochNumber] = Field(max_length=MAX_PEERS)
    lost: list[_Loss] = Field(default_factory=list, max_length=MAX_PEERS)
    newcomers: list[_Newcomer] = Field(default_factory=list, max_length=MAX_PEERS)


class _Recall(Given):
    until: float
    registered: list[Name]


class HeldRecord(Given):
    """The record of a term as an agent was told it."""

    epoch: EpochNumber
    term: _Term
    voters: dict[Name, _Voter] = Field(max_length=MAX_PEERS)
    seats: list[_Pair] = Field(max_length=MAX_WORLD_SIZE)
    generation: int = Field(ge=0, le=MAX_GENERATION)
    recall: _Recall | None = None
    plan: dict[str, Any] | None = None

    def record(self) -> TermRecord:
        """Return the record; raises ``ValueError`` unless its parts fit each other."""
        term = self.term
        if len(term.voters) != len(term.joined) or set(term.voters) != set(self.voters):
            raise ValueError("a term names each of its voters once, with an address and a number")
        return TermRecord.from_dict(self.model_dump())


class Held(Given):
    """One group of an agent that registers."""

    group: Name
    record: HeldRecord
    is_out: bool = False


class Register(Given):
    """The first message, and the answer to RECALL: what the agent holds.

    It is a promise to take no term that was announced in an earlier generation of the store.
    """

    type: Literal["register"]
    generation: int = Field(ge=0, le=MAX_GENERATION, description="It registered with last.")
    incarnation: Name
    groups: list[Held] = Field(default_factory=list, max_length=MAX_GROUPS_OF_A_NODE)

    def report(self, life: Life, held: Held) -> Registration:
        """Return what the agent says of one group."""
        return Registration(life, self.generation, held.record.record(), held.is_out)


class Beat(Given):
    """Every half second: how late the agent is, and how long ago it heard each other node."""

    type: Literal["beat"]
    number: int = Field(ge=0, le=2**63 - 1)
    lag: _Age = 0.0
    heard: dict[Name, _Age] = Field(default_factory=dict, max_length=MAX_PEERS)
    progress: list[Progress] = Field(default_factory=list, max_length=MAX_GROUPS_OF_A_NODE)
    draining: bool = Field(default=False, description="It takes no ranks, and lets its own leave.")


class Accuse(Given):
    """Another node is refused, silent or stuck, for ``since`` seconds; ``lag`` is its accuser's.

    A node that is stuck answers, but does not do its part: only WITHDRAW acquits it.
    """

    type: Literal["accuse"]
    node: Name
    incarnation: Name
    charge: Literal["refused", "silent", "stuck"]
    since: _Age = 0.0
    lag: _Age = 0.0


class Withdraw(Given):
    """Takes an accusation back: the node was heard, or does its part again."""

    type: Literal["withdraw"]
    node: Name
    incarnation: Name
    charge: Literal["refused", "silent", "stuck"]


class Alive(Given):
    """The answer to PROBE; ``lag`` is how late the thread is that reads the links to agents."""

    type: Literal["alive"]
    nonce: Name
    lag: _Age


class Told(Given):
    """An incident that the agent has found: it is new, has changed, lasts or is over."""

    type: Literal["incident"]
    incident: IncidentReport


class Ask(Given):
    """A request for a rank: ``body`` is a JoinBody or a LeaveBody, refused by itself if invalid.

    It is asked again, perhaps of another replica, where the link ends before its answer: a join is
    known by its session, and leaving twice is fine.
    """

    type: Literal["join", "leave"]
    number: int = Field(ge=0, le=2**63 - 1)
    body: dict[str, Any]


class JoinBody(JoinGroup):
    """As ``POST /v1/groups/{group}/ranks``; answered as the plan that it then waits for."""

    group: Name
    wait: _Age = Field(description="Seconds until the answer comes without the plan.")


class LeaveBody(Given):
    """As ``DELETE /v1/groups/{group}/ranks/{rank}``."""

    group: Name
    rank: Rank
    session: Name
    reason: LeaveReason
    ended: EpochNumber = 0
    was_joining: bool = False


Up = Register | Beat | Accuse | Withdraw | Alive | Told | Ask
_UP: TypeAdapter[Up] = TypeAdapter(Annotated[Up, Field(discriminator="type")])


def parse(text: str) -> Up:
    """Return a message of an agent.

    Raises:
        ValueError: it is none, or of another schema (``UnknownSchema``).
    """
    return _UP.validate_python(MESSAGE.read(read_object(text)))


def _message(kind: str, fields: Mapping[str, Any]) -> str:
    return json.dumps(MESSAGE.stamp({"type": kind, **fields}), separators=(",", ":"))


def registered(generation: int, *, out: list[str]) -> str:
    """Return the answer to REGISTER; ``out``: the groups that go on without the agent."""
    return _message("registered", {"generation": generation, "is_evicted": False, "out": out})


def life_is_over(how: str) -> str:
    """Return the news, also in answer to REGISTER, that the agent was evicted; ``how``: why."""
    return _message("registered", {"generation": 0, "is_evicted": True, "out": [], "how": how})


def beat(number: int) -> str:
    """Return the answer to BEAT."""
    return _message("beat", {"number": number})


def term(generation: int, group: str, record: TermRecord) -> str:
    """Return the announcement of a term, in a generation of the store."""
    body = {"generation": generation, "group": group, "record": record.to_dict()}
    return _message("term", body)


def probe(nonce: str) -> str:
    """Return the question for a sign of life."""
    return _message("probe", {"nonce": nonce})


def ping_for(life: Life) -> str:
    """Return the request to ping another node, whose age in the next BEAT is the answer."""
    return _message("ping_for", {"node": life[0], "incarnation": life[1]})


def cleared(life: Life, patience: float) -> str:
    """Return the acquittal of a node, with how long it may be silent from now on."""
    body = {"node": life[0], "incarnation": life[1], "patience": patience}
    return _message("cleared", body)


def drain() -> str:
    """Return the request to take no ranks any more, and to have those that are there leave."""
    return _message("drain", {})


def recall(generation: int) -> str:
    """Return the request to register again: the store may have lost something."""
    return _message("recall", {"generation": generation})


def answer(numbers: Sequence[int], body: str, status: int = 200) -> str:
    """Return the answer to some requests: what REST answers, and its HTTP status.

    Args:
        body: JSON, or a JSON string that is JSON after base64 and gzip.
    """
    head = _message("answer", {"numbers": numbers, "status": status})
    return f'{head[:-1]},"body":{body}}}'
