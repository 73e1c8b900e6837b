"""The connections of data ports with TLS: who is let in, who is told what, within which time."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import monotonic

import pytest

from allfold_agent.data_port import DataPort
from allfold_agent.edges.link_probe import PROBE_PROTOCOL, PROBE_TARGET, measure
from allfold_agent.http.client import get_json, upgrade
from allfold_agent.http.connections import ConnectionLimits
from allfold_agent.http.transport import Transport
from allfold_agent.tensors.offers import Offers
from allfold_core.errors import AllfoldError, LocalError, PeerLost, ServiceError
from allfold_core.protocol.frames import EDGE_PROTOCOL
from allfold_service.credentials import Credentials, Tokens
from allfold_service.tls import TlsIdentity
from tests.support.credentials import certificates, with_tls
from tests.support.waiting import wait_until

SECONDS = 10.0
TOKEN = "secret"


@contextmanager
def serving(
    credentials: Credentials,
    limits: ConnectionLimits | None = None,
    taker: Callable[[socket.socket], None] = socket.socket.close,
) -> Iterator[str]:
    """A data port with these credentials; its address."""
    transport = Transport(credentials)
    listener = socket.create_server(("127.0.0.1", 0))
    port = DataPort(
        listener,
        transport=transport,
        open_edge=lambda _: taker,
        offers=Offers(),
        limits=limits or ConnectionLimits(),
    )
    port.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        port.close()
        transport.close()


def probe(credentials: Credentials, address: str) -> None:
    """Open a connection to the port, for the protocol that measures links."""
    transport = Transport(credentials)
    try:
        upgrade(transport, address, PROBE_TARGET, PROBE_PROTOCOL, SECONDS)[0].close()
    finally:
        transport.close()


class _Between(Thread):
    """Passes on the bytes of one connection, and keeps those of the one who has dialled."""

    def __init__(self, listener: socket.socket, target: tuple[str, int], seen: bytearray) -> None:
        super().__init__(daemon=True)
        self._listener = listener
        self._target = target
        self._seen = seen

    def run(self) -> None:
        one, _ = self._listener.accept()
        with one, socket.create_connection(self._target, SECONDS) as other:
            one.settimeout(0.05)
            other.settimeout(0.05)
            ends = monotonic() + SECONDS
            while monotonic() < ends:
                for source, sink in ((one, other), (other, one)):
                    try:
                        data = source.recv(65536)
                    except TimeoutError:
                        continue
                    except OSError:
                        return
                    if not data:
                        return
                    if source is one:
                        self._seen += data
                    sink.sendall(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certificates(tmp_path, "a", "b")
    return tmp_path


def test_a_link_is_measured_through_tls(folder: Path) -> None:
    transport = Transport(with_tls(folder / "b", TOKEN))
    with serving(with_tls(folder / "a", TOKEN)) as address:
        found = measure(transport, address)
    transport.close()
    assert 0 < found.latency < 1
    assert found.bandwidth > 1e6


def test_with_tls_an_agent_of_the_same_machine_has_no_way_around_it(folder: Path) -> None:
    with serving(with_tls(folder / "a")) as address:
        host, port = address.split(":")
        with socket.socket(socket.AF_UNIX) as sock, pytest.raises(ConnectionRefusedError):
            sock.connect(f"\0allfold-data-{host}-{port}")


def test_the_token_is_asked_for_beside_the_certificate(folder: Path) -> None:
    with serving(with_tls(folder / "a", TOKEN)) as address:
        with pytest.raises(LocalError, match="token") as caught:
            probe(with_tls(folder / "b", "other"), address)
        assert caught.value.details["http_status"] == 401
        probe(with_tls(folder / "b", f"{TOKEN},other"), address)


def test_a_certificate_of_another_authority_is_refused_with_what_to_do(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    strange = tmp_path_factory.mktemp("strange")
    certificates(strange, "c")
    with serving(with_tls(folder / "a")) as address:
        with pytest.raises(PeerLost, match=r"not accepted.*certificates of one authority"):
            probe(with_tls(strange / "c"), address)
        # One that trusts us, and whom we do not trust.
        (strange / "c" / "ca.crt").write_bytes(
            (strange / "ca.crt").read_bytes() + (folder / "ca.crt").read_bytes()
        )
        with pytest.raises(
            PeerLost, match=r"does not accept the certificate of this end.*one authority"
        ):
            probe(with_tls(strange / "c"), address)


def test_a_certificate_for_another_name_is_refused(folder: Path) -> None:
    with serving(with_tls(folder / "a")) as address:
        strange = TlsIdentity(str(folder / "b"))
        strange.client._name = "other"  # type: ignore[attr-defined]
        with pytest.raises(PeerLost, match=r"[Hh]ostname mismatch.*ALLFOLD_TLS_NAME"):
            probe(Credentials(Tokens(), strange), address)


def test_an_agent_without_tls_is_told_to_use_it(folder: Path) -> None:
    with serving(with_tls(folder / "a")) as address:
        plain = Transport()
        for _ in range(3):
            with pytest.raises(AllfoldError, match=r"speaks TLS: set ALLFOLD_TLS_DIR"):
                get_json(plain, address, "/v1/probe", SECONDS)


def test_an_agent_with_tls_says_that_the_other_one_has_none(folder: Path) -> None:
    with serving(Credentials()) as address, pytest.raises(PeerLost, match="does not speak TLS"):
        probe(with_tls(folder / "a"), address)


def test_a_client_that_says_nothing_is_let_go_and_disturbs_nobody(folder: Path) -> None:
    limits = ConnectionLimits(strangers=4, greeting_seconds=0.5)
    with serving(with_tls(folder / "a"), limits) as address:
        host, port = address.split(":")
        silent = [socket.create_connection((host, int(port)), SECONDS) for _ in range(8)]
        probe(with_tls(folder / "b"), address)
        for sock in silent:
            with sock:
                sock.settimeout(SECONDS)
                assert sock.recv(1) == b""


@pytest.mark.parametrize("data", [b"", b"hello"])
def test_a_connection_that_is_reset_before_it_is_served_disturbs_nobody(
    folder: Path, data: bytes
) -> None:
    transport = Transport(with_tls(folder / "a"))
    listener = socket.create_server(("127.0.0.1", 0))
    port = DataPort(
        listener, transport=transport, open_edge=lambda _: socket.socket.close, offers=Offers()
    )
    for _ in range(3):
        with socket.create_connection(listener.getsockname(), SECONDS) as hasty:
            hasty.sendall(data)
            hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    port.start()
    try:
        probe(with_tls(folder / "b"), f"127.0.0.1:{listener.getsockname()[1]}")
    finally:
        port.close()
        transport.close()


def test_without_a_descriptor_for_the_plain_end_the_limit_is_named_not_the_peer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with serving(with_tls(folder / "a")) as address:
        monkeypatch.setattr(socket, "socketpair", fail)
        with pytest.raises(ServiceError, match="ulimit"):
            probe(with_tls(folder / "b"), address)
        wait_until(lambda: "could not take its connection" in caplog.text, "its log")


def test_a_connection_that_nobody_takes_over_ends_at_both_ends_of_its_tunnel(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = []

    def fail(plain: socket.socket) -> None:
        given.append(plain)
        raise RuntimeError("no")

    transport = Transport(with_tls(folder / "b"))
    target = "/v1/groups/g/openings/1/edges/0/1?from_frame=0"
    with serving(with_tls(folder / "a"), taker=fail) as address:
        taken, _ = upgrade(transport, address, target, EDGE_PROTOCOL, SECONDS)
        with taken:
            taken.settimeout(SECONDS)
            assert taken.recv(1) == b""
            (plain,) = given
            wait_until(lambda: plain.fileno() == -1, "the plain end to be closed", SECONDS)
    transport.close()
    (told,) = (each for each in caplog.records if each.levelname == "ERROR")
    assert "could not take its connection" in told.getMessage()


def test_a_handshake_that_trickles_has_the_same_deadline(folder: Path) -> None:
    limits = ConnectionLimits(greeting_seconds=0.5)
    with serving(with_tls(folder / "a"), limits) as address:
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), SECONDS) as sock:
            sock.sendall(b"\x16\x03\x01\x01\x00")
            began = monotonic()
            try:
                while monotonic() - began < SECONDS:
                    sock.sendall(b"\0")
                    sock.settimeout(0.05)
                    try:
                        if not sock.recv(100):
                            break
                    except TimeoutError:
                        continue
            except OSError:
                pass
            assert monotonic() - began < SECONDS


@pytest.mark.parametrize(
    "scrap", [b"\x16\x03\x01\xff\xff" + bytes(70_000), b"\0" * 1000, b"\x15\x03\x01\0\2\2\0"]
)
def test_scrap_instead_of_a_handshake_ends_its_connection_alone(folder: Path, scrap: bytes) -> None:
    with serving(with_tls(folder / "a")) as address:
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), SECONDS) as sock:
            try:
                sock.sendall(scrap)
                while sock.recv(1000):
                    continue
            except ConnectionError:
                pass
        probe(with_tls(folder / "b"), address)


def test_a_connection_is_encrypted(folder: Path) -> None:
    """Seen from between: neither the token nor the path is in what goes over the wire."""
    seen = bytearray()
    with serving(with_tls(folder / "a", TOKEN)) as address:
        host, port = address.split(":")
        with socket.create_server(("127.0.0.1", 0)) as between:
            pump = _Between(between, (host, int(port)), seen)
            pump.start()
            probe(with_tls(folder / "b", TOKEN), f"127.0.0.1:{between.getsockname()[1]}")
            pump.join(SECONDS)
    assert len(seen) > 500
    assert TOKEN.encode() not in seen
    assert b"probe" not in seen
