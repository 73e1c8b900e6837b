"""The requests of ``allfold doctor``: the facts of services with their clocks."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from allfold.cli._asking import SECONDS
from allfold.cli._doctor.findings import Finding, Json, fail
from allfold.cli._http import NoAnswer, get_json

_ASKS = 3


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
        facts = get_json(f"{url}/v1/facts", token, seconds=SECONDS)
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
