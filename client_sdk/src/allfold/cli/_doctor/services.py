"""The checks of all services: replicas, agents, the ways between these, and certificates."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from allfold.cli._asking import Answers, ask_all
from allfold.cli._doctor.asking import AGENT, Answer, ask
from allfold.cli._doctor.findings import Diagnosis, Finding, Json, fail, ok, warn
from allfold.cli._doctor.nodes import (
    check_answers,
    judge_addresses,
    judge_clocks,
    judge_nodes,
    leading_astray,
)
from allfold.cli._doctor.orchestrators import check_orchestrators
from allfold.cli._doctor.pairs import Place, check_pairs, judge_pairs, speed
from allfold.cli._http import tls_context
from allfold_core.security.tls import end_of

_SECONDS = 3.0
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
        self._places: dict[str, Place] = {}

    def check(self, orchestrators: Sequence[str], agents: Sequence[str], *, expected: bool) -> None:
        """Check the replicas and the agents: those given, those registered, and their peers.

        Args:
            expected: somebody has said where the orchestrator is.
        """
        diagnosis = self._diagnosis
        found: dict[str, tuple[str, Answer]] = {}
        diagnosis.add(check_certificates([*orchestrators, *agents]))
        nodes, clock = check_orchestrators(
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

    def _ask_agents(self, urls: Iterable[str]) -> Answers[Answer]:
        return ask_all(urls, lambda url: ask(url, self._token, AGENT))

    def check_pairs(self, *, thorough: bool, deadline: float) -> None:
        """Have the nodes check the ways between them, until the deadline (monotonic)."""
        places = [each for each in self._places.values() if each.data_address]
        outcomes = check_pairs(places, self._token, thorough=thorough, deadline=deadline)
        self._diagnosis.links = [link for each in outcomes if (link := speed(each)) is not None]
        self._diagnosis.add(judge_pairs(outcomes))

    def _note(self, places: dict[str, Json], found: dict[str, tuple[str, Answer]]) -> None:
        """Note who was found, and where others are told that each node is."""
        self._diagnosis.nodes = {node: answer.facts for node, (_, answer) in found.items()}
        own = {node: answer.facts["addresses"] for node, (_, answer) in found.items()}
        for node, told in (own | places).items():
            asked_at = found[node][0] if node in found else ""
            self._places[node] = Place(node, told["control_url"], told["data_address"], asked_at)


def check_certificates(urls: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each https URL, or one that says that there is none."""
    secure = [url for url in urls if url.startswith("https://")]
    for url in secure:
        yield _certificate(url)
    if not secure:
        found = "no URL is https: requests and tokens travel unencrypted; use a network you trust"
        yield ok("certificates", "services", found)


def _certificate(url: str) -> Finding:
    parts = urlsplit(url)
    host, check = parts.hostname or "", "certificates"
    context = tls_context()
    try:
        with (
            socket.create_connection((host, parts.port or 443), _SECONDS) as plain,
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
