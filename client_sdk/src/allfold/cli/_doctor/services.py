"""The checks of all services: replicas, agents, the ways between these, and certificates."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from allfold.cli._asking import SECONDS, Answers, Offset, ask_all, entries, why_silent
from allfold.cli._doctor.asking import AGENT, ORCHESTRATOR, ServiceAnswer, ask, refusal
from allfold.cli._doctor.findings import CheckFinding, Diagnosis, Json, fail, ok, skipped, warn
from allfold.cli._doctor.nodes import (
    check_answers,
    judge_addresses,
    judge_clocks,
    judge_nodes,
    leading_astray,
)
from allfold.cli._doctor.pairs import NodePlace, check_pairs, judge_pairs, speed
from allfold_cluster.http import NoAnswer, tls_context
from allfold_core.errors import AllfoldError, ServiceError
from allfold_service.tls import end_of

_SETTING = "--orchestrator or ALLFOLD_ORCHESTRATOR_URL"
_ORCHESTRATOR = "orchestrator"
_START_AGENTS = (
    "start 'allfold agent' on every machine, with ALLFOLD_ORCHESTRATOR_URL and ALLFOLD_TOKEN; one "
    "that runs says in its log why it cannot register"
)
_SOON_DAYS = 14
_DAY = 24 * 3600


class Services:
    """The services as this machine reaches them.

    Args:
        diagnosis: takes in what is found.
        token: the join token, "" for none.
    """

    def __init__(self, diagnosis: Diagnosis, token: str) -> None:
        self._diagnosis = diagnosis
        self._token = token
        self._places: dict[str, NodePlace] = {}

    def check(self, orchestrators: Sequence[str], agents: Sequence[str], *, expected: bool) -> None:
        """Check the replicas and the agents: those given, those registered, and their peers.

        Args:
            expected: somebody has said where the orchestrator is.
        """
        diagnosis = self._diagnosis
        found: dict[str, tuple[str, ServiceAnswer]] = {}
        diagnosis.add(check_certificates([*orchestrators, *agents]))
        nodes, clock = _check_orchestrators(
            orchestrators, self._token, expected=expected, diagnosis=diagnosis
        )
        registered = {each["node"]: each for each in nodes if each["state"] != "gone"}
        given = self._ask_agents(agents)
        # The nodes with which they are in groups: where they are, as it has been told.
        known = {
            node: told
            for each in given.found.values()
            for node, told in each.facts["peers"].items()
        }
        places = known | registered
        urls = {node: str(told["control_url"]) for node, told in places.items()}
        astray = leading_astray(urls)
        diagnosis.add(judge_addresses(urls, astray))
        names = dict.fromkeys(agents, "") | {url: node for node, url in urls.items()}
        others = self._ask_agents([url for url in names if url not in agents])
        answers = Answers(given.found | others.found, given.failed | others.failed)
        diagnosis.add(check_answers(names, answers, astray, self._token))
        for url, answer in answers.found.items():
            if names[url] in ("", answer.facts["node"]):
                found.setdefault(str(answer.facts["node"]), (url, answer))
        self._note(places, found)
        diagnosis.add(judge_nodes(diagnosis, astray))
        clocks = {node: answer.clock for node, (_, answer) in found.items()}
        diagnosis.add(judge_clocks(clock, clocks))

    def _ask_agents(self, urls: Iterable[str]) -> Answers[ServiceAnswer]:
        return ask_all(urls, lambda url: ask(url, self._token, AGENT))

    def check_pairs(self, *, thorough: bool, deadline: float) -> None:
        """Ask the nodes to check the ways between them, until the deadline (monotonic)."""
        places = [each for each in self._places.values() if each.data_address]
        outcomes = check_pairs(places, self._token, thorough=thorough, deadline=deadline)
        self._diagnosis.links = [link for each in outcomes if (link := speed(each)) is not None]
        self._diagnosis.add(judge_pairs(outcomes))

    def _note(self, places: dict[str, Json], found: dict[str, tuple[str, ServiceAnswer]]) -> None:
        """Note who was found, and where others are told that each node is."""
        self._diagnosis.nodes = {node: answer.facts for node, (_, answer) in found.items()}
        own = {node: answer.facts["addresses"] for node, (_, answer) in found.items()}
        for node, told in (own | places).items():
            asked_at = found[node][0] if node in found else ""
            self._places[node] = NodePlace(
                node, told["control_url"], told["data_address"], asked_at
            )


def check_certificates(urls: Iterable[str]) -> Iterator[CheckFinding]:
    """Yield a finding for each https URL, or one that says that there is none."""
    secure = [url for url in urls if url.startswith("https://")]
    for url in secure:
        yield _certificate(url)
    if not secure:
        found = "no URL is https: requests and tokens travel unencrypted; use a network you trust"
        yield ok("certificates", "services", found)


def _certificate(url: str) -> CheckFinding:
    parts = urlsplit(url)
    host, check = parts.hostname or "", "certificates"
    context = tls_context()
    try:
        with (
            socket.create_connection((host, parts.port or 443), SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            certificate = secure.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        advice = (
            "renew it if it has expired, use the name that it is for, or have its CA trusted: "
            "ALLFOLD_TLS_DIR names a folder with our certificate and that of the CA; for a proxy "
            "in front of a service, SSL_CERT_FILE names a file with certificates of CAs"
        )
        return fail(check, url, f"the certificate is not valid: {error.verify_message}", advice)
    except OSError as error:
        advice = "see that ALLFOLD_TLS_DIR is set there and here, or write http://"
        return fail(check, url, f"no TLS connection: {error}", advice)
    own = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    end = end_of(certificate, context.get_ca_certs())
    days = (end - time.time()) / _DAY
    if days >= _SOON_DAYS:
        return ok(check, url, f"the certificate is valid for {days:.0f} days")
    if end < own:
        advice = "change the authority: 'allfold certs --help' has the steps"
        return warn(check, url, f"the certificate's authority expires in {days:.0f} days", advice)
    return warn(check, url, f"the certificate expires in {days:.0f} days", "renew it")


def _check_orchestrators(
    urls: Sequence[str], token: str, *, expected: bool, diagnosis: Diagnosis
) -> tuple[list[Json], Offset | None]:
    """Check each replica.

    Args:
        expected: somebody has said where it is; else nothing may be there, on this machine alone.

    Returns:
        The nodes as the first replica that can tell has them, and that replica's clock.
    """
    nodes: list[Json] | None = None
    clock: Offset | None = None
    for url in urls:
        try:
            answer = ask(url, token, ORCHESTRATOR)
        except NoAnswer as error:
            diagnosis.add([_silent(url, error, expected=expected)])
            continue
        except AllfoldError as error:
            diagnosis.add([refusal(_ORCHESTRATOR, _ORCHESTRATOR, url, error, token)])
            continue
        clock = clock or answer.clock
        diagnosis.orchestrators[url] = answer.facts
        diagnosis.add(_about(url, answer, token))
        found = _nodes(url, token, diagnosis)
        nodes = found if nodes is None else nodes
    return nodes or [], clock


def _silent(url: str, error: NoAnswer, *, expected: bool) -> CheckFinding:
    if not expected:
        why = f"nothing answers at {url}, and {_SETTING} names no other: nodes were not checked"
        return skipped(_ORCHESTRATOR, _ORCHESTRATOR, why)
    advice = why_silent(error, "'allfold orchestrator'", _SETTING)
    advice += "; meanwhile --agent-url URL checks agents without it"
    return fail(_ORCHESTRATOR, _ORCHESTRATOR, f"no answer: {error}", advice)


def _about(url: str, answer: ServiceAnswer, token: str) -> Iterator[CheckFinding]:
    facts, milliseconds = answer.facts, answer.clock.uncertainty * 2e3
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


def _state(node: Json) -> Iterator[CheckFinding]:
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
