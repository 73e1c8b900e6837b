"""Downloads from ``/v1/tensors``: waits, ranges, counts, and clients that leave."""

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from allfold_agent.http.connections import ConnectionLimits
from allfold_agent.tensors.spec import digest_header
from tests.node_agent.tensors.service import (
    MIB,
    SIX,
    SIX_TARGET,
    Service,
    error_of,
    expose,
    fetch,
    read_head,
    reset,
    serving,
)
from tests.support.waiting import wait_until


def test_a_get_before_the_put_waits_for_it(service: Service) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fetch, f"{service.url}/v1/tensors/six?wait=20")
        time.sleep(0.05)
        assert not waiting.done()
        service.http.put(SIX_TARGET, content=SIX)
        assert waiting.result(5).content == SIX


def test_a_wait_ends_without_a_tensor(service: Service) -> None:
    began = time.monotonic()
    got = service.http.get("/v1/tensors/a?wait=0.1")
    assert 0.1 <= time.monotonic() - began < 2
    assert got.status_code == 404
    assert "tensor a" in error_of(got)


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "x", ""])
def test_a_wait_is_a_number_of_seconds(service: Service, wait: str) -> None:
    assert service.http.get(f"/v1/tensors/a?wait={wait}").status_code == 400


def test_a_waiting_client_that_leaves_gives_its_connection_back() -> None:
    with serving(limits=ConnectionLimits(served=1)) as service:
        with service.connect() as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b" 404 " in sock.recv(65536)
            sock.sendall(b"GET /v1/tensors/a?wait=60 HTTP/1.1\r\nHost: a\r\n\r\n")
            assert service.http.get("/").status_code == 503, "the port is full"
        wait_until(lambda: service.http.get("/").status_code == 404, "there is room again")


def test_closing_the_port_ends_the_waits(service: Service) -> None:
    with service.connect() as sock:
        sock.sendall(b"GET /v1/tensors/a?wait=60 HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.05)
        began = time.monotonic()
        service.server.close()
        assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("span", "content_range", "body"),
    [
        ("bytes=2-4", "bytes 2-4/10", b"234"),
        ("bytes=7-", "bytes 7-9/10", b"789"),
        ("bytes=-2", "bytes 8-9/10", b"89"),
        ("bytes=0-99", "bytes 0-9/10", b"0123456789"),
    ],
)
def test_a_range_is_that_part(service: Service, span: str, content_range: str, body: bytes) -> None:
    expose(service, "a", b"0123456789")
    got = service.http.get("/v1/tensors/a", headers={"Range": span})
    assert (got.status_code, got.content) == (206, body)
    assert got.headers["content-range"] == content_range
    assert got.headers["x-allfold-shape"] == "10"
    # The digest of the whole is Repr-Digest; Content-Digest would be that of the part.
    assert got.headers["repr-digest"] == digest_header(hashlib.sha256(b"0123456789").digest())
    assert "content-digest" not in got.headers


def test_a_range_beyond_the_end_is_told_the_size(service: Service) -> None:
    expose(service, "a", b"0123456789")
    got = service.http.get("/v1/tensors/a", headers={"Range": "bytes=10-"})
    assert got.status_code == 416
    assert got.headers["content-range"] == "bytes */10"


def test_several_ranges_get_all_of_it(service: Service) -> None:
    expose(service, "a", b"0123456789")
    got = service.http.get("/v1/tensors/a", headers={"Range": "bytes=0-1,4-5"})
    assert (got.status_code, got.content) == (200, b"0123456789")


def test_a_range_of_another_tensor_than_before_gets_all_of_the_new_one(service: Service) -> None:
    expose(service, "a", b"0123456789")
    etag = service.http.head("/v1/tensors/a").headers["etag"]
    span = {"Range": "bytes=5-", "If-Range": etag}
    assert service.http.get("/v1/tensors/a", headers=span).content == b"56789"
    service.store.delete("a")
    expose(service, "a", b"abcdefghij")
    got = service.http.get("/v1/tensors/a", headers=span)
    assert (got.status_code, got.content) == (200, b"abcdefghij")


def test_only_the_range_that_holds_the_last_byte_counts_as_a_download(service: Service) -> None:
    expose(service, "a", b"0123456789", max_downloads=1)
    for span in ("bytes=0-4", "bytes=0-8", "bytes=0-0"):
        assert service.http.get("/v1/tensors/a", headers={"Range": span}).status_code == 206
    assert service.http.get("/v1/tensors/a", headers={"Range": "bytes=5-"}).content == b"56789"
    assert service.http.get("/v1/tensors/a").status_code == 404


@pytest.mark.parametrize("size", [3 * MIB, 40 * MIB])
@pytest.mark.parametrize("ending", [socket.socket.close, reset])
def test_a_client_that_dies_while_it_downloads_does_not_count(
    service: Service, size: int, ending: Callable[[socket.socket], None]
) -> None:
    data = os.urandom(MIB) * (size // MIB)
    expose(service, "a", data, max_downloads=1)
    for _ in range(3):
        with service.connect() as sock:
            sock.sendall(b"GET /v1/tensors/a HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b" 200 " in read_head(sock)
            sock.recv(1000)
            ending(sock)
    got = service.http.get("/v1/tensors/a")
    assert got.content == data
    assert service.http.get("/v1/tensors/a").status_code == 404


def test_a_client_that_does_not_read_is_given_up(service: Service) -> None:
    with serving(service.store, stall_timeout=0.3) as impatient:
        expose(impatient, "a", bytes(40 * MIB), max_downloads=1)
        with impatient.connect() as sock:
            sock.sendall(b"GET /v1/tensors/a HTTP/1.1\r\nHost: a\r\n\r\n")
            wait_until(
                lambda: impatient.http.get("/v1/tensors/a").status_code == 200,
                "the claim is given back",
            )


@pytest.mark.parametrize(("complete", "status"), [(False, 200), (True, 404)])
def test_a_client_waits_until_it_is_known_whether_another_has_got_the_last_download(
    service: Service, complete: bool, status: int
) -> None:
    expose(service, "a", SIX, max_downloads=1)
    with ThreadPoolExecutor(1) as pool:
        with service.store.reading(service.store.get("a"), counts=True) as other:
            waiting = pool.submit(fetch, f"{service.url}/v1/tensors/a")
            time.sleep(0.2)
            assert not waiting.done()
            other.complete = complete
        assert waiting.result(10).status_code == status


def test_eight_clients_download_at_once_and_the_ninth_finds_nothing(service: Service) -> None:
    data = os.urandom(MIB) * 4
    expose(service, "a", data, max_downloads=8)

    def one(_: int) -> bytes:
        return fetch(f"{service.url}/v1/tensors/a").content

    with ThreadPoolExecutor(8) as pool:
        assert all(content == data for content in pool.map(one, range(8)))
    assert service.http.get("/v1/tensors/a").status_code == 404


def test_more_clients_than_downloads_at_once_get_exactly_the_allowed_number(
    service: Service,
) -> None:
    expose(service, "a", bytes(MIB), max_downloads=3)

    def one(_: int) -> int:
        return fetch(f"{service.url}/v1/tensors/a?wait=0.5").status_code

    with ThreadPoolExecutor(8) as pool:
        codes = sorted(pool.map(one, range(8)))
    assert codes == [200] * 3 + [404] * 5


def test_deleting_a_tensor_lets_its_downloads_finish(service: Service) -> None:
    data = os.urandom(MIB) * 16
    expose(service, "a", data)
    with service.connect() as sock:
        sock.sendall(b"GET /v1/tensors/a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        read_head(sock)
        assert service.http.delete("/v1/tensors/a").status_code == 204
        assert service.store.nbytes == len(data)
        assert b"".join(iter(lambda: sock.recv(MIB), b"")) == data
    wait_until(lambda: service.store.nbytes == 0, "the store is empty")


def test_the_log_of_a_client_that_left_is_no_warning(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    expose(service, "a", bytes(40 * MIB))
    sock = service.connect()
    sock.sendall(b"GET /v1/tensors/a HTTP/1.1\r\nHost: a\r\n\r\n")
    read_head(sock)
    sock.close()
    wait_until(lambda: "broke" in caplog.text, "it is logged")
    assert all(record.levelno < logging.WARNING for record in caplog.records)
