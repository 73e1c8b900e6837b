"""``allfold doctor`` and the certificates of https URLs."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from allfold.cli._doctor.findings import CheckFinding, Level
from allfold.cli._doctor.services import check_certificates
from allfold_service.tls import TlsIdentity
from tests.support.authorities import let_authority_end
from tests.support.credentials import certificates
from tests.support.require import requires


class Quiet(BaseHTTPRequestHandler):
    """A handler that has nothing to say to anybody."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(folder: Path, days: int) -> Iterator[tuple[str, Path]]:
    """The URL of something that speaks TLS, and its certificate, which is valid for some days."""
    requires("openssl")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", str(days),
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with speaking(context) as url:
        yield url, certificate


@contextmanager
def speaking(context: ssl.SSLContext) -> Iterator[str]:
    """The URL of something that speaks TLS."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        # Shakes hands in the handler's thread; whoever breaks that off is no failure of the server.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"https://localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def checked(url: str) -> CheckFinding:
    (finding,) = check_certificates([url])
    return finding


def test_without_https_it_is_said_that_nothing_is_encrypted() -> None:
    finding = checked("http://10.0.0.1:7400")
    assert finding.level == Level.OK
    assert "unencrypted" in finding.found


@pytest.mark.parametrize(
    ("days", "level", "text"),
    [(100, Level.OK, "valid for 100 days"), (5, Level.WARN, "expires in 5 days")],
)
def test_a_certificate_that_is_trusted_is_valid_until_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, level: Level, text: str
) -> None:
    with serving(tmp_path, days) as (url, certificate):
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        finding = checked(url)
    assert finding.level == level, finding
    assert text in finding.found


def test_an_authority_that_ends_before_its_certificate_is_to_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates(tmp_path, "a")
    let_authority_end(tmp_path, 5)
    monkeypatch.setenv("ALLFOLD_TLS_DIR", str(tmp_path / "a"))
    with speaking(TlsIdentity(str(tmp_path / "a")).server) as url:
        finding = checked(url)
    assert finding.level == Level.WARN, finding
    assert "authority expires in 5 days" in finding.found
    assert "change the authority" in finding.advice


def test_a_certificate_that_nobody_vouches_for_fails(tmp_path: Path) -> None:
    with serving(tmp_path, 100) as (url, _):
        finding = checked(url)
    assert finding.level == Level.FAIL
    assert "self-signed certificate" in finding.found
    assert "SSL_CERT_FILE" in finding.advice


def test_a_service_that_speaks_http_is_told_from_a_bad_certificate() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        finding = checked(f"https://127.0.0.1:{server.server_port}")
        thread.join()
    assert finding.level == Level.FAIL
    assert "write http://" in finding.advice
