"""The checks of the orchestrator's replicas and of the nodes that they know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allfold.cli._doctor.asking import (
    ORCHESTRATOR,
    Answer,
    ask,
    is_older,
    refused_token,
    token_finding,
    why_silent,
)
from allfold.cli._doctor.findings import Diagnosis, Finding, Json, fail, ok, skipped, warn
from allfold.cli._report import entries
from allfold_cluster.http import NoAnswer
from allfold_core.errors import AllfoldError, ServiceError

_SETTING = "--orchestrator or ALLFOLD_ORCHESTRATOR_URL"
_ORCHESTRATOR = "orchestrator"
_START_AGENTS = (
    "start 'allfold agent' on every machine, with ALLFOLD_ORCHESTRATOR_URL and ALLFOLD_TOKEN; one "
    "that runs says in its log why it cannot register"
)


def check_orchestrators(
    urls: Sequence[str], token: str, *, expected: bool, diagnosis: Diagnosis
) -> tuple[list[Json], Answer | None]:
    """Check each replica.

    Args:
        expected: somebody has said where it is; else nothing may be there, on this machine alone.

    Returns:
        The nodes as the first replica that can tell has them, and that replica's clock.
    """
    nodes: list[Json] | None = None
    clock: Answer | None = None
    for url in urls:
        try:
            answer = ask(url, token, ORCHESTRATOR)
        except NoAnswer as error:
            diagnosis.add([_silent(url, error, expected=expected)])
            continue
        except AllfoldError as error:
            diagnosis.add([_refusal(url, error, token)])
            continue
        clock = clock or answer
        diagnosis.orchestrators[url] = answer.facts
        diagnosis.add(_about(url, answer, token))
        found = _nodes(url, token, diagnosis)
        nodes = found if nodes is None else nodes
    return nodes or [], clock


def _silent(url: str, error: NoAnswer, *, expected: bool) -> Finding:
    if not expected:
        why = f"nothing answers at {url}, and {_SETTING} names no other: nodes were not checked"
        return skipped(_ORCHESTRATOR, _ORCHESTRATOR, why)
    advice = why_silent(error, "'allfold orchestrator'", _SETTING)
    advice += "; meanwhile --agent-url URL checks agents without it"
    return fail(_ORCHESTRATOR, _ORCHESTRATOR, f"no answer: {error}", advice)


def _refusal(url: str, error: AllfoldError, token: str) -> Finding:
    if refused_token(error):
        return token_finding(_ORCHESTRATOR, url, token)
    if is_older(error):
        found = f"{url} is of another version: it does not know /v1/facts"
        advice = "install the same version of Allfold everywhere"
        return fail("versions", _ORCHESTRATOR, found, advice)
    return fail(_ORCHESTRATOR, _ORCHESTRATOR, f"{url}: {error.message}", "see its log")


def _about(url: str, answer: Answer, token: str) -> Iterator[Finding]:
    facts, milliseconds = answer.facts, answer.uncertainty * 2e3
    found = f"{url} answers in {milliseconds:.1f} ms, version {facts['version']}"
    yield ok(_ORCHESTRATOR, _ORCHESTRATOR, found)
    if facts["needs_token"]:
        yield ok("token", _ORCHESTRATOR, "is asked for, and ours is right")
    else:
        found = f"{url} asks for no token: whoever reaches a port may use it"
        advice = "set ALLFOLD_TOKEN for all services, unless nobody else is in this network"
        unused = f"{found}; ALLFOLD_TOKEN, which is set here, is not looked at" if token else found
        yield warn("token", _ORCHESTRATOR, unused, advice)


def _nodes(url: str, token: str, diagnosis: Diagnosis) -> list[Json] | None:
    """The nodes that a replica knows; ``None`` if it cannot tell."""
    try:
        nodes = list(entries(url, "nodes", token))
    except NoAnswer as error:
        diagnosis.add([fail(_ORCHESTRATOR, _ORCHESTRATOR, f"no answer: {error}", "see its log")])
        return None
    except ServiceError as error:
        cause = error.details.get("cause", error.message)
        advice = (
            "see that Redis runs, has memory, takes writes, and is at ALLFOLD_REDIS_URL of the "
            "orchestrator; jobs that run are not affected, new ranks cannot join"
        )
        found = f"{url} answers, but its state store is down ({cause})"
        diagnosis.add([fail("state store", _ORCHESTRATOR, found, advice)])
        return None
    diagnosis.add([ok("state store", _ORCHESTRATOR, f"the store of {url} answers")])
    if not any(node["state"] != "gone" for node in nodes):
        found = f"no node is registered at {url}"
        diagnosis.add([warn("nodes", _ORCHESTRATOR, found, _START_AGENTS)])
    diagnosis.add(finding for node in nodes for finding in _state(node))
    return nodes


def _state(node: Json) -> Iterator[Finding]:
    where, age = f"node {node['node']}", node.get("heartbeat_age")
    if node["state"] == "gone":
        found = "was there within the last hour, and is gone"
        advice = "if it should be there, see the log of its agent, and start it again"
        yield warn("registration", where, found, advice)
    elif node["state"] == "late":
        since = "" if age is None else f" for {age:.1f} s"
        advice = "see whether its agent runs and reaches the orchestrator: its log says so"
        yield fail("registration", where, f"has not been heard{since}", advice)
    elif node.get("draining"):
        advice = "restart its agent when it is to take ranks again"
        yield warn("registration", where, "drains: it takes no more ranks", advice)
