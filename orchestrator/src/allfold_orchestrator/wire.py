"""The JSON that the control plane speaks: requests, which are checked strictly, and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from allfold_core.plan import Plan

NAME_PATTERN = r"^[A-Za-z0-9._-]{1,128}$"
ADDRESS_PATTERN = r"^[^\s/]{1,255}:[0-9]{1,5}$"
STRATEGY_PATTERN = r"^[a-z0-9_() ]{1,64}$"
MAX_WORLD_SIZE = 100_000
MAX_WAIT_SECONDS = 30.0

Name = Annotated[str, Field(pattern=NAME_PATTERN, description="1-128 of A-Z a-z 0-9 . _ -")]
Rank = Annotated[int, Field(ge=0, lt=MAX_WORLD_SIZE)]
EpochNumber = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Request(BaseModel):
    """Bodies of requests: no conversions, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Answer(BaseModel):
    """Bodies of answers."""

    model_config = ConfigDict(frozen=True)


class Link(Request):
    """What an agent has measured of its links to others: the slowest."""

    latency: float = Field(ge=0, le=60, allow_inf_nan=False, description="Seconds, one way.")
    bandwidth: float = Field(
        ge=1e-3, le=1e18, allow_inf_nan=False, description="Bytes per second, one way."
    )


class RegisterNode(Request):
    """An agent introduces itself."""

    node: Name
    incarnation: Name = Field(description="New for every start of the agent, e.g. a UUID.")
    control_url: str = Field(pattern=r"^https?://\S{1,255}$", description="Its control port.")
    data_address: str = Field(pattern=ADDRESS_PATTERN, description="host:port of its data port.")
    device_type: str = Field(default="cpu", pattern=r"^[A-Za-z0-9._-]{1,32}$")
    zone: str = Field(default="", max_length=128, description="Nodes of one zone are near.")
    version: str = Field(default="", max_length=64, description="Of the agent's software.")
    link: Link | None = Field(default=None, description="Where it has measured, from then on.")
    holds: dict[Name, EpochNumber] = Field(
        default_factory=dict,
        description="The epochs it is running, by group: an orchestrator that lost its memory "
        "uses none of them again.",
    )


class Lease(Answer):
    """The node is in, for as long as its heartbeats come."""

    lease_seconds: float
    heartbeat_seconds: float
    peers: list[str] = Field(
        default_factory=list,
        description="The data addresses of some others, to which it may measure its links.",
    )


class Progress(Request):
    """How far one group is on one node."""

    group: Name
    epoch: EpochNumber
    last_seq: int = Field(ge=-1, description="The last op that is done; -1 before the first.")
    in_flight: int = Field(ge=0, description="Ops that have begun.")


class Heartbeat(Request):
    """The node is alive, and this is how far it is."""

    incarnation: Name
    progress: list[Progress] = Field(default_factory=list, max_length=4096)


class Empty(Answer):
    """Done; there is nothing to say."""


class NodeView(Answer):
    """One node."""

    node: str
    state: Literal["alive", "late", "gone"] = Field(
        description="late: its lease is over, but it has not been given up yet."
    )
    heartbeat_age: float | None = Field(description="Seconds since its last heartbeat.")
    incarnation: str
    control_url: str
    data_address: str
    device_type: str
    zone: str
    version: str
    progress: list[dict[str, Any]]


class NodeList(Answer):
    """The nodes that are here, or were within the last hour."""

    nodes: list[NodeView]


class JoinGroup(Request):
    """A rank asks for its seat."""

    rank: Rank
    node: Name
    incarnation: Name
    session: Name = Field(description="Of the rank's process, e.g. a UUID.")
    world_size: int = Field(ge=1, le=MAX_WORLD_SIZE)
    timeout: Seconds = Field(description="The deadline of an op, where the call gives none.")
    strategies: dict[str, Annotated[str, Field(pattern=STRATEGY_PATTERN)]] = Field(
        default_factory=dict, description='Overrides by kind, e.g. {"all_reduce": "ring"}.'
    )


class Joined(Answer):
    """The rank has its seat."""

    epoch: int = Field(description="The epoch that is forming, or was just formed.")
    ready: bool = Field(description="Whether it is complete.")


class PlanWaiting(Answer):
    """The wait is over and ranks are still missing: ask again."""

    ready: Literal[False] = False
    epoch: int
    present: list[int]
    missing: list[int]
    gave_up: list[int] = Field(
        description="Those of the missing ranks that came, and waited in vain for the others."
    )


class PlanComplete(Answer):
    """The group is complete."""

    ready: Literal[True] = True
    plan: Plan


class RankPlace(Answer):
    """A rank and the node it is on."""

    rank: int
    node: str


class RankLeft(RankPlace):
    """A rank that left on its own."""

    reason: Literal["finished", "withdrawn"]


Phase = Literal["forming", "ready", "closing", "broken", "gone"]


class GroupView(Answer):
    """One group, for people.

    ``present`` and ``missing`` belong to ``epoch``. While a group is forming, ``left`` and
    ``lost`` tell what became of the epoch before, if some of its ranks have not left it yet.
    """

    group: str
    phase: Phase = Field(
        description="forming: waits for the missing ranks. ready: complete. closing: some ranks "
        "have finished. broken: some ranks were lost. gone: nobody is there."
    )
    epoch: int = Field(description="The epoch that is forming, or the last one.")
    last_epoch: int = Field(description="The last epoch that was ever complete.")
    world_size: int | None
    timeout: float | None
    strategies: dict[str, str]
    present: list[RankPlace]
    missing: list[int]
    left: list[RankLeft]
    lost: list[RankPlace]
    ring_order: list[str] = Field(description="Nodes in the order of the ring.")
    tree_order: list[str] = Field(description="Nodes from the root of the trees downwards.")


class GroupList(Answer):
    """All groups that are remembered."""

    groups: list[GroupView]


class Alive(Answer):
    """The process runs."""

    status: Literal["ok"] = "ok"


class Check(Answer):
    """One thing that must work."""

    name: str
    ok: bool
    reason: str


class Readiness(Answer):
    """Whether requests can be served, and if not, why."""

    ready: bool
    checks: list[Check]


class Version(Answer):
    """What runs here."""

    service: str
    version: str


class ErrorBody(Answer):
    """An error as ``AllfoldError.to_dict`` writes it."""

    code: str = Field(examples=["AF106"])
    message: str
    details: dict[str, Any]


class ErrorAnswer(Answer):
    """Every answer that is not a success."""

    error: ErrorBody
