"""An agent measures its links when it comes in: once, not for long, and never in a job's way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from allfold_agent.membership.link_probe import Link
from allfold_agent.membership.orchestrator_client import OrchestratorClient
from allfold_agent.membership.registration import Identity, Registration
from allfold_core.errors import (
    AllfoldError,
    MultipleRegister,
    OrchestratorUnreachable,
    PeerLost,
    PeerMissing,
    ServiceError,
)
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

IDENTITY = Identity("a", "http://a:1", "a:2", "cpu", "", "0", cores=2)
LINKS = {"near:1": Link(1e-4, 1e8), "far:1": Link(1e-2, 1e9)}
JOIN = {
    "group": "train",
    "rank": 0,
    "session": "s0",
    "world_size": 1,
    "timeout": 30.0,
    "strategies": {},
}
GROUP = SimpleNamespace(
    name="train",
    opening=3,
    table=SimpleNamespace(in_flight={}),
    last_called=lambda: {0: 7},
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Registrar:
    """An orchestrator that notes what it is sent, and forgets nodes at will."""

    def __init__(self, peers: list[str], lease_seconds: float = 5.0) -> None:
        self.registrations: list[dict[str, Any]] = []
        self.heartbeats = 0
        self.seats: list[dict[str, Any]] = []
        self.forgets = 0
        self.is_down = False
        self.refusal: AllfoldError | None = None
        self.lease = {
            "lease_seconds": lease_seconds,
            "heartbeat_seconds": 0.01,
            "peers": peers,
        }
        registrar = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = registrar.answer(self.path, json.loads(body))
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *_: Any) -> None:
                """Not on the terminal."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if self.is_down:
            return 502, b"<html>bad gateway</html>"
        if self.refusal is not None:
            return self.refusal.status, json.dumps({"error": self.refusal.to_dict()}).encode()
        if path == "/v1/nodes":
            self.registrations.append(body)
            return 200, json.dumps(self.lease).encode()
        if path.endswith("/ranks"):
            self.seats.append(body)
            return 200, b'{"epoch": 1}'
        if self.forgets:
            self.forgets -= 1
            return 404, json.dumps({"error": AllfoldError("who is it?").to_dict()}).encode()
        self.heartbeats += 1
        return 200, b"{}"

    @property
    def links(self) -> list[dict[str, float] | None]:
        return [registration["link"] for registration in self.registrations]

    async def hears_heartbeats(self) -> None:
        count = self.heartbeats
        await until(lambda: self.heartbeats > count + 2, "it sends heartbeats")


@asynccontextmanager
async def registered(
    registrar: Registrar,
    probe: Callable[[str], Link] = LINKS.__getitem__,
    held: list[Any] | None = None,
    identify: Callable[[], Identity] = lambda: IDENTITY,
) -> AsyncIterator[Registration]:
    thread = Thread(target=registrar.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    client = OrchestratorClient(registrar.url, "")
    registration = Registration(client, "a", identify, lambda: held or [], probe)
    keeping = asyncio.create_task(registration.keep())
    try:
        yield registration
        assert not keeping.done()
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        await client.close()
        registrar.server.shutdown()
        thread.join()
        registrar.server.server_close()


async def test_it_registers_once_more_with_the_slowest_of_its_links() -> None:
    registrar = Registrar(list(LINKS))
    async with registered(registrar):
        await registrar.hears_heartbeats()
    assert registrar.links == [None, {"latency": 1e-2, "bandwidth": 1e8}]
    first, second = registrar.registrations
    assert first["incarnation"] == second["incarnation"]


async def test_it_says_once_that_it_is_registered_also_where_it_measures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    registrar = Registrar(list(LINKS))
    async with registered(registrar):
        await registrar.hears_heartbeats()
    assert len(registrar.registrations) == 2
    told = [each.getMessage() for each in caplog.records]
    assert sum(each.startswith("registered with the orchestrator at") for each in told) == 1


async def test_alone_it_registers_once_and_has_nothing_to_measure() -> None:
    registrar = Registrar([])
    async with registered(registrar):
        await registrar.hears_heartbeats()
    assert registrar.links == [None]


@pytest.mark.parametrize("error", [PeerLost("refused"), PeerMissing("silent")])
async def test_it_goes_on_with_the_others_where_one_cannot_be_measured(error: AllfoldError) -> None:
    def probe(address: str) -> Link:
        if address == "gone:1":
            raise error
        return LINKS[address]

    registrar = Registrar(["gone:1", "near:1"])
    async with registered(registrar, probe):
        await registrar.hears_heartbeats()
    assert registrar.links == [None, {"latency": 1e-4, "bandwidth": 1e8}]


async def test_where_none_can_be_measured_it_goes_on_and_does_not_try_again() -> None:
    asked: list[str] = []

    def probe(address: str) -> Link:
        asked.append(address)
        raise PeerLost("refused")

    registrar = Registrar(["gone:1", "gone:2"])
    async with registered(registrar, probe):
        await registrar.hears_heartbeats()
        registrar.forgets = 1
        await until(lambda: len(registrar.registrations) == 2, "it registers again")
        await registrar.hears_heartbeats()
    assert registrar.links == [None, None]
    assert asked == ["gone:1", "gone:2"]


async def test_registering_again_it_brings_the_link_and_does_not_measure_again() -> None:
    asked: list[str] = []

    def probe(address: str) -> Link:
        asked.append(address)
        return LINKS[address]

    registrar = Registrar(["near:1"])
    async with registered(registrar, probe):
        await registrar.hears_heartbeats()
        registrar.forgets = 1
        await until(lambda: len(registrar.registrations) == 3, "it registers again")
        await registrar.hears_heartbeats()
    measured = {"latency": 1e-4, "bandwidth": 1e8}
    assert registrar.links == [None, measured, measured]
    assert asked == ["near:1"]


async def test_who_was_alone_measures_when_it_registers_again_and_others_are_there() -> None:
    registrar = Registrar([])
    async with registered(registrar):
        await registrar.hears_heartbeats()
        registrar.lease["peers"] = ["far:1"]
        registrar.forgets = 1
        await until(lambda: len(registrar.registrations) == 3, "it registers with its link")
    assert registrar.links == [None, None, {"latency": 1e-2, "bandwidth": 1e9}]


async def test_while_it_holds_a_group_it_measures_nothing() -> None:
    registrar = Registrar(["near:1"])
    async with registered(registrar, held=[GROUP]):
        await registrar.hears_heartbeats()
    assert registrar.links == [None]
    assert registrar.registrations[0]["holds"] == {"train": 3}


async def test_a_probe_that_hangs_keeps_it_from_heartbeats_for_a_part_of_its_lease_only() -> None:
    over = Event()

    def probe(address: str) -> Link:
        if address == "far:1":
            over.wait(30)
        return LINKS[address]

    registrar = Registrar(["near:1", "far:1"], lease_seconds=0.4)
    try:
        async with registered(registrar, probe):
            await registrar.hears_heartbeats()
            assert not over.is_set()
    finally:
        over.set()
    assert registrar.links == [None, {"latency": 1e-4, "bandwidth": 1e8}]


async def test_ranks_wait_until_the_links_are_measured() -> None:
    over = Event()

    def probe(address: str) -> Link:
        over.wait(30)
        return LINKS[address]

    registrar = Registrar(["near:1"], lease_seconds=60)
    try:
        async with registered(registrar, probe) as registration:
            with pytest.raises(ServiceError, match="measuring the links") as caught:
                await registration.join({**JOIN, "init_timeout": 0.3})
            assert type(caught.value) is ServiceError
            assert registration.problem is not None
            over.set()
            await registrar.hears_heartbeats()
            assert registration.problem is None
    finally:
        over.set()
    assert registrar.seats == []
    assert registrar.links == [None, {"latency": 1e-4, "bandwidth": 1e8}]


STORE_DOWN = ServiceError("it cannot reach its state store", component="store")
TAKEN = MultipleRegister("node a is registered already, by another agent")


@pytest.mark.parametrize("refusal", [STORE_DOWN, TAKEN], ids=["no store", "name taken"])
async def test_a_rank_hears_why_its_node_is_not_registered_with_the_advice_for_that(
    refusal: AllfoldError,
) -> None:
    registrar = Registrar([])
    registrar.refusal = refusal
    async with registered(registrar) as registration:
        with pytest.raises(type(refusal)) as caught:
            await registration.join({**JOIN, "init_timeout": 0.3})
    error = caught.value
    assert type(error) is type(refusal), "not OrchestratorUnreachable: it has answered"
    assert error.message == f"node a could not register in time: {refusal.message}"
    assert error.details == refusal.details


@pytest.mark.parametrize("said", [{}, {"on_loss": "shrink", "min_world": 1}])
async def test_what_a_rank_says_about_losses_reaches_the_orchestrator(said: dict[str, Any]) -> None:
    registrar = Registrar([])
    async with registered(registrar) as registration:
        with pytest.raises(OrchestratorUnreachable):  # it has seats, but no plans
            await registration.join({**JOIN, **said, "init_timeout": 0.5})
    (body, *_) = registrar.seats
    assert {key: body[key] for key in ("on_loss", "min_world") if key in body} == said


async def test_an_orchestrator_that_does_not_answer_is_said_to_be_unreachable() -> None:
    registrar = Registrar([])
    registrar.is_down = True
    async with registered(registrar) as registration:
        with pytest.raises(OrchestratorUnreachable, match="could not register in time") as caught:
            await registration.join({**JOIN, "init_timeout": 0.3})
    assert "Check that it runs" in str(caught.value)


async def test_an_error_that_nobody_foresaw_ends_no_heartbeats_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = iter([KeyError("moon"), KeyError("moon")])

    def identify() -> Identity:
        for error in failures:
            raise error
        return IDENTITY

    registrar = Registrar([])
    async with registered(registrar, identify=identify) as registration:
        await until(lambda: "KeyError('moon')" in str(registration.problem), "it says so")
        await registrar.hears_heartbeats()
    assert registration.problem is None
    told = [each for each in caplog.records if "moon" in each.getMessage()]
    assert len(told) == 1
    assert told[0].exc_info, "the traceback is there for who has to mend it"


async def test_beginning_and_end_of_an_outage_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    registrar = Registrar([])
    async with registered(registrar) as registration:
        await registrar.hears_heartbeats()
        registrar.is_down = True
        await until(lambda: registration.problem is not None, "it notices")
        registrar.is_down = False
        await registrar.hears_heartbeats()
        assert registration.problem is None
    told = [each.getMessage() for each in caplog.records if each.name.startswith("allfold")]
    outage = [each for each in told if registrar.url in each]
    assert outage[0].startswith("registered with the orchestrator at")
    assert outage[1].startswith(f"not ready, trying again: {registrar.url} answered 502")
    assert outage[2:] == [f"the orchestrator at {registrar.url} answers again"]
