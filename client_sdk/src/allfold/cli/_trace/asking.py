"""The requests of ``allfold trace``: each agent's clock, some times, then its flight recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import urlencode

from allfold.cli._doctor.asking import is_older, refused_token, why_silent
from allfold.cli._http import Connection, NoAnswer
from allfold.cli._trace.clocks import Offset, Reading, estimate, with_shared_clocks
from allfold_core.errors import AgentUnreachable, AllfoldError, LocalError

_SECONDS = 5.0
_READINGS = 10
_AT_ONCE = 16
_T = TypeVar("_T")

Json = dict[str, Any]


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
    groups: list[Json]


@dataclass
class Flights:
    """The flight recorders of all that answered.

    Attributes:
        problems: by URL, why an agent has none, and what to do.
    """

    found: list[Flight] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def ask_agents(
    urls: Sequence[str], named: Iterable[str], token: str, *, our_wall: float, **query: str | int
) -> Flights:
    """Return the flight recorders of agents.

    Args:
        urls: of the agents.
        named: those that the user has named, which must answer.
        our_wall: the seconds since 1970 at which our monotonic clock was 0.
        query: of ``GET /v1/flight``.

    Raises:
        AgentUnreachable: one that was named has no flight recorder, or none of all has.
    """
    flights = Flights()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
        connections = {url: Connection(url, token, seconds=_SECONDS) for url in urls}
        for each in connections.values():
            stack.callback(each.close)

        def ask_each(ask: Callable[[str, Connection], _T]) -> dict[str, _T]:
            """Ask all that have answered so far."""
            open_ones = [(url, each) for url, each in connections.items() if url not in failed]
            answers = pool.map(partial(_attempt, ask, token), open_ones)
            found: dict[str, _T] = {}
            for (url, _), answer in zip(open_ones, answers, strict=True):
                if isinstance(answer, _Problem):
                    failed[url] = answer.text
                else:
                    found[url] = answer
            return found

        failed = flights.problems
        # All clocks first: long answers that are being read would make the round trips longer.
        clocks = ask_each(lambda _, connection: _clock(connection))
        answers = ask_each(lambda _, connection: connection.get_json(_flight_path(query)))
    heard = [url for url in clocks if url in answers]
    offsets = with_shared_clocks([clocks[url] for url in heard])
    for url, offset in zip(heard, offsets, strict=True):
        flights.found.append(_flight(url, answers[url], offset, our_wall))
    _require(flights, urls, named)
    return flights


@dataclass(frozen=True, slots=True)
class _Problem:
    text: str


def _attempt(
    ask: Callable[[str, Connection], _T], token: str, agent: tuple[str, Connection]
) -> _T | _Problem:
    url, connection = agent
    try:
        return ask(url, connection)
    except NoAnswer as error:
        return _Problem(f"{error}; {why_silent(error, 'the agent', '--agent-url')}")
    except AllfoldError as error:
        return _Problem(_refusal(url, token, error))


def _refusal(url: str, token: str, error: AllfoldError) -> str:
    if refused_token(error):
        has = "refuses the token" if token else "wants a token"
        return f"{url} {has}: set ALLFOLD_TOKEN to that of the services"
    if is_older(error):
        return (
            f"{url} is the agent of an earlier version, which shows no flight recorder: install "
            "the version of this command on its node, and restart it when no job runs there"
        )
    return f"{url}: {error.message}"


def _clock(connection: Connection) -> Offset:
    readings = []
    for _ in range(_READINGS):
        sent = monotonic()
        answer = connection.get_json("/v1/clock")
        readings.append(Reading(sent, float(answer["clock"]["monotonic"]), monotonic()))
    return estimate(readings[1:])  # the first one connects


def _flight_path(query: dict[str, str | int]) -> str:
    return f"/v1/flight?{urlencode({name: value for name, value in query.items() if value})}"


def _flight(url: str, answer: Json, offset: Offset, our_wall: float) -> Flight:
    theirs = answer["clock"]
    answered = theirs["monotonic"] - offset.ahead
    wall_ahead = theirs["wall"] - (our_wall + answered)
    return Flight(url, answer["node"], answered, offset, wall_ahead, answer["groups"])


def _require(flights: Flights, urls: Sequence[str], named: Iterable[str]) -> None:
    problems = flights.problems
    lost = [problems[url] for url in named if url in problems] or (
        [] if flights.found else list(problems.values())
    )
    if lost:
        raise AgentUnreachable(f"no flight recorder: {'; '.join(lost)}")
    if not urls:
        raise LocalError(
            "the orchestrator knows no node that is there: start agents, or name one with "
            "--agent-url"
        )
