"""``allfold drain``: what it asks, what it says, and when it is done."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from allfold.cli._drain import awaited
from allfold_core.errors import LocalError
from tests.support.processes.cli import Commands, commands

Json = dict[str, Any]


def answer(*ranks: tuple[str, int], draining: bool = True) -> Json:
    """Of these ranks, those of group tp cannot leave."""
    left = [{"group": group, "rank": rank, "can_leave": group != "tp"} for group, rank in ranks]
    return {"node": "b", "draining": draining, "ranks": left}


@pytest.mark.parametrize(
    ("answered", "waits"),
    [
        (answer(draining=False), "its agent, which has not answered yet"),
        (answer(("dp", 1), draining=False), "its agent, which has not answered yet"),
        (answer(("dp", 1)), "rank 1 of group dp"),
        (
            answer(("dp", 2), ("dp", 3), ("tp", 0)),
            "ranks 2, 3 of group dp; rank 0 of group tp, which is not elastic, to end",
        ),
        (answer(), None),
    ],
)
def test_a_node_is_drained_when_it_has_said_so_and_no_rank_is_left(
    answered: Json, waits: str | None
) -> None:
    assert awaited(answered) == waits


class Orchestrator(BaseHTTPRequestHandler):
    """Gives its answers to POST requests in order, repeats the last one, and notes the requests."""

    answers: list[tuple[int, Json]]
    asked: list[tuple[str, str | None]]

    def do_POST(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def orchestrator(*answers: tuple[int, Json]) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    asked: list[tuple[str, str | None]] = []
    handler = type("Handler", (Orchestrator,), {"answers": list(answers), "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


def test_it_says_what_it_waits_for_until_nobody_is_left(allfold: Commands) -> None:
    waits = [answer(("dp", 1), draining=False), *[answer(("dp", 1))] * 2, answer()]
    with orchestrator(*((200, each) for each in waits)) as (url, asked):
        env = {"ALLFOLD_ORCHESTRATOR_URL": url, "ALLFOLD_ADMIN_TOKEN": "admin"}
        shown = allfold.run("drain", "b", env=env)
    assert shown.out.splitlines() == [
        "node b waits for its agent, which has not answered yet",
        "node b waits for rank 1 of group dp",
        "node b has no rank left",
    ]
    assert asked == [("/v1/nodes/b/drain", "Bearer admin")] * 4


def test_it_ends_with_status_1_when_ranks_are_left_after_its_timeout(allfold: Commands) -> None:
    with orchestrator((200, answer(("dp", 1)))) as (url, _):
        options = ("--orchestrator", url, "--timeout", "0.1")
        err = allfold.run("drain", *options, "b", status=1).err
    assert err == "allfold: after 0.1 s, node b waits for rank 1 of group dp\n"


def test_it_shows_the_refusal_of_the_orchestrator(allfold: Commands) -> None:
    refusal = LocalError("this needs the administrator's token")
    with orchestrator((403, {"error": refusal.to_dict()})) as (url, _):
        err = allfold.run("drain", "--orchestrator", url, "b", status=1).err
    assert err == "allfold: this needs the administrator's token\n"


def test_it_asks_the_replica_that_answers(allfold: Commands) -> None:
    nowhere = "http://127.0.0.1:9"
    with orchestrator((200, answer())) as (url, _):
        shown = allfold.run("drain", "--orchestrator", f"{nowhere},{url}", "b")
    assert shown.out == "node b has no rank left\n"
    err = allfold.run("drain", "--orchestrator", nowhere, "b", status=3).err
    assert f"tried {nowhere}/v1/nodes/b/drain" in err
