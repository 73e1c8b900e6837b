"""The health check of the images, as probes run it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.deploy.manifests import ROOT

READY = ROOT / "deploy" / "docker" / "ready.py"


class Service(BaseHTTPRequestHandler):
    """One that is alive and not ready."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 503)
        self.end_headers()
        self.wfile.write(b"it is asked for " + self.path.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def listen() -> Iterator[str]:
    """The address of the service."""
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"0.0.0.0:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "status", "path"),
    [((), 1, "/readyz"), (("/readyz",), 1, "/readyz"), (("/healthz",), 0, "/healthz")],
)
def test_a_probe_asks_for_its_path(
    listen: str, arguments: tuple[str, ...], status: int, path: str
) -> None:
    """A service that is not ready, because Redis is away, must not be killed for it."""
    done = subprocess.run(
        [sys.executable, "-IS", str(READY), "ALLFOLD_LISTEN", *arguments],
        env={"ALLFOLD_LISTEN": listen},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert done.stdout.strip() == f"it is asked for {path}"
