"""Services under abuse: a job goes on without a failed op, memory and descriptors stay bounded."""

from __future__ import annotations

import os
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from allfold_agent.http.connections import ConnectionLimits
from allfold_cluster import Cluster
from allfold_core.protocol.rank_messages import MAX_MESSAGE, PROTOCOL_VERSION, Message, pack_json
from allfold_service.connections import MOST_IDLE, PATIENCE_SECONDS
from allfold_service.request_limits import REQUEST_SECONDS
from tests.support.descriptors import descriptors
from tests.support.processes.steady_job import SteadyJob
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SECONDS = 30.0
MIB = 1 << 20
MOST_GROWTH = 100 * MIB
MOST_STRANGERS = 2 * ConnectionLimits().strangers  # with those that make room just now
SPARE_DESCRIPTORS = 60
Place = tuple[str, int]


@pytest.fixture(scope="module")
def stack() -> Iterator[Cluster]:
    _, most = limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    with Cluster() as stack:
        stack.start(2)
        yield stack
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.fixture(scope="module")
def places(stack: Cluster) -> dict[str, Place]:
    """Every port of the first node and of the orchestrator."""
    node = stack.agents["node0"]
    urls = {
        "orchestrator": stack.orchestrator_url,
        "control": node.control_url,
        "data": f"http://{node.data_address}",
    }
    parts = {name: urlsplit(url) for name, url in urls.items()}
    return {name: (each.hostname or "", each.port or 0) for name, each in parts.items()}


@pytest.fixture(scope="module")
def job(stack: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteadyJob]:
    """A job that goes on; no op fails."""
    started = SteadyJob(stack, tmp_path_factory.mktemp("job") / "until")
    try:
        yield started
        started.end()
    finally:
        started.kill()


@pytest.fixture(autouse=True)
def bounds(stack: Cluster, job: SteadyJob) -> Iterator[None]:
    """The services live, and stay small, and the job goes on."""
    before = [(memory(each.pid), descriptors(each.pid)) for each in stack.services]
    yield
    assert all(rank.poll() is None for rank in job.ranks)
    for service, (bytes_before, descriptors_before) in zip(stack.services, before, strict=True):
        assert not service.ended, stack.end_report(service)
        assert memory(service.pid) < bytes_before + MOST_GROWTH, service.name
        most, told = descriptors_before + 20, f"descriptors of {service.name} are back"
        wait_until(lambda pid=service.pid, most=most: descriptors(pid) <= most, told, SECONDS)  # type: ignore[misc]
        log = stack.log_of(service.name).read_text(errors="replace")
        assert "Traceback" not in log, log[-3000:]


def memory(pid: int) -> int:
    """The resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def connect(place: Place) -> socket.socket:
    return socket.create_connection(place, SECONDS)


def answer_of(sock: socket.socket) -> bytes:
    """All that comes until the server closes, which it has to do in time."""
    sock.settimeout(SECONDS)
    with suppress(ConnectionError):
        return b"".join(iter(lambda: sock.recv(65536), b""))
    return b""


def trickle(socks: list[socket.socket], seconds: float) -> int:
    """Send a byte every half second on each; return how many connections are left open."""
    until = time.monotonic() + seconds
    living = socks
    while living and time.monotonic() < until:
        left = []
        for sock in living:
            with suppress(OSError):
                sock.send(b"x")
                left.append(sock)
        living = left
        time.sleep(0.5)
    return len(living)


@pytest.mark.long
def test_requests_that_never_end_are_ended_on_every_port(places: dict[str, Place]) -> None:
    beginnings = [b"GET /healthz HTTP/1.1\r\nX: ", b"POST /v1/nodes HTTP/1.1\r\nHost: a\r\n"]
    body = b"POST /v1/nodes HTTP/1.1\r\nHost: a\r\nContent-Length: 999999\r\n\r\n"
    with ExitStack() as ending:
        socks = []
        for place in places.values():
            for beginning in [*beginnings, body] * 20:
                sock = ending.enter_context(connect(place))
                sock.send(beginning)
                socks.append(sock)
        assert trickle(socks, REQUEST_SECONDS + 5.0) == 0


def test_idle_connections_by_the_thousand_hold_few_descriptors(
    stack: Cluster, places: dict[str, Place]
) -> None:
    before = {each.name: descriptors(each.pid) for each in stack.services}
    with ExitStack() as ending:
        for place in places.values():
            for _ in range(1000):
                with suppress(ConnectionError):
                    ending.enter_context(connect(place))
        later = ending.enter_context(ExitStack())

        def one_more_has_come() -> bool:
            for place in places.values():
                later.enter_context(connect(place))
            return all(
                descriptors(each.pid)
                < before[each.name] + MOST_IDLE + MOST_STRANGERS + SPARE_DESCRIPTORS
                for each in stack.services
            )

        wait_until(one_more_has_come, "idle ones are ended", 2 * PATIENCE_SECONDS)
        for place in places.values():  # others are served meanwhile
            with connect(place) as sock:
                sock.send(b"GET /healthz HTTP/1.0\r\nHost: a\r\n\r\n")
                assert answer_of(sock).startswith(b"HTTP/1.")


@pytest.mark.parametrize("port", ["orchestrator", "control", "data"])
@pytest.mark.parametrize("begin", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n"])
def test_a_head_without_end_is_refused(places: dict[str, Place], port: str, begin: bytes) -> None:
    piece = b"y: z\r\n" * 10_000 if begin.endswith(b"\n") else b"y" * 60_000
    with connect(places[port]) as sock:
        until, is_open = time.monotonic() + SECONDS, True
        try:
            sock.sendall(begin)
            while is_open and time.monotonic() < until:
                is_open = sock.send(piece) > 0
        except ConnectionError:
            is_open = False
        assert not is_open


@pytest.mark.parametrize("port", ["orchestrator", "control", "data"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_without_end_is_not_taken(
    stack: Cluster, places: dict[str, Place], port: str, is_chunked: bool
) -> None:
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {1 << 40}"
    head = (
        f"POST /v1/nodes HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {stack.token}\r\n"
        f"Content-Type: application/json\r\n{length}\r\n\r\n"
    )
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n" if is_chunked else b" " * 65536
    with connect(places[port]) as sock:
        sock.settimeout(2.0)
        with suppress(ConnectionError, TimeoutError):
            sock.sendall(head.encode())
            for _ in range(64):
                sock.sendall(piece)
        sock.settimeout(SECONDS)
        with suppress(ConnectionError):
            assert sock.recv(12) in (b"", b"HTTP/1.1 413", b"HTTP/1.1 404")


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
AMBIGUOUS = [
    b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Content-Length: 0\r\nContent-Length: 35\r\n\r\n",
    b"Content-Length: +0\r\n\r\n",
    b"Content-Length: 0x0\r\n\r\n",
    b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: x chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n",
]


@pytest.mark.parametrize("head", AMBIGUOUS)
@pytest.mark.parametrize("port", ["orchestrator", "control", "data"])
def test_nothing_is_smuggled_behind_a_body_of_two_lengths(
    places: dict[str, Place], port: str, head: bytes
) -> None:
    with connect(places[port]) as sock, suppress(ConnectionError):
        sock.sendall(b"POST /x HTTP/1.1\r\nHost: a\r\n" + head + SMUGGLED)
        assert answer_of(sock).count(b"HTTP/1.1 ") <= 1


def flood(rank: socket.socket, seconds: float, message: Callable[[], bytes]) -> int:
    """Send messages, and read none, until the agent takes no more."""
    until, sent = time.monotonic() + seconds, 0
    rank.setblocking(False)
    while time.monotonic() < until:
        try:
            rank.send(message())
            sent += 1
        except BlockingIOError:
            time.sleep(0.001)
        except OSError:
            break
    return sent


def test_garbage_of_a_rank_ends_its_own_connection_alone(stack: Cluster) -> None:
    dice = random.Random(0)
    hello = pack_json(Message.HELLO, {"protocol": PROTOCOL_VERSION, "pid": os.getpid()})
    kinds: list[Callable[[], bytes]] = [
        lambda: bytes([dice.randrange(256)]) + dice.randbytes(dice.randrange(MAX_MESSAGE // 8)),
        lambda: pack_json(dice.choice(list(Message)), {"number": [1], "request": 1}),
        lambda: pack_json(Message.JOIN, {"group": "g", "rank": [], "request": 1}),
        lambda: bytes([Message.LEAVE]) + b"[" * 60_000,
    ]
    for kind in kinds:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
                rank.settimeout(SECONDS)
                rank.connect(stack.agents["node0"].socket)
                rank.send(hello)
                flood(rank, 0.5, kind)
