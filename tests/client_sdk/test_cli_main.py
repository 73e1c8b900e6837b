"""The ``allfold`` command itself: help, versions, what is missing, who cannot be reached."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from allfold_cluster import Cluster
from allfold_cluster.environment import require, socket_path
from allfold_cluster.http import NoAnswer, get_json
from allfold_core.errors import InvalidArgument, LocalError, ServiceError
from tests.support.processes.cli import Commands, commands


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_names_every_command_and_the_exit_codes(allfold: Commands) -> None:
    out = allfold.run("--help").out
    for words in ("run ", "up ", "status ", "orchestrator ", "agent ", "Exit codes", "128 + n"):
        assert words in out


def test_help_imports_no_command_and_nothing_heavy() -> None:
    done = python(
        "import sys, allfold\n"
        "before = set(sys.modules)\n"
        "from allfold.cli import main\n"
        "sys.argv = ['allfold', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "new = set(sys.modules) - before\n"
        "slow = {'rich', 'httpx', 'http.client', 'asyncio', 'allfold.cli._run.command'}\n"
        "print(sorted(new & slow))"
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("missing", "command"), [("click", "status"), ("rich", "status"), ("cryptography", "certs")]
)
def test_without_the_cli_extra_one_line_tells_what_to_install(missing: str, command: str) -> None:
    done = python(
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        "from allfold.cli import main\n"
        f"sys.argv = ['allfold', {command!r}, 'init']\n"
        "main()"
    )
    assert done.returncode == 2
    assert done.stderr == 'The allfold command needs more: pip install "allfold[cli]"\n'


def test_the_version_is_printed_alone(allfold: Commands) -> None:
    assert allfold.run("--version").out.strip().count(".") == 2


def test_an_unknown_command_is_wrong_usage(allfold: Commands) -> None:
    assert "No such command 'tidy'" in allfold.run("tidy", status=2).err


@pytest.mark.parametrize("service", ["orchestrator", "agent"])
def test_a_service_gets_its_options_and_gives_its_status(allfold: Commands, service: str) -> None:
    assert f"allfold-{service}" in allfold.run(service, "--help").out
    allfold.run(service, "--no-such-option", status=2)


def test_a_service_that_is_not_installed_is_named_with_the_remedy() -> None:
    require("json")
    with pytest.raises(ServiceError, match=r"allfold_nowhere; .*pip install \"allfold\[local\]\""):
        require("json", "allfold_nowhere")


def test_a_socket_path_may_have_107_bytes() -> None:
    assert socket_path("/" + "x" * 106) == "/" + "x" * 106
    with pytest.raises(InvalidArgument, match="has 108 bytes"):
        socket_path("/" + "ä" * 53 + "x")


def test_a_cluster_has_a_node() -> None:
    with Cluster() as cluster, pytest.raises(InvalidArgument, match="at least 1 node, got 0"):
        cluster.start(0)


# --- who cannot be reached


def test_an_orchestrator_that_is_not_there_gives_status_3_and_what_was_tried(
    allfold: Commands,
) -> None:
    env = {"ALLFOLD_ORCHESTRATOR_URL": "http://127.0.0.1:9"}
    for command in (
        allfold.run("status", "--orchestrator", "http://127.0.0.1:9/", status=3),
        allfold.run("status", "--json", status=3, env=env),
    ):
        assert (
            "no orchestrator answers: tried http://127.0.0.1:9/v1/nodes?limit=1000: " in command.err
        )
        assert "Connection refused" in command.err
        assert command.err.endswith("To see what runs, ask an agent with --agent-url.\n")
        assert command.out == ""


def test_an_agent_that_is_not_there_gives_status_3_and_what_was_tried(allfold: Commands) -> None:
    err = allfold.run("status", "--agent-url", "http://127.0.0.1:9", status=3).err
    assert "no agent answers: tried http://127.0.0.1:9/v1/status" in err


class Answer(BaseHTTPRequestHandler):
    """Answers every GET alike, and notes the tokens that it got."""

    status = 200
    body = b"{}"
    headers_to_send: tuple[tuple[str, str], ...] = ()
    tokens: list[str | None]

    def do_GET(self) -> None:
        self.tokens.append(self.headers["Authorization"])
        self.send_response(self.status)
        for name, value in self.headers_to_send:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


Serve = Callable[..., tuple[str, list[str | None]]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[ThreadingHTTPServer] = []

    def start(
        status: int = 200, body: bytes = b"{}", headers: tuple[tuple[str, str], ...] = ()
    ) -> tuple[str, list[str | None]]:
        tokens: list[str | None] = []
        members = {"status": status, "body": body, "headers_to_send": headers, "tokens": tokens}
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Answer,), members))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", tokens

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_get_brings_the_token_and_not_through_a_proxy(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, tokens = serve(body=b'{"ready": true}')
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert get_json(url, "secret") == {"ready": True}
    get_json(url, "")
    assert tokens == ["Bearer secret", None]


def test_an_error_that_a_service_answers_comes_out_as_it_went_in(serve: Serve) -> None:
    error = LocalError("the token is not the orchestrator's")
    url, _ = serve(401, json.dumps({"error": error.to_dict()}).encode())
    with pytest.raises(LocalError, match="the token is not the orchestrator's"):
        get_json(url, "wrong")


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>"), (200, b"[1]"), (200, b"\xff"), (500, b"oops"), (502, b'{"error": "x"}')],
)
def test_somebody_else_at_the_address_is_not_taken_for_allfold(
    serve: Serve, status: int, body: bytes
) -> None:
    url, _ = serve(status, body)
    with pytest.raises(NoAnswer, match=url):
        get_json(url, "")


def test_a_redirect_does_not_take_the_token_elsewhere(serve: Serve) -> None:
    elsewhere, tokens = serve()
    url, _ = serve(302, headers=(("Location", elsewhere),))
    with pytest.raises(NoAnswer, match="HTTP status 302"):
        get_json(url, "secret")
    assert tokens == []


# --- what status shows


class ThreePages(BaseHTTPRequestHandler):
    """An orchestrator with nodes and groups a, b and c, one to a page."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        what, after = url.path.rpartition("/")[2], parse_qs(url.query).get("after", [""])[0]
        name = {"": "a", "a": "b", "b": "c"}[after]
        entry = {"node": name, "group": name, "state": "gone"}
        page = {what: [entry], "next": name if name != "c" else None}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(page).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_the_status_has_the_nodes_and_groups_of_all_pages(allfold: Commands) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), ThreePages) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        report = json.loads(allfold.run("status", "--json", "--orchestrator", url).out)
        server.shutdown()
    assert [node["node"] for node in report["nodes"]] == ["a", "b", "c"]
    assert [group["group"] for group in report["groups"]] == ["a", "b", "c"]


def test_of_several_replicas_the_first_that_answers_is_shown(
    allfold: Commands, serve: Serve
) -> None:
    one, _ = serve(body=b'{"nodes": [], "groups": []}')
    nowhere = "http://127.0.0.1:9"
    shown = allfold.run("status", "--json", env={"ALLFOLD_ORCHESTRATOR_URL": f"{nowhere}, {one}"})
    assert json.loads(shown.out)["orchestrator"] == one
    err = allfold.run("status", "--orchestrator", f"{nowhere},{nowhere}/x", status=3).err
    assert f"tried {nowhere}/v1/nodes" in err
    assert f"; {nowhere}/x/v1/nodes" in err


def test_pages_that_go_in_circles_end_in_an_error(allfold: Commands, serve: Serve) -> None:
    url, _ = serve(body=b'{"nodes": [], "next": "a"}')
    err = allfold.run("status", "--orchestrator", url, status=1).err
    assert "the pages of /v1/nodes go in circles" in err


def test_an_orchestrator_whose_state_store_is_down_is_said_to_answer(
    allfold: Commands, serve: Serve
) -> None:
    down = ServiceError("cannot reach its state store", component="store", cause="ConnectionError")
    url, _ = serve(503, json.dumps({"error": down.to_dict()}).encode())
    err = allfold.run("status", "--orchestrator", url, status=1).err
    assert err == (
        f"allfold: the orchestrator at {url} answers, but its state store is down "
        "(ConnectionError). Running jobs are not affected; new ranks can join when it is back. "
        "To see what runs, ask an agent with --agent-url.\n"
    )


READY_AGENT = json.dumps({"node": "a", "ready": True, "waiting_for": "", "groups": []}).encode()


def test_agents_that_are_given_are_shown_although_the_state_store_is_down(
    allfold: Commands, serve: Serve
) -> None:
    down = ServiceError("cannot reach its state store", component="store", cause="ConnectionError")
    orchestrator, _ = serve(503, json.dumps({"error": down.to_dict()}).encode())
    agent, _ = serve(body=READY_AGENT)
    asked = ("status", "--orchestrator", orchestrator, "--agent-url", agent)
    table = allfold.run(*asked, status=1)
    assert "Agents" in table.out
    assert "ready" in table.out
    assert table.err == (
        f"allfold: the orchestrator at {orchestrator} answers, but its state store is down "
        "(ConnectionError). Running jobs are not affected; new ranks can join when it is back.\n"
    )
    report = json.loads(allfold.run(*asked, "--json", status=1).out)
    assert list(report["agents"]) == [agent]
    assert "its state store is down" in report["problems"][orchestrator]


def test_agents_that_are_given_are_shown_although_no_orchestrator_answers(
    allfold: Commands, serve: Serve
) -> None:
    agent, _ = serve(body=READY_AGENT)
    nowhere = "http://127.0.0.1:9"
    command = allfold.run("status", "--orchestrator", nowhere, "--agent-url", agent, status=3)
    assert "ready" in command.out
    assert "no orchestrator answers" in command.err
    assert "--agent-url" not in command.err


def test_an_agent_that_is_not_ready_says_why_in_a_sentence(allfold: Commands, serve: Serve) -> None:
    problem = "the orchestrator at http://10.0.0.1:7400 does not answer: connection refused"
    status = {"node": "a", "ready": False, "waiting_for": problem, "groups": []}
    url, _ = serve(body=json.dumps(status).encode())
    assert f"not ready: {problem}" in allfold.run("status", "--agent-url", url).out
