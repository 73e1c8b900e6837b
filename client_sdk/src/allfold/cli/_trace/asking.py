"""The requests of ``allfold trace``: agents' flight recorders, and their ops on our clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TypeVar

from allfold.cli._asking import (
    ClockSample,
    Failure,
    Offset,
    ask_all,
    estimate,
    is_older,
    read,
    refused_token,
    why_silent,
    with_shared_clocks,
)
from allfold_cluster.http import HttpConnection, NoAnswer
from allfold_core import agent_answers
from allfold_core.agent_answers import CLOCK, ClockReading, Question, RecordedOp, Recording, flight
from allfold_core.errors import AgentUnreachable, AllfoldError, LocalError

_SECONDS = 5.0
_READINGS = 10
_AT_ONCE = 16

T = TypeVar("T")
Opening = tuple[str, int]
"""The name of a group, and which of its openings it is."""


@dataclass(frozen=True, slots=True)
class NodeFlight:
    """The flight recorder of one node.

    Attributes:
        url: of its agent.
        answered: when it answered, on our monotonic clock.
        offset: by which its monotonic clock is ahead of ours.
        wall_ahead: the seconds by which its clock of day is ahead of ours.
        groups: as ``GET /v1/flight`` has them.
    """

    url: str
    node: str
    answered: float
    offset: Offset
    wall_ahead: float
    groups: list[Recording]


@dataclass(frozen=True)
class Flights:
    """The flight recorders of all that answered.

    Attributes:
        problems: by URL, why an agent has none, and what to do.
    """

    found: list[NodeFlight] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def ask_agents(
    urls: Sequence[str], named: list[str], token: str, *, our_wall: float, group: str, limit: int
) -> Flights:
    """Return the flight recorders of agents.

    Args:
        urls: of the agents.
        named: those that the user has named, which must answer.
        our_wall: the seconds since 1970 at which our monotonic clock was 0.
        group: ``""`` for all.
        limit: so many ops of each group.

    Raises:
        AgentUnreachable: one that was named does not answer, or none of all does.
        LocalError: they answer, but with errors; or there is no agent.
    """
    with ExitStack() as stack:
        connections = {
            url: stack.enter_context(closing(HttpConnection(url, token, seconds=_SECONDS)))
            for url in urls
        }

        def ask(question: Question[T], url: str) -> T:
            return read(question, url, connections[url].get_json(question.path))

        # All clocks first: long answers that are being read would make the round trips longer.
        clocks = ask_all(urls, partial(_clock, ask), at_once=_AT_ONCE)
        answers = ask_all(clocks.found, partial(ask, flight(group, limit)), at_once=_AT_ONCE)
    offsets = with_shared_clocks([clocks.found[url] for url in answers.found])
    found = zip(answers.found.items(), offsets, strict=True)
    failed = clocks.failed | answers.failed
    flights = Flights(
        [_flight(url, answer, offset, our_wall) for (url, answer), offset in found],
        {url: _problem(url, error, has_token=bool(token)) for url, error in failed.items()},
    )
    _require(flights, failed, urls, named)
    return flights


def _problem(url: str, error: Failure, *, has_token: bool) -> str:
    if isinstance(error, NoAnswer):
        return f"{error}; {why_silent(error, 'the agent', '--agent-url')}"
    if refused_token(error):
        has = "refuses the token" if has_token else "wants a token"
        return f"{url} {has}: set ALLFOLD_TOKEN to that of the services"
    if is_older(error):
        return (
            f"{url} is the agent of an earlier version, which shows no flight recorder: install "
            "the version of this command on its node, and restart it when no job runs there"
        )
    return f"{url}: {error.message}"


def _clock(ask: Callable[[Question[ClockReading], str], ClockReading], url: str) -> Offset:
    readings = []
    for _ in range(_READINGS):
        sent = monotonic()
        theirs = ask(CLOCK, url)["clock"]["monotonic"]
        readings.append(ClockSample(sent, theirs, monotonic()))
    return estimate(readings[1:])  # the first one connects


def _flight(url: str, answer: agent_answers.Flight, offset: Offset, our_wall: float) -> NodeFlight:
    theirs = answer["clock"]
    answered = theirs["monotonic"] - offset.ahead
    wall_ahead = theirs["wall"] - (our_wall + answered)
    return NodeFlight(url, answer["node"], answered, offset, wall_ahead, answer["groups"])


def _require(
    flights: Flights, failed: Mapping[str, Failure], urls: Sequence[str], named: Iterable[str]
) -> None:
    lost = [url for url in named if url in failed] or ([] if flights.found else list(failed))
    if lost:
        refused = all(isinstance(failed[url], AllfoldError) for url in lost)
        kind = LocalError if refused else AgentUnreachable
        raise kind(f"no flight recorder: {'; '.join(flights.problems[url] for url in lost)}")
    if not urls:
        raise LocalError(
            "the orchestrator knows no node that is there: start agents, or name one with "
            "--agent-url"
        )


@dataclass(frozen=True, slots=True)
class SeenOp:
    """One op as one node has seen it; times are on our monotonic clock.

    Attributes:
        record: as ``GET /v1/flight`` has it.
        start: the first call of a rank of the node.
        end: its outcome, or the node's answer while it is in flight.
        arrivals: when each rank of the node called it.
    """

    node: str
    opening: Opening
    record: RecordedOp
    start: float
    end: float
    arrivals: Mapping[int, float]

    @property
    def seq(self) -> int:
        return self.record["seq"]

    @property
    def is_over(self) -> bool:
        return "done" in self.record["phases"]

    @property
    def key(self) -> tuple[str, int, int]:
        """The identity of the op on all nodes: group, opening and sequence number."""
        return (*self.opening, self.seq)

    @property
    def missing(self) -> list[int]:
        """The ranks of the node that have not called it."""
        return list(self.record["missing"])

    def phase(self, name: str) -> float | None:
        """Return when it came to a phase; ``None`` where that is not known."""
        after = self.record["phases"].get(name)
        return None if after is None else self.start + after

    @property
    def heard(self) -> dict[str, float]:
        """By node, when its first data were taken in."""
        return {node: self.start + after for node, after in self.record["heard"].items()}


def ops_of_group(flight: NodeFlight, group: Recording) -> Iterator[SeenOp]:
    """Yield the ops of a group in a node's flight recorder."""
    for record in group["ops"]:
        start = record["start"] - flight.offset.ahead
        yield SeenOp(
            flight.node,
            (group["name"], group["opening"]),
            record,
            start,
            start + record["seconds"],
            {int(rank): start + after for rank, after in record["arrivals"].items()},
        )


def seen_ops(flights: Iterable[NodeFlight], seconds: float | None) -> list[SeenOp]:
    """Return the ops of all nodes in the order of their starts.

    Args:
        seconds: leave out those that were over so long before their node answered.
    """
    found = [
        op
        for flight in flights
        for group in flight.groups
        for op in ops_of_group(flight, group)
        if seconds is None or not op.is_over or op.end >= flight.answered - seconds
    ]
    return sorted(found, key=lambda op: op.start)
