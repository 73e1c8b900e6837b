"""The fields of agents' answers that are relied upon: an answer without them is refused as a whole.

Others may be there or not, so that agents of earlier and later versions can be shown.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Json = dict[str, Any]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class OpInFlight(_Part):
    """An op that is not over."""

    seq: int
    what: str
    strategy: str
    waiting_for_nodes: list[str]
    age: float


class Message(_Part):
    """A send or receive that waits."""

    rank: int
    what: str
    age: float


class Group(_Part):
    """A group of a status."""

    name: str
    opening: int
    epoch: int
    term: int
    nodes: list[str]
    ranks: list[int]
    last_seq: dict[str, int]
    losses: list[str]
    evicted: str
    in_flight: list[OpInFlight]
    messages: list[Message]
    short_lane: str = ""
    layout: str = ""
    slow_links: str = ""


class Status(_Part):
    """The answer to ``GET /v1/status``."""

    node: str
    ready: bool
    waiting_for: str
    groups: list[Group]
    incidents: list[Json] = Field(default_factory=list)


class RecordedOp(_Part):
    """An op of a flight recorder."""

    seq: int
    what: str
    strategy: str
    state: str
    seconds: float
    error: str
    started_at: float
    kind: str = ""
    root: int = -1


class Recording(_Part):
    """The flight recorder of one group."""

    name: str
    opening: int
    ops: list[RecordedOp]


class Flight(_Part):
    """The answer to ``GET /v1/flight``."""

    groups: list[Recording]
