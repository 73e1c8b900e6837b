"""A reverse proxy under a path prefix, as stands in front of services in many clusters."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

SECONDS = 10.0


@contextmanager
def reverse_proxy(target: str, prefix: str, *, events: bool = True) -> Iterator[str]:
    """Serve ``target`` under ``prefix``; yield the URL of the page.

    Args:
        events: ``False`` refuses streams of events, as some gateways do.
    """
    host = urlsplit(target).netloc

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            path = self.path.removeprefix(prefix)
            if not events and "/events" in path:
                self.send_error(502)
                return
            self._pass_on(path)

        def _pass_on(self, path: str) -> None:
            connection = http.client.HTTPConnection(host, timeout=SECONDS)
            headers = {
                name: value for name, value in self.headers.items() if name.lower() != "host"
            }
            try:
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "date"):
                        self.send_header(name, value)
                self.end_headers()
                while piece := answer.read1(1 << 16):
                    self.wfile.write(piece)
                    self.wfile.flush()
            except (BrokenPipeError, ConnectionResetError):
                return  # the browser has closed the page
            finally:
                connection.close()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{prefix}/"
        finally:
            server.shutdown()
            serving.join()
            server.block_on_close = False
