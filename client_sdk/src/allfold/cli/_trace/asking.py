"""The requests of ``allfold trace``: each agent's clock, some times, then its flight recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

from allfold.cli._doctor.asking import is_older, refused_token, why_silent
from allfold.cli._trace.clocks import Offset, Reading, estimate, with_shared_clocks
from allfold_cluster.http import Connection, NoAnswer
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
        refused: the URLs of those that have answered with an error.
    """

    found: list[Flight] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)


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
        AgentUnreachable: one that was named does not answer, or none of all does.
        LocalError: they answer, but with errors; or there is no agent.
    """
    flights = Flights()
    with ThreadPoolExecutor(_AT_ONCE) as pool, _Agents(urls, token, pool, flights) as agents:
        # All clocks first: long answers that are being read would make the round trips longer.
        clocks = agents.ask(_clock)
        answers = agents.ask(partial(_groups, path=_flight_path(query)))
    heard = [url for url in clocks if url in answers]
    offsets = with_shared_clocks([clocks[url] for url in heard])
    for url, offset in zip(heard, offsets, strict=True):
        flights.found.append(_flight(url, answers[url], offset, our_wall))
    _require(flights, urls, named)
    return flights


class _Agents:
    """Asks all agents at once; those that fail are not asked again.

    Args:
        flights: is told of problems.
    """

    def __init__(
        self, urls: Iterable[str], token: str, pool: ThreadPoolExecutor, flights: Flights
    ) -> None:
        self._connections = {url: Connection(url, token, seconds=_SECONDS) for url in urls}
        self._has_token = bool(token)
        self._pool = pool
        self._flights = flights

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections.values():
            connection.close()

    def ask(self, question: Callable[[Connection], _T]) -> dict[str, _T]:
        """Return the answers, by URL."""
        found: dict[str, _T] = {}
        asked = [url for url in self._connections if url not in self._flights.problems]
        answers = self._pool.map(partial(self._try, question), asked)
        for url, answer in zip(asked, answers, strict=True):
            if not isinstance(answer, Exception):
                found[url] = answer
                continue
            self._flights.problems[url] = self._problem(url, answer)
            if isinstance(answer, AllfoldError):
                self._flights.refused.add(url)
        return found

    def _try(self, question: Callable[[Connection], _T], url: str) -> _T | NoAnswer | AllfoldError:
        try:
            return question(self._connections[url])
        except (NoAnswer, AllfoldError) as error:
            return error
        except (KeyError, TypeError, ValueError):
            return NoAnswer(f"{url} answers, but not as Allfold does")

    def _problem(self, url: str, error: Exception) -> str:
        if isinstance(error, NoAnswer):
            return f"{error}; {why_silent(error, 'the agent', '--agent-url')}"
        assert isinstance(error, AllfoldError)
        return _refusal(url, error, has_token=self._has_token)


def _refusal(url: str, error: AllfoldError, *, has_token: bool) -> str:
    if refused_token(error):
        has = "refuses the token" if has_token else "wants a token"
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


def _groups(connection: Connection, path: str) -> Json:
    """Return an agent's flight recorder; ``KeyError`` or ``TypeError`` where it is none."""
    answer = connection.get_json(path)
    clock = answer["clock"]
    if not all(isinstance(clock[each], int | float) for each in ("monotonic", "wall")):
        raise TypeError("clock")
    if not isinstance(answer["groups"], list) or not isinstance(answer["node"], str):
        raise TypeError("groups")
    return answer


def _flight_path(query: dict[str, str | int]) -> str:
    return f"/v1/flight?{urlencode({name: value for name, value in query.items() if value})}"


def _flight(url: str, answer: Json, offset: Offset, our_wall: float) -> Flight:
    theirs = answer["clock"]
    answered = theirs["monotonic"] - offset.ahead
    wall_ahead = theirs["wall"] - (our_wall + answered)
    return Flight(url, answer["node"], answered, offset, wall_ahead, answer["groups"])


def _require(flights: Flights, urls: Sequence[str], named: Iterable[str]) -> None:
    problems = flights.problems
    lost = [url for url in named if url in problems] or ([] if flights.found else list(problems))
    if lost:
        kind = LocalError if flights.refused.issuperset(lost) else AgentUnreachable
        raise kind(f"no flight recorder: {'; '.join(problems[url] for url in lost)}")
    if not urls:
        raise LocalError(
            "the orchestrator knows no node that is there: start agents, or name one with "
            "--agent-url"
        )
