"""The requests of ``allfold trace``: each agent's clock, some times, then its flight recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TypeVar

from allfold.cli._asking import Failure, ask_all, is_older, read, refused_token, why_silent
from allfold.cli._clocks import Offset, Reading, estimate, with_shared_clocks
from allfold.cli._http import Connection, NoAnswer
from allfold_core import agent_answers
from allfold_core.agent_answers import CLOCK, ClockReading, Question, Recording, flight
from allfold_core.errors import AgentUnreachable, AllfoldError, LocalError

_SECONDS = 5.0
_READINGS = 10
_AT_ONCE = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flight:
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
        refused: the URLs of those that have answered with an error.
    """

    found: list[Flight] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    refused: Set[str] = frozenset()


def ask_agents(
    urls: Sequence[str],
    named: Iterable[str],
    token: str,
    *,
    our_wall: float,
    group: str,
    limit: int,
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
            url: stack.enter_context(closing(Connection(url, token, seconds=_SECONDS)))
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
        {url for url, error in failed.items() if isinstance(error, AllfoldError)},
    )
    _require(flights, urls, named)
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
        readings.append(Reading(sent, theirs, monotonic()))
    return estimate(readings[1:])  # the first one connects


def _flight(url: str, answer: agent_answers.Flight, offset: Offset, our_wall: float) -> Flight:
    theirs = answer["clock"]
    answered = theirs["monotonic"] - offset.ahead
    wall_ahead = theirs["wall"] - (our_wall + answered)
    return Flight(url, answer["node"], answered, offset, wall_ahead, answer["groups"])


def _require(flights: Flights, urls: Sequence[str], named: Iterable[str]) -> None:
    problems = flights.problems
    lost = [url for url in named if url in problems] or ([] if flights.found else list(problems))
    if lost:
        kind = LocalError if flights.refused >= set(lost) else AgentUnreachable
        raise kind(f"no flight recorder: {'; '.join(problems[url] for url in lost)}")
    if not urls:
        raise LocalError(
            "the orchestrator knows no node that is there: start agents, or name one with "
            "--agent-url"
        )
