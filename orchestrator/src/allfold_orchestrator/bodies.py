"""The bodies of REST: requests, checked strictly, and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from allfold_control.messages import MAX_GROUPS_OF_A_NODE, Given, IncidentReport
from allfold_core import schema
from allfold_core.group_options import KEY_DIGEST_PATTERN, Joins, OnLoss
from allfold_core.plan import Plan
from allfold_core.protocol.traffic import TrafficClass
from allfold_core.schedules.registry import SPELLING
from allfold_core.schema import (
    FIELD,
    MAX_WORLD_SIZE,
    MESSAGE,
    Address,
    ControlUrl,
    OpeningNumber,
    Rank,
)
from allfold_core.topology import LinkModel
from allfold_service.answers import SCHEMA, Answer, Shown

STRATEGY_PATTERN = f"^{SPELLING}$"
MAX_WAIT_SECONDS = 30.0
MAX_TIMEOUT_SECONDS = 366 * 24 * 3600.0
MAX_OVERRIDES = 64
MAX_PAGE = 1000
DEFAULT_PAGE = 100


Name = Annotated[schema.Name, Field(description="1-128 of A-Z a-z 0-9 . _ -")]
LeaveReason = Literal["finished", "withdrawn", "lost"]
Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_SECONDS, allow_inf_nan=False)]


class Request(Given):
    """The body of a request. ``schema`` is checked before any field, see :data:`MESSAGE`."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_known_schema(cls, body: Any) -> Any:
        return MESSAGE.read(body) if isinstance(body, dict) else body

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        document = handler.resolve_ref_schema(handler(core_schema))
        number = {
            "type": "integer",
            "minimum": 0,
            "maximum": MESSAGE.number,
            "default": MESSAGE.number,
            "description": SCHEMA,
        }
        document["properties"] = {FIELD: number, **document["properties"]}
        return document


class Link(Given):
    """The slowest link that an agent has measured."""

    latency: float = Field(ge=0, le=60, allow_inf_nan=False, description="Seconds, one way.")
    bandwidth: float = Field(
        ge=1e-3, le=1e18, allow_inf_nan=False, description="Bytes per second, one way."
    )


class RegisterNode(Request):
    """The registration of a node agent."""

    node: Name
    incarnation: Name = Field(
        description="New for every start of the agent, e.g. a UUID. It is never shown: who knows "
        "it is the node."
    )
    control_url: ControlUrl = Field(description="Its control port.")
    data_address: Address = Field(description="host:port of its data port.")
    device_type: str = Field(default="cpu", pattern=r"^[A-Za-z0-9._-]{1,32}$")
    zone: str = Field(default="", max_length=128, description="Nodes of one zone are near.")
    version: str = Field(default="", max_length=64, description="Of the agent's software.")
    cores: int = Field(default=0, ge=0, le=1 << 20, description="That it may run on; 0: unknown.")
    link: Link | None = Field(default=None, description="Where it has measured, from then on.")
    holds: dict[Name, OpeningNumber] = Field(
        default_factory=dict,
        max_length=MAX_GROUPS_OF_A_NODE,
        description="The openings that it is running, by group: an orchestrator that lost its "
        "state uses none of them again.",
    )


class Lease(Answer):
    """The lease of a node; each BEAT on its control link extends it."""

    lease_seconds: float
    heartbeat_seconds: float
    peers: list[str] = Field(
        default_factory=list,
        description="The data addresses of some on other machines, to measure its links.",
    )


class Empty(Answer):
    """The answer to a request that returns nothing."""


class NodeView(Shown):
    """One node."""

    node: str
    state: Literal["alive", "late", "gone"] = Field(
        description="late: its lease is over, but it has not been evicted yet."
    )
    heartbeat_age: float | None = Field(description="Seconds since its last heartbeat.")
    control_url: str
    data_address: str
    device_type: str
    zone: str
    version: str
    draining: bool = Field(description="It takes no ranks, and lets those that it has leave.")
    token: str = Field(description="The name of its token; empty without one.")
    progress: list[dict[str, Any]]


class RankOnNode(Shown):
    """A rank of a group on the node that is asked about, numbered as the group was opened."""

    group: str
    rank: int
    can_leave: bool = Field(description="The group is elastic: it can leave while that runs.")


class Draining(Answer):
    """The progress of a node that drains."""

    node: str
    draining: bool = Field(description="The node has said that it drains.")
    ranks: list[RankOnNode] = Field(description="Those that are still there.")


class Page(Answer):
    """A part of a list that is sorted by name."""

    next: str | None = Field(
        default=None, description="The next page is after=<this>; null on the last page."
    )


class ScrapeTarget(BaseModel):
    """An agent as Prometheus' HTTP service discovery wants it; such a list has no schema."""

    targets: list[str] = Field(description="host:port of its control port.")
    labels: dict[str, str] = Field(description="Of the node its name, and its token's.")


class NodeList(Page):
    """A page of the nodes that are registered, or were within the last hour."""

    nodes: list[NodeView]


class JoinGroup(Request):
    """The registration of a rank."""

    rank: Rank | None = Field(description="null: whichever is free.")
    node: Name
    incarnation: Name
    session: Name = Field(description="Of the rank's process, e.g. a UUID.")
    world_size: int = Field(
        ge=1, le=MAX_WORLD_SIZE, description="So many ranks open the group; others may join later."
    )
    timeout: Seconds = Field(description="The deadline of an op, where the call gives none.")
    strategies: dict[str, Annotated[str, Field(pattern=STRATEGY_PATTERN, max_length=64)]] = Field(
        default_factory=dict,
        max_length=MAX_OVERRIDES,
        description='Overrides by kind, e.g. {"all_reduce": "ring"}.',
    )
    on_loss: OnLoss = Field(
        default="raise",
        description="What happens to an op that the loss of a rank stops. raise: it fails on all "
        "others. shrink: those who are left do it again.",
    )
    min_world: int = Field(
        default=1,
        ge=1,
        le=MAX_WORLD_SIZE,
        description="The group does no op with fewer ranks; not above world_size.",
    )
    max_world: int | None = Field(
        default=None,
        ge=1,
        le=MAX_WORLD_SIZE,
        description="Ranks may join the group while it runs, up to this number; null: none may.",
    )
    joins: Joins = Field(
        default="any",
        description="Where they come in. any: between two ops. commit: only where all ranks commit "
        "their state.",
    )
    join_timeout: Seconds = Field(
        default=60.0,
        description="How long ops wait for ranks to join below min_world; the first rank's counts.",
    )
    traffic: TrafficClass = Field(default="normal", description="What its bytes give way to.")
    key: str = Field(
        default="",
        pattern=KEY_DIGEST_PATTERN,
        description="Digest of the group's key, which all its ranks must have; empty without one.",
    )


def _same_as(name: str) -> Any:
    """Return a field of an older name; it repeats the one above it."""
    note = f"The same as {name}; goes in 0.4."
    return Field(default_factory=lambda fields: fields[name], description=note)


class Joined(Answer):
    """The registration of a rank."""

    opening: int = Field(description="The opening that is forming, or was just formed.")
    epoch: int = _same_as("opening")
    ready: bool = Field(description="True once it is complete.")


class RankPlace(Shown):
    """A rank and the node it is on."""

    rank: int
    node: str


class PlanWaiting(Answer):
    """The state of a formation whose ranks are not all there: ask again."""

    ready: Literal[False] = False
    opening: int
    epoch: int = _same_as("opening")
    present: list[int]
    missing: list[int]
    gave_up: list[int] = Field(
        description="The missing ranks that came before, and withdrew because others were late."
    )
    refused: str = Field(
        description="What the last rank was told that came and did not fit; else empty."
    )
    was_open: bool = Field(description="True if a group of this name has been open before.")
    held_by: list[RankPlace] = Field(
        description="The ranks of the group's last opening: the name is free once all have left."
    )


class _AsWritten:
    """Makes a field have the JSON form of a plan, in which its options are not apart."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        form = core_schema.plain_serializer_function_ser_schema(Plan.to_dict)
        return cast(CoreSchema, {**handler(source), "serialization": form})

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: dict[str, Any], handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        fields = {name: value for name, value in schema.items() if name != "serialization"}
        reference = handler(cast(CoreSchema, fields))
        document = handler.resolve_ref_schema(reference)
        del document["properties"]["layout"]
        options = handler.resolve_ref_schema(document["properties"].pop("options"))
        document["properties"].update(options["properties"])
        document["required"][document["required"].index("options") :] = options["required"]
        return reference


class PlanComplete(Answer):
    """The plan of a complete group."""

    ready: Literal[True] = True
    plan: Annotated[Plan, _AsWritten]


class RunningGroup(Answer):
    """The answer to a rank that joins a group while it runs."""

    ready: Literal[True] = True
    record: dict[str, Any] = Field(description="Of the group's term, in which its node votes.")


class RankLeft(RankPlace):
    """A rank that left on its own; with which status its process ends is not known here."""

    reason: Literal["left", "withdrawn"]


class RankLost(RankPlace):
    """A rank that was lost: its process alone, or its whole node."""

    reason: Literal["lost", "node_lost"]


class NodeLost(Shown):
    """A node that a term leaves out, and how its end is known."""

    node: str
    how: str


class TermView(Shown):
    """The nodes of a group that decide together, until one of them is lost."""

    number: int = Field(description="Grows with every term of the group.")
    nodes: list[str] = Field(description="The first one leads.")
    lost: list[NodeLost] = Field(description="Those that this term leaves out.")
    trusted: bool = Field(
        description="false: the orchestrator may have lost a newer term, and waits for what agents "
        "report; meanwhile no node is left out for silence."
    )


Phase = Literal["forming", "ready", "reduced", "recalled", "gone", "unreadable"]


class GroupView(Shown):
    """The state of one group, for people.

    While a group runs, ``present``, ``left`` and ``lost`` are the ranks of its opening, all of them
    together, and ``waiting`` those that have come for the next one: it begins when the last rank of
    this one has left. While a group is forming, ``left`` and ``lost`` belong to the opening before.
    """

    group: str
    phase: Phase = Field(
        description="forming: waits for the missing ranks. ready: all ranks are there. reduced: "
        "it goes on without some, which have left or were lost, alone or with their node. "
        "recalled: its agents run it, and the orchestrator, which lost the record of it, shows "
        "what they have reported: the ranks of the newest term, numbered from 0. gone: nobody is "
        "there. unreadable: the record is damaged or of another version; the log says more."
    )
    opening: int = Field(description="The opening that runs or is forming, or the last one.")
    last_opening: int = Field(description="The last opening that was ever complete.")
    epoch: int = _same_as("opening")
    last_epoch: int = _same_as("last_opening")
    world_size: int | None
    timeout: float | None
    strategies: dict[str, str]
    on_loss: OnLoss | None
    min_world: int | None
    max_world: int | None
    traffic: TrafficClass | None
    present: list[RankPlace]
    missing: list[int]
    refused: str = Field(
        description="What the last rank was told that came to a forming group and did not fit."
    )
    left: list[RankLeft]
    lost: list[RankLost]
    waiting: list[RankPlace]
    term: TermView | None = Field(description="null while no rank is in the group.")
    ring_order: list[str] = Field(description="Nodes in the order of the ring.")
    tree_order: list[str] = Field(description="Nodes from the root of the trees downwards.")
    links: LinkModel | None = Field(description="The link model from which auto decides.")


class GroupAnswer(GroupView, Answer):
    """One group, as an answer of its own."""


class GroupList(Page):
    """A page of the groups that have a record."""

    groups: list[GroupView]


class IncidentList(Answer):
    """The latest incidents: open ones first, then the newest."""

    incidents: list[IncidentReport]


class Version(Answer):
    """The name and version of the service."""

    service: str
    version: str


class Facts(Answer):
    """An orchestrator's facts about itself, for ``allfold doctor``."""

    service: str
    version: str
    python: str
    now: float = Field(description="Its clock, in seconds since 1970.")
    needs_token: bool = Field(description="Whether requests must bring the join token.")
