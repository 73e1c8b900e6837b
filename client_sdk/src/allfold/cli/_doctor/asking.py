"""The requests of ``allfold doctor``: the facts of services with their clocks."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from allfold.cli._asking import SECONDS, ClockSample, Offset, estimate, is_older, refused_token
from allfold.cli._doctor.findings import CheckFinding, Json, fail
from allfold_cluster.http import NoAnswer, get_json
from allfold_core.errors import AllfoldError

_ASKS = 3


@dataclass(frozen=True, slots=True)
class ServiceAnswer:
    """The facts of a service, and its clock as seen from here."""

    facts: Json
    clock: Offset


AGENT, ORCHESTRATOR = "allfold-agent", "allfold-orchestrator"


def ask(url: str, token: str, service: str) -> ServiceAnswer:
    """Return the facts of a service; the clock is that of the shortest round trip.

    Args:
        service: :data:`AGENT` or :data:`ORCHESTRATOR`.

    Raises:
        NoAnswer: nothing answers there, or not what this service would answer.
        AllfoldError: the refusal of the service.
    """
    readings = []
    for _ in range(_ASKS):
        sent = time.time()
        facts = get_json(f"{url}/v1/facts", token, seconds=SECONDS)
        if not isinstance(facts.get("now"), float):
            raise NoAnswer(f"{url} answers /v1/facts, but not as Allfold does")
        if facts.get("service") != service:
            raise NoAnswer(f"{url} leads to {facts.get('service')}, not to {service}")
        readings.append(ClockSample(sent, facts["now"], time.time()))
    return ServiceAnswer(facts, estimate(readings))


def refusal(check: str, where: str, url: str, error: AllfoldError, token: str) -> CheckFinding:
    """Return the finding for a service that answers with an error."""
    if refused_token(error):
        return _token_finding(where, url, token)
    if is_older(error):
        service = f"the agent at {url}" if check == "agent" else url
        found = f"{service} is of another version: it does not know /v1/facts"
        return fail("versions", where, found, "install the same version of Allfold everywhere")
    return fail(check, where, f"{url}: {error.message}", "see its log")


def _token_finding(where: str, url: str, token: str) -> CheckFinding:
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
