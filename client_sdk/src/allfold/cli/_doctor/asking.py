"""The requests of ``allfold doctor``: the facts of a service with its clock, or why there are none.

A failure gets the step that helps with its kind: nothing listens, packets are dropped, a name is
not known, the token is refused.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from dataclasses import dataclass

from allfold.cli._doctor.findings import Finding, Json, fail
from allfold_cluster.http import NoAnswer, get_json
from allfold_core.errors import AllfoldError

_SECONDS = 3.0
_ASKS = 3
_UNAUTHORIZED, _NOT_FOUND = 401, 404


@dataclass(frozen=True, slots=True)
class Answer:
    """The facts of a service, and its clock as seen from here.

    Attributes:
        offset: seconds by which its clock is ahead of this machine's.
        uncertainty: seconds by which that may be wrong: half of the shortest round trip.
    """

    facts: Json
    offset: float
    uncertainty: float


AGENT, ORCHESTRATOR = "allfold-agent", "allfold-orchestrator"


def ask(url: str, token: str, service: str) -> Answer:
    """Return the facts of a service; the clock is that of the shortest round trip.

    Args:
        service: :data:`AGENT` or :data:`ORCHESTRATOR`.

    Raises:
        NoAnswer: nothing answers there, or not what this service would answer.
        AllfoldError: the refusal of the service.
    """
    best: Answer | None = None
    for _ in range(_ASKS):
        began = time.time()
        facts = get_json(f"{url}/v1/facts", token, seconds=_SECONDS)
        ended = time.time()
        if not isinstance(facts.get("now"), float):
            raise NoAnswer(f"{url} answers /v1/facts, but not as Allfold does")
        if facts.get("service") != service:
            raise NoAnswer(f"{url} leads to {facts.get('service')}, not to {service}")
        answer = Answer(facts, facts["now"] - (began + ended) / 2, (ended - began) / 2)
        if best is None or answer.uncertainty < best.uncertainty:
            best = answer
    assert best is not None
    return best


def refused_token(error: AllfoldError) -> bool:
    """Return True if a service refused the token, or that there was none."""
    return error.details.get("http_status") == _UNAUTHORIZED


def is_older(error: AllfoldError) -> bool:
    """Return True if a service of an earlier version does not know the request."""
    return error.details.get("http_status") == _NOT_FOUND


def token_finding(where: str, url: str, token: str) -> Finding:
    """Return the finding for a service that refuses the token."""
    source = "ALLFOLD_TOKEN" if os.environ.get("ALLFOLD_TOKEN") else "ALLFOLD_TOKEN_FILE"
    found = f"{url} wants a token, and neither ALLFOLD_TOKEN nor ALLFOLD_TOKEN_FILE is set"
    if token:
        found = f"{url} refuses the token of {source}: it is not the one that it was started with"
    advice = (
        "set ALLFOLD_TOKEN to the token of the services: 'allfold up' prints it; with compose: "
        "docker compose exec orchestrator cat /run/allfold-token/token; in Kubernetes the secret "
        "allfold"
    )
    return fail("token", where, found, advice)


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
        case _:
            return f"something else answers there: correct the address ({setting})"
