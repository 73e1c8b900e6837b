"""Downloads that break, stall or bring something wrong: resumed if possible, else an error."""

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from allfold_agent.tensors import download as tensor_download
from allfold_agent.tensors.client import delete, upload
from allfold_agent.tensors.download import download
from allfold_core.errors import (
    PeerError,
    PeerLost,
    PeerMissing,
    PeerSentIncoherentTensor,
    ServiceError,
)
from tests.node_agent.tensors.source import (
    MIB,
    Cutter,
    Source,
    answering,
    cutting,
    digest_of,
    expose_bytes,
    response,
    wait_until_empty,
)
from tests.support.waiting import wait_until


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
    monkeypatch.setattr(tensor_download, "STALL", 0.2)
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
