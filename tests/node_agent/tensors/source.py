"""A data port whose tensors tests download, and servers that break off or answer badly."""

import hashlib
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread

from allfold_agent.data_port import DataPort
from allfold_agent.tensors.spec import digest_header
from allfold_agent.tensors.store import TensorStore
from tests.support.waiting import wait_until

MIB = 1 << 20
TOKEN = "token"


class Source:
    """An agent's data port."""

    def __init__(self, store: TensorStore, token: str | None) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.store = store
        self.server = DataPort(
            listener, token=token, open_edge=lambda _: socket.socket.close, tensors=store
        )
        self.server.start()


@contextmanager
def serving(store: TensorStore | None = None, token: str | None = None) -> Iterator[Source]:
    source = Source(TensorStore() if store is None else store, token)
    try:
        yield source
    finally:
        source.server.close()


class Cutter:
    """A wire to a source that breaks: connection ``i`` after ``cuts[i]`` bytes to the client."""

    def __init__(self, target: str, cuts: Sequence[int]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.requests: list[bytes] = []
        self._target = target
        self._cuts = list(cuts)
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                with client:
                    self._relay(client, self._cuts.pop(0) if self._cuts else 1 << 62)

    def _relay(self, client: socket.socket, budget: int) -> None:
        host, port = self._target.split(":")
        with socket.create_connection((host, int(port))) as upstream, suppress(OSError):
            self.requests.append(client.recv(65536))
            upstream.sendall(self.requests[-1])
            while budget > 0 and (data := upstream.recv(min(budget, MIB))):
                budget -= len(data)
                client.sendall(data)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self.listener.close()


@contextmanager
def cutting(target: str, *cuts: int) -> Iterator[Cutter]:
    cutter = Cutter(target, cuts)
    try:
        yield cutter
    finally:
        cutter.close()


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """Something that answers its connections, one after another, with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with suppress(OSError):
                for answer in answers:
                    client, _ = listener.accept()
                    with client:
                        client.recv(65536)
                        client.sendall(answer)

        thread = Thread(target=run)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def response(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def digest_of(data: bytes) -> str:
    return f"Repr-Digest: {digest_header(hashlib.sha256(data).digest())}"


def expose_bytes(source: Source, data: bytes, tensor_id: str = "a", **options: int) -> None:
    source.store.expose(tensor_id, data, "uint8", (len(data),), **options)


def wait_until_empty(store: TensorStore) -> None:
    """A download counts a moment after its client has got it."""
    wait_until(lambda: not store.nbytes, "the store is empty")
