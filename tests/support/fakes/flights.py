"""Agents over HTTP that have a flight recorder and nothing else, with clocks of their own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]


def op(
    seq: int,
    start: float,
    arrivals: Mapping[int, float],
    *,
    seconds: float = 0.01,
    missing: Sequence[int] = (),
    phases: Mapping[str, float] | None = None,
    heard: Mapping[str, float] | None = None,
    **other: Any,
) -> Any:
    """An op in the form of ``/v1/flight``: an all-reduce that is over, unless told otherwise.

    Args:
        start: on the clock of the test.
        phases: besides ``called`` and, with a state that is over, ``done``.
    """
    call = {
        "what": "all_reduce(sum, float32[1024])",
        "kind": "all_reduce",
        "reduce_op": "sum",
        "dtype": "float32",
        "shape": [1024],
        "numel": 1024,
        "bytes": 4096,
        "root": -1,
        "counts": [],
        "wire": "native",
    }
    state = other.pop("state", "completed")
    known = dict(phases or {})
    if not missing:
        known["called"] = max(arrivals.values())
    if state in ("completed", "failed"):
        known["done"] = seconds
    return {
        **call,
        "seq": seq,
        "epoch": 0,
        "world_size": 4,
        "strategy": "ring",
        "lane": "long",
        "state": state,
        "start": start,
        "started_at": 0.0,
        "seconds": seconds,
        "arrivals": {str(rank): after for rank, after in arrivals.items()},
        "missing": list(missing),
        "phases": known,
        "heard": dict(heard or {}),
        "error": "",
        "reason": "",
        "other_calls": {},
    } | other


def group(ops: Sequence[Json], ranks: Sequence[int], **other: Any) -> Any:
    """A group of two nodes in the form of ``/v1/flight``; ``ranks`` have called all of its ops."""
    last = max((each["seq"] for each in ops), default=-1)
    return {
        "name": "train",
        "opening": 1,
        "open": True,
        "epoch": 0,
        "world_size": 4,
        "nodes": ["a", "b"],
        "ranks": list(ranks),
        "last_seq": {str(rank): last for rank in ranks},
        "ops": list(ops),
    } | other


@contextmanager
def agent(
    node: str, *groups: Json, shift: float = 0.0, token: str = "", wall_shift: float = 0.0
) -> Iterator[str]:
    """An agent whose monotonic clock is ahead of ours by ``shift``; its URL."""

    def shifted(given: Json, limit: int) -> Json:
        ops = [each | {"start": each["start"] + shift} for each in given["ops"]]
        return given | {"ops": ops[-limit:]}

    def answer(path: str) -> Json | None:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        clock = {"monotonic": time.monotonic() + shift, "wall": time.time() + wall_shift}
        if parts.path == "/v1/clock":
            return {"node": node, "clock": clock}
        if parts.path != "/v1/flight":
            return None
        wanted = query.get("group")
        found = [
            shifted(each, int(query["limit"])) for each in groups if wanted in (None, each["name"])
        ]
        return {"node": node, "clock": clock, "groups": found}

    with served(answer, token) as url:
        yield url


@contextmanager
def served(answer: Any, token: str = "") -> Iterator[str]:
    """A service over HTTP/1.1, which keeps connections; its URL.

    Args:
        answer: from the path of a GET to the object that is answered; ``None`` is 404.
        token: other tokens are refused, as by an agent.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # one packet for head and body, or each answer waits for an ACK

        def do_GET(self) -> None:
            status, body = 200, answer(self.path)
            if token and self.headers["Authorization"] != f"Bearer {token}":
                status, body = 401, _error("this port needs the join token")
            elif body is None:
                status, body = 404, _error(f"GET {self.path}: Not Found")
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)


def _error(message: str) -> Json:
    return {"error": {"code": "AF100", "message": message, "details": {}}}
