"""The questions to an agent's control port, and the forms of its answers.

The agent writes these forms. The command and the orchestrator read them with the same check, so
that an answer of another version is refused as a whole, with a sentence, and the rest can be relied
upon. What is ``NotRequired``, agents of earlier versions leave out; see :func:`Question.read`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NotRequired, TypedDict, TypeVar
from urllib.parse import urlencode

from allfold_core.schema import NumberKey, OtherForm, checked

T_co = TypeVar("T_co", covariant=True)
Json = dict[str, Any]


class OpStatus(TypedDict):
    """An op that is not over: the ranks and the nodes that it waits for, and its age in seconds."""

    seq: int
    what: str
    strategy: str
    waiting_for: list[int]
    waiting_for_nodes: list[str]
    age: float


class CallStatus(TypedDict):
    """A send or receive that waits."""

    rank: int
    what: str
    age: float


class RecordedRound(TypedDict):
    """Who took part in a weighted mean, in the rank numbers of its epoch.

    ``weight`` is the sum over all ranks. ``absent`` are the ranks of weight 0; ``late`` those of
    them that are on this node and that the mean did not wait for. ``sent_bytes`` is what this
    node has sent.
    """

    weight: float
    absent: list[int]
    late: list[int]
    sent_bytes: int


class RoundStatus(RecordedRound):
    """A weighted mean that is over; ``ended_at`` is since 1970."""

    seq: int
    world_size: int
    ended_at: float
    seconds: float


class GroupStatus(TypedDict):
    """A group as one node has it: ``ranks`` and ``last_seq`` are of this node."""

    name: str
    opening: int
    epoch: int
    term: int
    world_size: NotRequired[int]
    nodes: list[str]
    ranks: list[int]
    last_seq: dict[NumberKey, int]
    short_lane: NotRequired[str]
    losses: list[str]
    layout: NotRequired[str]
    slow_links: NotRequired[str]
    retained_bytes: NotRequired[int]
    evicted: str
    in_flight: list[OpStatus]
    messages: list[CallStatus]
    edges: NotRequired[list[Json]]
    rounds: NotRequired[list[RoundStatus]]


class Status(TypedDict):
    """The answer to ``GET /v1/status``."""

    node: str
    control_url: NotRequired[str]
    data_address: NotRequired[str]
    device_type: NotRequired[str]
    ready: bool
    waiting_for: str
    processes: NotRequired[list[int]]
    retain_bytes: NotRequired[int]
    incidents: NotRequired[list[Json]]
    limits: NotRequired[list[str]]
    sent_to_zones: NotRequired[dict[str, int]]
    groups: list[GroupStatus]


class RankSample(TypedDict):
    """One second of a rank: its mean own time and lateness, in seconds."""

    own: float
    late: float


EdgeSample = TypedDict("EdgeSample", {"out": float, "in": float})
"""The payload of one second to and from a node."""


class Sample(TypedDict):
    """One second of a group on a node; ``at`` is since 1970."""

    at: float
    seconds: float
    ops: int
    bytes: float
    latency: float | None
    skew: float | None
    ranks: dict[NumberKey, RankSample]
    edges: dict[str, EdgeSample]


class GroupHistory(TypedDict):
    """The samples of a group, the newest last."""

    name: str
    opening: int
    samples: list[Sample]


class History(TypedDict):
    """The answer to ``GET /v1/history``."""

    node: str
    now: float
    groups: list[GroupHistory]


class RecordedCall(TypedDict):
    """The call of one rank."""

    what: str
    kind: NotRequired[str]
    reduce_op: NotRequired[str | None]
    dtype: NotRequired[str]
    shape: NotRequired[list[int]]
    numel: NotRequired[int]
    bytes: NotRequired[int]
    root: NotRequired[int]
    counts: NotRequired[list[int]]
    wire: NotRequired[str]


class RecordedOp(RecordedCall):
    """An op of a flight recorder. Without a call of a local rank it has no ``kind`` and so on.

    ``start`` is on the node's monotonic clock; the other times are seconds after it.
    """

    seq: int
    epoch: int
    world_size: int
    strategy: str
    lane: str
    state: str
    start: float
    started_at: float
    seconds: float
    arrivals: dict[NumberKey, float]
    missing: list[int]
    phases: dict[str, float]
    heard: dict[str, float]
    error: str
    reason: str
    other_calls: dict[NumberKey, RecordedCall]
    round: NotRequired[RecordedRound | None]


class RecordingAnswer(TypedDict):
    """The flight recorder of one group."""

    name: str
    opening: int
    open: bool
    epoch: int
    world_size: int
    nodes: list[str]
    ranks: list[int]
    last_seq: dict[NumberKey, int]
    ops: list[RecordedOp]


class Clocks(TypedDict):
    """A machine's clocks, read together: seconds since some start, and since 1970."""

    monotonic: float
    wall: float


class ClockReading(TypedDict):
    """The answer to ``GET /v1/clock``."""

    node: str
    clock: Clocks


class FlightAnswer(ClockReading):
    """The answer to ``GET /v1/flight``."""

    groups: list[RecordingAnswer]


@dataclass(frozen=True, slots=True)
class Question(Generic[T_co]):
    """A request to an agent.

    Attributes:
        path: with its query.
        form: of the answer.
        name: what is asked for, in words.
    """

    path: str
    form: type[T_co]
    name: str

    def read(self, url: str, answer: Json) -> T_co:
        """Return the answer of the agent at a URL.

        Raises:
            OtherForm: it is none, or of another version; the message is a sentence.
        """
        try:
            return checked(self.form, answer)
        except OtherForm as error:
            if not isinstance(answer.get("node"), str):
                raise OtherForm(f"{url} answers, but not as an agent does") from None
            found = f"{url} answers with a {self.name} of another version"
            raise OtherForm(f"{found}: {error}") from None


STATUS = Question("/v1/status", Status, "status")
CLOCK = Question("/v1/clock", ClockReading, "clock")


def history(since: float) -> Question[History]:
    """Ask for the samples after a time, in seconds since 1970 on the agent's clock."""
    return Question(f"/v1/history?since={since:.3f}", History, "history")


def flight(group: str = "", limit: int = 0) -> Question[FlightAnswer]:
    """Ask for the latest ops, of one group or of all, so many of each."""
    query = {name: value for name, value in (("group", group), ("limit", limit)) if value}
    return Question(f"/v1/flight?{urlencode(query)}", FlightAnswer, "flight recorder")
