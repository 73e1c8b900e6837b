"""Tensors between two agents: straight into memory, resumed when broken, checked at the end."""

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Thread

import numpy as np
import pytest
import torch
from tests.support.waiting import wait_until

from allfold_agent import tensor_client
from allfold_agent.data_server import DataServer
from allfold_agent.tensor_client import delete, download, upload
from allfold_agent.tensor_spec import digest_header
from allfold_agent.tensor_store import TensorStore
from allfold_core.errors import (
    ArenaExhausted,
    InvalidArgument,
    LocalError,
    PeerError,
    PeerLost,
    PeerMissing,
    PeerSentIncoherentTensor,
    ServiceError,
)

MIB = 1 << 20
TOKEN = "token"


class Source:
    """An agent's data port."""

    def __init__(self, store: TensorStore, token: str | None) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.store = store
        self.server = DataServer(
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


@pytest.fixture
def source() -> Iterator[Source]:
    with serving() as source:
        yield source


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


LABELS = [
    "float32", "float64", "float16", "bfloat16", "int8",
    "int16", "int32", "int64", "uint8", "bool",
]  # fmt: skip


@pytest.mark.parametrize("dtype", LABELS)
@pytest.mark.parametrize("shape", [(2, 3), (), (0,), (2, 0, 3)])
def test_a_tensor_comes_back_as_it_was(source: Source, dtype: str, shape: tuple[int, ...]) -> None:
    original = torch.arange(6).to(getattr(torch, dtype))[: max(1, len(shape) * 3)]
    original = original.reshape(shape) if len(shape) == 2 else original[0].expand(shape).clone()
    raw = original.reshape(-1).view(torch.uint8).numpy() if original.numel() else b""
    upload(source.address, "a", raw, dtype, shape)
    tensor = download(source.address, "a", expect=(dtype, shape))
    assert (tensor.dtype, tensor.shape) == (dtype, shape)
    assert torch.equal(tensor.torch(), original)
    if dtype == "bfloat16":
        assert tensor.numpy().dtype == np.uint16
    else:
        assert np.array_equal(tensor.numpy(), original.numpy())
    assert tensor.numpy().shape == shape


def test_arrays_share_the_memory_of_the_download(source: Source) -> None:
    upload(source.address, "a", np.ones(4, np.float32), "float32", (4,))
    tensor = download(source.address, "a")
    tensor.torch()[0] = 5
    assert tensor.numpy()[0] == 5


def test_a_download_goes_straight_into_the_memory_it_is_given(source: Source) -> None:
    upload(source.address, "a", np.arange(4, dtype=np.float32), "float32", (4,))
    memory = np.zeros(4, np.float32)
    tensor = download(source.address, "a", into=memory.data)
    assert memory.tolist() == [0, 1, 2, 3]
    assert np.shares_memory(tensor.numpy(), memory)


def test_memory_of_another_size_is_a_mistake_before_anything_is_asked() -> None:
    with pytest.raises(InvalidArgument, match="16 bytes"):
        download("127.0.0.1:1", "a", into=memoryview(bytearray(12)), expect=("float32", (4,)))
    with pytest.raises(InvalidArgument, match="read-only"):
        download("127.0.0.1:1", "a", into=memoryview(bytes(16)))


@pytest.mark.parametrize(
    "expect", [("float64", (2,)), ("float32", (2, 2)), ("float32", (5,)), ("int32", (4,))]
)
def test_another_dtype_or_shape_than_expected_names_both(
    source: Source, expect: tuple[str, tuple[int, ...]]
) -> None:
    upload(source.address, "a", np.zeros(4, np.float32), "float32", (4,))
    with pytest.raises(PeerSentIncoherentTensor, match=r"float32\[4\]") as caught:
        download(source.address, "a", expect=expect)
    assert caught.value.details["expected"].startswith(expect[0])
    assert caught.value.details["got"] == "float32[4]"


def test_a_tensor_larger_than_the_memory_for_it_is_not_received(source: Source) -> None:
    upload(source.address, "a", bytes(8), "uint8", (8,), max_downloads=1)
    with pytest.raises(PeerSentIncoherentTensor, match="expected 4 bytes"):
        download(source.address, "a", into=memoryview(bytearray(4)))
    with pytest.raises(PeerSentIncoherentTensor, match="7 bytes at most"):
        download(source.address, "a", max_bytes=7, timeout=10)


def test_a_tensor_that_was_refused_or_damaged_does_not_count_as_downloaded(source: Source) -> None:
    expose_bytes(source, b"abc", max_downloads=1)
    source.store.get("a")._digest = bytes(32)
    for _ in range(5):
        with pytest.raises(PeerSentIncoherentTensor, match="expected int8"):
            download(source.address, "a", expect=("int8", (3,)), timeout=10)
        with pytest.raises(PeerSentIncoherentTensor, match="digest"):
            download(source.address, "a", timeout=10)
    assert len(source.store) == 1


def test_a_download_waits_until_the_tensor_is_exposed(source: Source) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(download, source.address, "a", timeout=20)
        time.sleep(0.05)
        expose_bytes(source, b"late")
        assert bytes(waiting.result(5).data) == b"late"


def test_a_tensor_that_never_comes_names_peer_and_id(source: Source) -> None:
    began = time.monotonic()
    with pytest.raises(PeerMissing, match="s1:op-2") as caught:
        download(source.address, "s1:op-2", timeout=0.3)
    assert 0.2 < time.monotonic() - began < 2
    assert source.address in str(caught.value)
    assert caught.value.details == {"address": source.address, "tensor": "s1:op-2"}


@pytest.mark.parametrize("call", [download, delete])
def test_an_agent_that_is_not_there_is_lost(call: Callable[..., object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(PeerLost, match=address):
        call(address, "a", timeout=5)
    with pytest.raises(PeerLost, match=address):
        upload(address, "a", b"x", "uint8", (1,), timeout=5)


def test_a_host_without_address_is_lost() -> None:
    with pytest.raises(PeerLost, match="nowhere"):
        download("nowhere.invalid:1", "a", timeout=5)


def test_an_agent_that_hangs_is_missing_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for call in (download, delete):
            with pytest.raises(PeerMissing, match=address):
                call(address, "a", timeout=0.2)
        for size in (1, 2 * MIB):
            with pytest.raises(PeerMissing, match=address):
                upload(address, "a", bytes(size), "uint8", (size,), timeout=0.2)


def test_a_broken_download_goes_on_where_it_was(source: Source) -> None:
    data = os.urandom(MIB) * 5
    expose_bytes(source, data, max_downloads=1)
    with cutting(source.address, 2 * MIB, MIB, 500) as cutter:
        tensor = download(cutter.address, "a", timeout=20)
        assert bytes(tensor.data) == data
    assert b"range" not in cutter.requests[0].lower()
    starts = [request.split(b"bytes=")[1].split(b"-")[0] for request in cutter.requests[1:]]
    assert [int(start) // MIB for start in starts[:2]] == [1, 2]
    wait_until_empty(source.store)  # it counted once, and was the last


def test_a_connection_that_breaks_again_and_again_ends_with_the_timeout(source: Source) -> None:
    expose_bytes(source, bytes(MIB))
    with cutting(source.address, *[600] * 1000) as cutter:
        with pytest.raises(PeerMissing, match=r"of 1048576 bytes came") as caught:
            download(cutter.address, "a", timeout=0.6)
        assert len(cutter.requests) < 15  # it does not hammer the source
    assert caught.value.__cause__ is not None


def test_a_source_that_dies_during_a_download_is_lost(source: Source) -> None:
    expose_bytes(source, bytes(4 * MIB))
    cutter = Cutter(source.address, [MIB])
    address = cutter.address

    def die_after_the_first_cut() -> None:
        wait_until(lambda: cutter.requests, "a request has come")
        cutter.close()

    with ThreadPoolExecutor(1) as pool:
        dying = pool.submit(die_after_the_first_cut)
        with pytest.raises(PeerLost, match=address):
            download(address, "a", timeout=20)
        dying.result(5)


def test_a_body_that_pauses_too_long_is_fetched_from_where_it_was(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_client, "STALL", 0.2)
    expose_bytes(source, b"0123456789")
    head = response(b"", "X-Allfold-Dtype: uint8", "X-Allfold-Shape: 10", 'ETag: "x"')
    head = head.replace(b"Length: 0", b"Length: 10").replace(
        b"\r\n\r\n", f"\r\n{digest_of(b'0123456789')}\r\n\r\n".encode()
    )
    rest = response(
        b"56789", "X-Allfold-Dtype: uint8", "X-Allfold-Shape: 10", digest_of(b"0123456789"),
        "Content-Range: bytes 5-9/10", status="206 Partial",
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        waiting = pool.submit(download, address, "a", timeout=10)
        first, _ = listener.accept()
        with first:
            first.recv(65536)
            first.sendall(head + b"01234")
            second, _ = listener.accept()  # while the first is open, but silent
            with second:
                assert b"bytes=5-" in second.recv(65536)
                second.sendall(rest)
                assert bytes(waiting.result(5).data) == b"0123456789"


@pytest.mark.parametrize("size", [2 * MIB, 4 * MIB])
def test_a_tensor_that_was_replaced_meanwhile_is_downloaded_anew(source: Source, size: int) -> None:
    new = os.urandom(size)
    expose_bytes(source, bytes(3 * MIB))
    with cutting(source.address, 2 * MIB + MIB // 2) as cutter:
        relay = cutter._relay

        def replace(client: socket.socket, budget: int) -> None:
            if len(cutter.requests) == 1:
                source.store.delete("a")
                expose_bytes(source, new)
            relay(client, budget)

        cutter._relay = replace  # type: ignore[method-assign]
        assert bytes(download(cutter.address, "a", timeout=20).data) == new


GOOD = ["X-Allfold-Dtype: uint8", "X-Allfold-Shape: 3", digest_of(b"abc")]


def test_the_answers_below_are_good_but_for_one_thing() -> None:
    with answering(response(b"abc", *GOOD)) as address:
        assert bytes(download(address, "a").data) == b"abc"


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (response(b"abd", *GOOD), "digest"),
        (response(b"abcd", *GOOD), "4 bytes"),
        (response(b"ab", *GOOD), "2 bytes"),
        (response(b"abc", *GOOD[:2]), "Repr-Digest"),
        (response(b"abc", *GOOD[1:]), "headers"),
        (response(b"abc", "X-Allfold-Dtype: uint9", *GOOD[1:]), "uint9"),
        (response(b"abc", "X-Allfold-Dtype: int32", *GOOD[1:]), "12 bytes"),
        (response(b"abc", *GOOD).replace(b"3\r\nX", b"3\r\nConnection: close\r\nX") + b"d", "more"),
        (response(b"abc", *GOOD, status="206 Part"), "range"),
        (response(b"abc", *GOOD, "Content-Range: bytes 1-2/3", status="206 Part"), "from 0"),
    ],
)
def test_bytes_that_do_not_fit_their_description_are_incoherent(answer: bytes, named: str) -> None:
    with answering(answer) as address:
        with pytest.raises(PeerSentIncoherentTensor, match=named) as caught:
            download(address, "a", timeout=5)
        assert address in str(caught.value.details)


def test_a_size_beyond_all_memory_is_refused_before_memory_is_taken() -> None:
    size = 1 << 50
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nX-Allfold-Dtype: uint8\r\n"
    answer = f"{head}X-Allfold-Shape: {size}\r\n{GOOD[2]}\r\n\r\n".encode()
    with answering(answer) as address, pytest.raises(PeerSentIncoherentTensor, match="at most"):
        download(address, "a", timeout=5)


def test_an_answer_of_another_server_is_named_as_such() -> None:
    for call in (download, delete):
        with answering(response(b"hello")) as address, pytest.raises(PeerError):
            call(address, "a", timeout=5)
        with (
            answering(response(b"hello", status="404 Not Found")) as address,
            pytest.raises(PeerError, match=f"{address} answered 404"),
        ):
            call(address, "a", timeout=5)


def test_a_busy_agent_says_so_at_once() -> None:
    error = b'{"error": {"code": "AF400", "message": "busy"}}'
    with (
        answering(response(error, status="503 Busy")) as address,
        pytest.raises(ServiceError, match="busy"),
    ):
        download(address, "a", timeout=20)


def test_eight_downloads_at_once_are_eight_whole_tensors(source: Source) -> None:
    data = os.urandom(MIB) * 4
    expose_bytes(source, data, max_downloads=8)
    with ThreadPoolExecutor(8) as pool:
        tensors = pool.map(lambda _: download(source.address, "a", timeout=30), range(8))
        assert all(bytes(tensor.data) == data for tensor in tensors)
    wait_until_empty(source.store)


def test_more_downloads_than_allowed_are_missing(source: Source) -> None:
    upload(source.address, "a", b"x", "uint8", (1,), max_downloads=1)
    download(source.address, "a")
    with pytest.raises(PeerMissing):
        download(source.address, "a", timeout=0.2)


@pytest.mark.parametrize("size", [0, 10, 3 * MIB])
@pytest.mark.parametrize("digest", [True, False])
def test_an_upload_arrives(source: Source, size: int, digest: bool) -> None:
    data = os.urandom(size)
    upload(source.address, "a", data, "uint8", (size,), digest=digest, ttl=9.5)
    assert bytes(source.store.get("a").view) == data


@pytest.mark.parametrize("size", [10, 8 * MIB])
def test_a_second_upload_of_an_id_is_a_conflict(source: Source, size: int) -> None:
    upload(source.address, "a", b"x", "uint8", (1,))
    with pytest.raises(LocalError, match="already") as caught:
        upload(source.address, "a", bytes(size), "uint8", (size,))
    assert caught.value.details["http_status"] == 409


def test_an_upload_that_finds_no_room_is_told_so() -> None:
    with serving(TensorStore(max_bytes=4 * MIB)) as source:
        with pytest.raises(ArenaExhausted, match="limit"):
            upload(source.address, "a", bytes(8 * MIB), "uint8", (8 * MIB,))
        upload(source.address, "a", b"x", "uint8", (1,))


def test_an_upload_of_another_size_than_its_shape_is_not_sent() -> None:
    with pytest.raises(InvalidArgument, match="8 bytes, its memory 3"):
        upload("127.0.0.1:1", "a", b"abc", "float32", (2,))


def test_an_agent_that_breaks_an_upload_is_lost() -> None:
    for size in (1, 2 * MIB):
        with answering(b"") as address, pytest.raises(PeerLost, match=address):
            upload(address, "a", bytes(size), "uint8", (size,), timeout=5)


def test_delete_says_whether_there_was_something(source: Source) -> None:
    upload(source.address, "a", b"x", "uint8", (1,))
    assert delete(source.address, "a")
    assert not delete(source.address, "a")


def test_each_call_needs_the_token() -> None:
    with serving(token=TOKEN) as source:
        upload(source.address, "a", b"x", "uint8", (1,), token=TOKEN)
        assert bytes(download(source.address, "a", token=TOKEN).data) == b"x"
        for token in (None, "wrong"):
            with pytest.raises(LocalError, match="token"):
                download(source.address, "a", token=token)
            with pytest.raises(LocalError, match="token"):
                upload(source.address, "b", b"x", "uint8", (1,), token=token)
            with pytest.raises(LocalError, match="token"):
                delete(source.address, "a", token=token)
        assert delete(source.address, "a", token=TOKEN)


@pytest.mark.parametrize("tensor_id", ["", "a/b", "a?b", ".."])
def test_an_id_that_cannot_be_is_refused_before_anything_is_sent(tensor_id: str) -> None:
    for call in (download, delete):
        with pytest.raises(InvalidArgument, match="tensor id"):
            call("127.0.0.1:1", tensor_id)
    with pytest.raises(InvalidArgument, match="tensor id"):
        upload("127.0.0.1:1", tensor_id, b"", "uint8", (0,))


@pytest.mark.slow
def test_a_tensor_over_512_mib_is_uploaded_and_downloaded(source: Source) -> None:
    size = 600 * MIB
    data = np.arange(size // 8, dtype=np.int64)
    upload(source.address, "a", data, "int64", data.shape, max_downloads=1, timeout=100)
    tensor = download(source.address, "a", timeout=100)
    assert np.array_equal(tensor.numpy(), data)
    wait_until_empty(source.store)
