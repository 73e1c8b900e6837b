"""A service that answers GETs as a test says, in place of an agent or an orchestrator."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

NO_NODES: dict[str, Any] = {"/v1/nodes": {"nodes": []}, "/v1/groups": {"groups": []}}
_NOT_FOUND = {"error": {"code": "AF100", "message": "Not Found", "details": {}}}


@contextmanager
def service(answers: Mapping[str, Any]) -> Iterator[str]:
    """The URL of something that answers these paths, and 404 to others.

    Args:
        answers: by path, without the query; of another status than 200 a pair with that. They may
            change while it serves.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0], (404, _NOT_FOUND))
            status, body = found if isinstance(found, tuple) else (200, found)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()
