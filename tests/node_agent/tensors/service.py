"""A data port and an HTTP client of it, and raw requests."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np

from allfold_agent.data_port import DataPort
from allfold_agent.tensors.store import TensorStore

MIB = 1 << 20
SIX = np.arange(6, dtype=np.float32).tobytes()
SIX_TARGET = "/v1/tensors/six?dtype=float32&shape=2,3"


class Service:
    """A data port, its store, and an httpx client for it."""

    def __init__(self, store: TensorStore, **options: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.place = listener.getsockname()
        self.url = f"http://127.0.0.1:{self.place[1]}"
        self.store = store
        options = {"token": None, "open_edge": lambda _: socket.socket.close} | options
        self.server = DataPort(listener, tensors=store, **options)
        self.server.start()
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=20)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.place, timeout=10)

    def close(self) -> None:
        self.http.close()
        self.server.close()


@contextmanager
def serving(store: TensorStore | None = None, **options: Any) -> Iterator[Service]:
    service = Service(TensorStore() if store is None else store, **options)
    try:
        yield service
    finally:
        service.close()


def expose(service: Service, tensor_id: str, data: bytes, **options: Any) -> None:
    service.store.expose(tensor_id, data, "uint8", (len(data),), **options)


def error_of(response: httpx.Response) -> str:
    assert response.headers["content-type"] == "application/json"
    return str(response.json()["error"]["message"])


def fetch(url: str) -> httpx.Response:
    return httpx.get(url, trust_env=False, timeout=20)


def raw_put(tensor_id: str, size: int, *headers: str) -> bytes:
    lines = [
        f"PUT /v1/tensors/{tensor_id}?dtype=uint8&shape={size} HTTP/1.1",
        "Host: a",
        f"Content-Length: {size}",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def read_head(sock: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = sock.recv(1)
        assert byte, head
        head += byte
    return head


def reset(sock: socket.socket) -> None:
    """Reset a connection, as the kernel does for a process that is killed with bytes unread."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
