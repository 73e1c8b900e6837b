"""A whole Allfold with TLS: jobs run, certificates and tokens change under them, others are out."""

from __future__ import annotations

import http.client
import inspect
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI

from allfold.cli._certs.folder import CertificateFolder
from allfold_agent.agent import NodeAgent
from allfold_agent.control.app import make_app
from allfold_agent.data_port import DataPort
from allfold_agent.settings import AgentSettings
from allfold_cluster import Cluster
from allfold_orchestrator.http.app import create_app
from allfold_orchestrator.settings import Settings
from allfold_service.connections import HANDSHAKE_SECONDS, MOST_IDLE, PATIENCE_SECONDS
from allfold_service.credentials import Tokens
from allfold_service.tls import TlsIdentity
from tests.support.credentials import certificates
from tests.support.descriptors import descriptors
from tests.support.processes.services import ROOT
from tests.support.processes.steady_job import SteadyJob
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SECONDS = 60.0
SPARE_DESCRIPTORS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    made = certificates(tmp_path_factory.mktemp("certs"), "node")
    made.issue_client("operator", 90)
    return made


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the token of the stack."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text("first")
    return file


@pytest.fixture(scope="module")
def stack(folder: CertificateFolder, token: Path) -> Iterator[Cluster]:
    """An orchestrator and two nodes with TLS."""
    with ExitStack() as ending:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("ALLFOLD_TOKEN", raising=False)
            patch.setenv("ALLFOLD_TOKEN_FILE", str(token))
            patch.setenv("ALLFOLD_TLS_DIR", str(folder.path / "node"))
            stack = ending.enter_context(Cluster())
            stack.start(2)
        yield stack


def allfold(stack: Cluster, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as an operator would on another machine."""
    env = os.environ | {"ALLFOLD_ORCHESTRATOR_URL": stack.orchestrator_url} | variables
    command = [sys.executable, "-m", "allfold.cli", *words]
    return subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )


# What anybody with a certificate may ask without the token: that a service lives, and the page
# that then asks for the token.
OPEN = {"/", "/healthz", "/readyz", "/version", "/dashboard/{name}"}
DATA_PORT = [
    "/v1/groups/g/openings/1/edges/0/1",
    "/v1/groups/g/openings/1/ops/0/results/0",
    "/v1/link",
    "/v1/probe",
    "/v1/tensors/x",
    "/anything",
]


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Every method and path of a service; of WebSockets it is the request that opens them."""
    for route in _leaves(app.routes):
        for method in sorted(getattr(route, "methods", None) or {"GET"}):
            yield method, route.path


def _leaves(some: Sequence[Any]) -> Iterator[Any]:
    for route in some:
        router = getattr(route, "original_router", route)  # of those that an application includes
        inner = getattr(router, "routes", None)
        yield from _leaves(inner) if inner else [route]


def doors(stack: Cluster) -> Iterator[tuple[str, str, str]]:
    """Every address, method and path of a stack."""
    orchestrator, node = urlsplit(stack.orchestrator_url).netloc, stack.agents["node0"]
    for method, path in routes(create_app(Settings())):
        yield orchestrator, method, path
    agent = SimpleNamespace(settings=AgentSettings())
    for method, path in routes(make_app(cast(NodeAgent, agent))):
        yield urlsplit(node.control_url).netloc, method, path
    for path in DATA_PORT:
        for method in ("GET", "DELETE"):
            yield node.data_address, method, path


def status(
    address: str, method: str, path: str, context: ssl.SSLContext | None, token: str = ""
) -> int:
    """Return the status of the answer to a request."""
    kind = partial(http.client.HTTPSConnection, context=context)
    connection = kind(address, timeout=SECONDS) if context else plain(address)
    try:
        connection.request(method, path, headers=Tokens(token).headers())
        return connection.getresponse().status
    finally:
        connection.close()


def plain(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(address, timeout=SECONDS)


def test_every_door_of_every_port_is_closed_without_the_token(
    stack: Cluster, folder: CertificateFolder
) -> None:
    mine = TlsIdentity(str(folder.path / "operator"), serves=False).client
    seen = 0
    for address, method, path in doors(stack):
        concrete = re.sub(r"\{.*?\}", "x", path)
        for wrong in ("", "guess"):
            got = status(address, method, concrete, mine, wrong)
            if path in OPEN:
                assert got != 401, (method, path)
            else:
                assert got == 401, (address, method, path, got)
                seen += 1
        if path == "/v1/facts":
            assert status(address, method, concrete, mine, "first") == 200
    assert seen > 60


@pytest.mark.parametrize("kind", ["no certificate", "another authority's", "no TLS"])
def test_every_door_of_every_port_is_closed_without_the_certificate(
    stack: Cluster, tmp_path: Path, kind: str
) -> None:
    certificates(tmp_path, "me")
    context: ssl.SSLContext | None = None
    if kind != "no TLS":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if context is not None and kind != "no certificate":
        context.load_cert_chain(tmp_path / "me" / "tls.crt", tmp_path / "me" / "tls.key")
    for address, method, path in doors(stack):
        concrete = re.sub(r"\{.*?\}", "x", path)
        if (address, method, context) == (stack.agents["node0"].data_address, "GET", None):
            assert status(address, method, concrete, None, "first") == 400  # use TLS, it says
        else:
            with pytest.raises((OSError, http.client.HTTPException)):
                status(address, method, concrete, context, "first")


def test_the_list_of_doors_has_every_route_of_the_data_port() -> None:
    assert inspect.getsource(DataPort._route).count("case ") == len(DATA_PORT)


@pytest.mark.parametrize("kind", ["none", "another authority's", "plain"])
def test_a_command_without_the_right_certificate_learns_nothing_and_is_told_why(
    stack: Cluster, tmp_path: Path, kind: str
) -> None:
    certificates(tmp_path / "strange", "me")
    url = stack.orchestrator_url
    variables = {
        "none": {},
        "another authority's": {"ALLFOLD_TLS_DIR": str(tmp_path / "strange" / "me")},
        "plain": {"ALLFOLD_ORCHESTRATOR_URL": url.replace("https:", "http:")},
    }[kind]
    expected = {
        "none": "ALLFOLD_TLS_DIR is not set here",
        "another authority's": "certificates of one authority",
        "plain": "write https:// and set ALLFOLD_TLS_DIR",
    }[kind]
    shown = allfold(stack, "status", **variables, ALLFOLD_TOKEN="first")
    assert shown.returncode == 3
    assert expected in shown.stdout + shown.stderr
    assert "node1" not in shown.stdout


def test_the_metrics_say_when_the_certificates_end(
    stack: Cluster, folder: CertificateFolder
) -> None:
    mine = TlsIdentity(str(folder.path / "operator"), serves=False)
    ends = TlsIdentity(str(folder.path / "node")).expires
    for url in (stack.orchestrator_url, stack.agents["node0"].control_url):
        connection = http.client.HTTPSConnection(
            urlsplit(url).netloc, timeout=SECONDS, context=mine.client
        )
        connection.request("GET", "/metrics", headers=Tokens("first").headers())
        text = connection.getresponse().read().decode()
        connection.close()
        (value,) = re.findall(
            r"^allfold_\w+_certificate_end_time_seconds (\S+)$", text, re.MULTILINE
        )
        assert float(value) == ends


def test_the_doctor_finds_certificates_in_order(stack: Cluster, folder: CertificateFolder) -> None:
    operator = {"ALLFOLD_TLS_DIR": str(folder.path / "operator"), "ALLFOLD_TOKEN": "first"}
    shown = allfold(stack, "doctor", **operator, ALLFOLD_SOCKET=stack.agents["node0"].socket)
    assert "the certificate is valid for" in shown.stdout, shown.stdout + shown.stderr
    assert "FAIL" not in shown.stdout.upper().replace("FAILED 0", "")


@pytest.mark.long
def test_handshakes_that_never_end_hold_few_descriptors_and_are_ended(
    stack: Cluster, folder: CertificateFolder
) -> None:
    operator = {"ALLFOLD_TLS_DIR": str(folder.path / "operator"), "ALLFOLD_TOKEN": "first"}
    services = {
        urlsplit(stack.orchestrator_url).netloc: stack.services[0].pid,
        urlsplit(stack.agents["node0"].control_url).netloc: stack.services[1].pid,
    }
    with ExitStack() as ending:
        for address, pid in services.items():
            host, port = address.split(":")
            before = descriptors(pid)
            socks = [
                ending.enter_context(socket.create_connection((host, int(port))))
                for _ in range(1000)
            ]

            def one_more_has_come(
                place: tuple[str, int] = (host, int(port)), pid: int = pid, before: int = before
            ) -> bool:
                ending.enter_context(socket.create_connection(place))
                return descriptors(pid) < before + MOST_IDLE + SPARE_DESCRIPTORS

            wait_until(one_more_has_come, "idle ones are ended", 2 * PATIENCE_SECONDS)
            shown = allfold(stack, "status", **operator)
            assert shown.returncode == 0, shown.stderr
            began = time.monotonic()
            for sock in socks:
                sock.settimeout(SECONDS)
                with suppress(ConnectionError):
                    assert sock.recv(1) == b""
            assert time.monotonic() < began + 2 * HANDSHAKE_SECONDS


@pytest.mark.long
def test_an_agent_with_a_wrong_token_is_an_error_at_once_that_names_the_cure(
    stack: Cluster, folder: CertificateFolder, tmp_path: Path
) -> None:
    env = os.environ | {
        "ALLFOLD_TLS_DIR": str(folder.path / "node"),
        "ALLFOLD_ORCHESTRATOR_URL": stack.orchestrator_url,
        "ALLFOLD_TOKEN": "wrong",
        "ALLFOLD_LOG_FORMAT": "text",
        "ALLFOLD_AGENT_NAME": "stranger",
        "ALLFOLD_SOCKET": str(tmp_path / "s.sock"),
        "ALLFOLD_AGENT_CONTROL_LISTEN": "127.0.0.1:0",
        "ALLFOLD_AGENT_DATA_LISTEN": "127.0.0.1:0",
    }
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            [sys.executable, "-m", "allfold_agent"], env=env, cwd=ROOT, stdout=file, stderr=file
        ) as agent,
    ):
        try:
            wait_until(lambda: "ERROR" in log.read_text(), "the log has an error", SECONDS)
            rank = "import allfold; allfold.init(rank=0, world_size=1, init_timeout=600.0)"
            ended = subprocess.run(
                [sys.executable, "-c", rank],
                env=env,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        finally:
            agent.terminate()
            agent.wait(SECONDS)
    assert ended.returncode != 0
    assert "ALLFOLD_TOKEN" in ended.stderr
    assert "could not register" in ended.stderr


@pytest.mark.long
def test_certificates_their_authority_and_the_token_change_while_a_job_runs(
    stack: Cluster, folder: CertificateFolder, token: Path, tmp_path: Path
) -> None:
    job = SteadyJob(stack, tmp_path / "until")
    try:
        folder.add_authority()
        folder.issue("node", [], "allfold", 30)
        folder.issue_client("operator", 30)
        folder.forget_old_authorities()
        operator = {"ALLFOLD_TLS_DIR": str(folder.path / "operator")}
        for content, accepted in (("first,second", "first"), ("second,first", "second")):
            token.write_text(content)
            shown = allfold(stack, "status", **operator, ALLFOLD_TOKEN=accepted)
            assert shown.returncode == 0, shown.stderr
            assert "node1" in shown.stdout
        token.write_text("second")
        shown = allfold(stack, "status", **operator, ALLFOLD_TOKEN="first")
        assert shown.returncode == 1
        assert "token" in shown.stderr
        job.end()
    finally:
        job.kill()
    for log in stack.folder.glob("*.log"):
        assert "Traceback" not in log.read_text()
