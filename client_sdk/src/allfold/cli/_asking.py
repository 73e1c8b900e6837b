"""Asking services: many agents at once, or of an orchestrator's replicas the one that answers.

And what their clocks show, as in NTP: the clock that an answer carries was read between the request
and the answer, so half of the shortest round trip is the most by which the middle may be wrong.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from allfold_cluster.http import NoAnswer, get_json
from allfold_core.agent_answers import Question
from allfold_core.errors import AllfoldError, OrchestratorUnreachable, ServiceError
from allfold_core.schema import OtherForm

SECONDS = 3.0
_PAGE = 1000

T = TypeVar("T")
Json = dict[str, Any]
Failure = NoAnswer | AllfoldError
"""The reason for an answer that is missing: the service is silent, is another one, or refuses."""


@dataclass(frozen=True)
class Answers(Generic[T]):
    """The answers of several services, by URL, and why others have none."""

    found: dict[str, T] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)


def ask_all(urls: Iterable[str], ask: Callable[[str], T], *, at_once: int = 32) -> Answers[T]:
    """Ask services at once; each answer takes as long as ``ask`` lets it."""

    def attempt(url: str) -> T | Failure:
        try:
            return ask(url)
        except (NoAnswer, AllfoldError) as error:
            return error

    answers, asked = Answers[T](), list(dict.fromkeys(urls))
    with ThreadPoolExecutor(at_once) as pool:
        for url, answer in zip(asked, pool.map(attempt, asked), strict=True):
            if isinstance(answer, NoAnswer | AllfoldError):
                answers.failed[url] = answer
            else:
                answers.found[url] = answer
    return answers


def ask_agents(urls: Iterable[str], question: Question[T], token: str) -> Answers[T]:
    """Ask agents at once."""

    def ask(url: str) -> T:
        return read(question, url, get_json(url + question.path, token, seconds=SECONDS))

    return ask_all(urls, ask)


def read(question: Question[T], url: str, answer: Json) -> T:
    """Return the answer of the agent at a URL.

    Raises:
        NoAnswer: it is not what this version of an agent would answer.
    """
    try:
        return question.read(url, answer)
    except OtherForm as error:
        raise NoAnswer(str(error), error if "node" in answer else None) from None


def ask_replicas(urls: Iterable[str], ask: Callable[[str], T]) -> T:
    """Return what the first of an orchestrator's replicas answers that is not silent.

    Raises:
        OrchestratorUnreachable: all are.
    """
    silent: list[str] = []
    for url in urls:
        try:
            return ask(url)
        except NoAnswer as error:
            silent.append(str(error))
    raise OrchestratorUnreachable(
        f"no orchestrator answers: tried {'; '.join(silent)}. Choose another with --orchestrator "
        "or ALLFOLD_ORCHESTRATOR_URL; 'allfold doctor' finds out what is wrong."
    )


def entries(orchestrator: str, what: str, token: str) -> Iterator[Json]:
    """Yield all entries of a list of the orchestrator, page by page."""
    after = ""
    while True:
        query = urlencode({"limit": _PAGE} | ({"after": after} if after else {}))
        page = get_json(f"{orchestrator}/v1/{what}?{query}", token, seconds=SECONDS)
        yield from page[what]
        following = page.get("next")
        if following is None:
            return
        if following <= after:
            raise ServiceError(f"the pages of /v1/{what} go in circles at '{following}'")
        after = following


def refused_token(error: AllfoldError) -> bool:
    """Return True if a service refused the token, or that there was none."""
    return error.details.get("http_status") == HTTPStatus.UNAUTHORIZED


def is_older(error: AllfoldError) -> bool:
    """Return True if a service of an earlier version does not know the request."""
    return error.details.get("http_status") == HTTPStatus.NOT_FOUND


def why_silent(error: NoAnswer, service: str, setting: str) -> str:
    """Return what to do about a service that does not answer.

    Args:
        service: e.g. ``the orchestrator``.
        setting: how its address is set.
    """
    match error.cause:
        case ConnectionRefusedError():
            return (
                f"nothing listens there: start {service}, or correct its address ({setting}); one "
                "that listens on 127.0.0.1 is reached from its own machine alone"
            )
        case TimeoutError():
            return (
                "packets are dropped, or the process is stopped: let the TCP port through the "
                f"firewalls between here and there, and see that {service} runs"
            )
        case socket.gaierror():
            return f"the name is not known here: correct it ({setting}), or give an IP address"
        case ssl.SSLError():
            return f"see the finding on certificates, or write http:// ({setting})"
        case OSError():
            return f"see that this machine has a way there, or correct the address ({setting})"
        case OtherForm():
            return "install the same version of Allfold everywhere"
        case _:
            return f"something else answers there: correct the address ({setting})"


# Clocks


@dataclass(frozen=True, slots=True)
class Offset:
    """The seconds by which a clock is ahead of ours.

    Attributes:
        uncertainty: the most by which ``ahead`` may be wrong.
    """

    ahead: float
    uncertainty: float

    def agrees_with(self, other: Offset) -> bool:
        """Return True if both may be offsets of one clock."""
        return abs(self.ahead - other.ahead) <= self.uncertainty + other.uncertainty


OUR_CLOCK = Offset(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One request for a clock.

    Attributes:
        sent: when it was sent, on our clock.
        theirs: the clock that was answered.
        received: when the answer was here.
    """

    sent: float
    theirs: float
    received: float


def estimate(readings: Iterable[ClockSample]) -> Offset:
    """Return the offset of a clock, by the reading of the shortest round trip."""
    best = min(readings, key=lambda each: each.received - each.sent)
    middle = (best.sent + best.received) / 2
    return Offset(best.theirs - middle, (best.received - best.sent) / 2)


def with_shared_clocks(offsets: Sequence[Offset]) -> list[Offset]:
    """Return the offsets with the best estimate for all that may be of one clock.

    The monotonic clocks of two machines count from their starts, so if they agree within a round
    trip they are one clock. Then ops of agents on one machine are not shifted against each other.
    """
    known = [OUR_CLOCK]
    for each in sorted(offsets, key=lambda offset: offset.uncertainty):
        if not any(each.agrees_with(clock) for clock in known):
            known.append(each)
    return [next(clock for clock in known if each.agrees_with(clock)) for each in offsets]
