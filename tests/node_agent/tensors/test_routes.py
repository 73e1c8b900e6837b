"""Tensors put through ``/v1/tensors``, and the port around them: httpx, curl, raw bytes."""

import hashlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from allfold_agent.tensors.spec import digest_header
from allfold_agent.tensors.store import TensorStore
from tests.node_agent.tensors.service import (
    MIB,
    SIX,
    SIX_TARGET,
    Service,
    error_of,
    expose,
    raw_put,
    read_head,
    reset,
    serving,
)
from tests.support.require import requires
from tests.support.waiting import wait_until


def test_a_tensor_comes_out_as_it_was_put_in(service: Service) -> None:
    put = service.http.put(SIX_TARGET, content=SIX)
    assert put.status_code == 201
    assert put.headers["location"] == "/v1/tensors/six"
    got = service.http.get("/v1/tensors/six")
    digest = digest_header(hashlib.sha256(SIX).digest())
    assert (got.status_code, got.content) == (200, SIX)
    assert got.headers["x-allfold-dtype"] == "float32"
    assert got.headers["x-allfold-shape"] == "2,3"
    assert got.headers["accept-ranges"] == "bytes"
    assert got.headers["content-digest"] == got.headers["repr-digest"] == digest


def test_head_describes_a_tensor_and_is_no_download(service: Service) -> None:
    expose(service, "a", SIX, max_downloads=1)
    for _ in range(3):
        head = service.http.head("/v1/tensors/a")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == "24"
        assert head.headers["repr-digest"]
    assert service.http.get("/v1/tensors/a").content == SIX


def test_head_of_nothing_has_no_body(service: Service) -> None:
    assert service.http.head("/v1/tensors/a").status_code == 404
    assert service.http.get("/").status_code == 404  # the connection is still in order


@pytest.mark.parametrize("shape", ["0", "2,0,3"])
def test_a_tensor_of_no_bytes_is_put_and_downloaded(service: Service, shape: str) -> None:
    target = f"/v1/tensors/a?dtype=float32&shape={shape}&max_downloads=1"
    assert service.http.put(target, content=b"").status_code == 201
    got = service.http.get("/v1/tensors/a")
    assert (got.status_code, got.content) == (200, b"")
    assert got.headers["x-allfold-shape"] == shape
    assert service.http.get("/v1/tensors/a").status_code == 404


def test_a_scalar_is_put_with_an_empty_shape(service: Service) -> None:
    put = service.http.put("/v1/tensors/a?dtype=float64&shape=", content=bytes(8))
    assert put.status_code == 201
    assert service.http.get("/v1/tensors/a").headers["x-allfold-shape"] == ""


def test_an_id_is_exposed_once(service: Service) -> None:
    assert service.http.put(SIX_TARGET, content=SIX).status_code == 201
    second = service.http.put(SIX_TARGET, content=bytes(24))
    assert second.status_code == 409
    assert "already" in error_of(second)
    assert service.http.get("/v1/tensors/six").content == SIX


def test_a_deleted_tensor_is_gone_and_its_id_is_free(service: Service) -> None:
    service.http.put(SIX_TARGET, content=SIX)
    assert service.http.delete("/v1/tensors/six").status_code == 204
    assert service.http.delete("/v1/tensors/six").status_code == 404
    assert service.http.get("/v1/tensors/six").status_code == 404
    assert service.http.put(SIX_TARGET, content=SIX).status_code == 201


def test_a_tensor_is_gone_after_max_downloads(service: Service) -> None:
    service.http.put(SIX_TARGET + "&max_downloads=2", content=SIX)
    codes = [service.http.get("/v1/tensors/six").status_code for _ in range(4)]
    assert codes == [200, 200, 404, 404]
    assert service.store.nbytes == 0


def test_another_connection_cannot_overtake_the_count(service: Service) -> None:
    for number in range(3):
        expose(service, f"t{number}", SIX, max_downloads=1)
        assert service.http.get(f"/v1/tensors/t{number}").status_code == 200
        with httpx.Client(base_url=service.url, trust_env=False, timeout=20) as other:
            assert other.get(f"/v1/tensors/t{number}").status_code == 404


def test_a_client_that_says_nothing_more_has_downloaded_after_the_grace(service: Service) -> None:
    expose(service, "a", SIX, max_downloads=1)
    service.http.get("/v1/tensors/a")  # and keeps the connection without closing it
    wait_until(lambda: service.store.nbytes == 0, "the store is empty")


@pytest.mark.parametrize("max_downloads", ["0", "-1", "x", "1.5", "2147483648"])
def test_max_downloads_is_a_number_from_one(service: Service, max_downloads: str) -> None:
    put = service.http.put(f"{SIX_TARGET}&max_downloads={max_downloads}", content=SIX)
    assert put.status_code == 400
    assert "max_downloads" in error_of(put)
    assert service.store.nbytes == 0


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("", "dtype="),
        ("dtype=float32", "shape="),
        ("dtype=float31&shape=6", "float31"),
        ("dtype=float32&shape=6,", "shape"),
        ("dtype=float32&shape=7", "28 bytes"),
        ("dtype=float64&shape=6", "48 bytes"),
        ("dtype=float32&shape=6&ttl=0", "ttl"),
        ("dtype=float32&shape=6&ttl=-1", "ttl"),
        ("dtype=float32&shape=6&ttl=nan", "ttl"),
        ("dtype=float32&shape=6&max_download=1", "max_download"),
        ("dtype=float32&shape=6&shape=6", "twice"),
    ],
)
def test_a_put_that_cannot_be_meant_is_refused(service: Service, query: str, named: str) -> None:
    put = service.http.put(f"/v1/tensors/a?{query}", content=SIX)
    assert put.status_code == 400
    assert named in error_of(put)
    assert service.store.nbytes == 0


def test_an_id_with_other_characters_is_refused(service: Service) -> None:
    for tensor_id in ("a%2Fb", "a%20b", "%C3%A4", "a" * 257):
        assert service.http.get(f"/v1/tensors/{tensor_id}").status_code == 400


def test_a_body_of_unknown_length_is_refused(service: Service) -> None:
    put = service.http.put(SIX_TARGET, content=iter([SIX]))  # chunked
    assert put.status_code == 411
    with service.connect() as sock:
        sock.sendall(f"PUT {SIX_TARGET} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        assert b" 411 " in read_head(sock)


def test_a_chunked_body_is_not_taken_for_the_next_request(service: Service) -> None:
    hidden = b"DELETE /v1/tensors/a HTTP/1.1\r\nHost: a\r\n\r\n"
    expose(service, "a", SIX)
    with service.connect() as sock:
        head = f"PUT {SIX_TARGET} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        sock.sendall(head.encode() + hidden)
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    assert data.count(b"HTTP/1.1") == 1
    assert service.http.get("/v1/tensors/a").status_code == 200


@pytest.mark.parametrize("name", ["Content-Range", "Content-Encoding"])
def test_a_part_or_an_encoding_of_a_tensor_is_refused(service: Service, name: str) -> None:
    put = service.http.put(SIX_TARGET, content=SIX, headers={name: "bytes 0-23/24"})
    assert put.status_code == 400
    assert name.lower() in error_of(put)


def test_a_tensor_over_the_limit_is_refused_before_its_body_is_read() -> None:
    with serving(TensorStore(max_tensor_bytes=MIB)) as service, service.connect() as sock:
        sock.sendall(raw_put("a", MIB + 1, "Expect: 100-continue"))
        assert b" 413 " in read_head(sock)


def test_a_client_that_is_refused_can_finish_its_sentence_and_hear_why() -> None:
    with serving(TensorStore(max_tensor_bytes=MIB)) as service, service.connect() as sock:
        sock.sendall(raw_put("a", 2 * MIB))
        for _ in range(4):
            sock.sendall(bytes(MIB // 2))
            time.sleep(0.05)  # long enough for an answer, and for a reset after it
        assert b" 413 " in read_head(sock)


def test_what_does_not_fit_into_the_store_is_refused() -> None:
    with serving(TensorStore(max_bytes=100)) as service:
        expose(service, "a", bytes(80))
        put = service.http.put(SIX_TARGET, content=SIX)
        assert put.status_code == 507
        assert "limit of 100" in error_of(put)
        service.http.delete("/v1/tensors/a")
        assert service.http.put(SIX_TARGET, content=SIX).status_code == 201


def test_two_puts_in_one_packet_are_two_tensors(service: Service) -> None:
    with service.connect() as sock:
        sock.sendall(raw_put("a", 3) + b"aaa" + raw_put("b", 70_000) + b"b" * 70_000)
        assert b" 201 " in read_head(sock)
        assert b" 201 " in read_head(sock)
        sock.sendall(b"GET /v1/tensors/a HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 200 " in read_head(sock)
        assert sock.recv(100) == b"aaa"
    assert service.http.get("/v1/tensors/b").content == b"b" * 70_000


def test_a_body_that_comes_byte_by_byte_is_one_body(service: Service) -> None:
    with service.connect() as sock:
        for byte in raw_put("a", 5) + b"hello":
            sock.sendall(bytes([byte]))
        assert b" 201 " in read_head(sock)
    assert service.http.get("/v1/tensors/a").content == b"hello"


def test_a_client_that_asks_first_is_told_to_go_on_before_it_sends(service: Service) -> None:
    with service.connect() as sock:
        sock.sendall(raw_put("a", 3, "Expect: 100-continue"))
        assert b" 100 " in read_head(sock)
        sock.sendall(b"abc")
        assert b" 201 " in read_head(sock)


def test_a_good_digest_is_accepted_and_a_bad_one_exposes_nothing(service: Service) -> None:
    good = digest_header(hashlib.sha256(SIX).digest())
    bad = digest_header(hashlib.sha256(b"").digest())
    put = service.http.put(SIX_TARGET, content=SIX, headers={"Content-Digest": bad})
    assert put.status_code == 400
    assert good in error_of(put)
    assert bad in error_of(put)
    assert service.store.nbytes == 0
    put = service.http.put(SIX_TARGET, content=SIX, headers={"Content-Digest": good})
    assert put.status_code == 201


def test_a_digest_that_is_none_is_refused(service: Service) -> None:
    put = service.http.put(SIX_TARGET, content=SIX, headers={"Content-Digest": "sha-256=x"})
    assert put.status_code == 400


@pytest.mark.parametrize("ending", [socket.socket.close, reset])
def test_a_body_that_ends_early_exposes_nothing_and_is_logged(
    service: Service, caplog: pytest.LogCaptureFixture, ending: Callable[[socket.socket], None]
) -> None:
    sock = service.connect()
    sock.sendall(raw_put("a", 1000) + bytes(400))
    wait_until(lambda: service.store.nbytes == 1000, "memory is taken for the body")
    ending(sock)
    wait_until(lambda: service.store.nbytes == 0, "the store is empty")
    assert service.http.get("/v1/tensors/a").status_code == 404
    assert "tensor a broke off after 400 of 1000 bytes" in caplog.text
    assert service.http.put("/v1/tensors/a?dtype=uint8&shape=3", content=b"abc").status_code == 201


def test_a_body_that_stalls_is_given_up() -> None:
    with serving(stall_timeout=0.2) as service, service.connect() as sock:
        sock.sendall(raw_put("a", 1000) + bytes(400))
        assert sock.recv(1) == b""
        assert service.store.nbytes == 0


def test_a_method_that_is_not_there_is_told_what_is(service: Service) -> None:
    post = service.http.post("/v1/tensors/a", content=b"")
    assert post.status_code == 405
    assert post.headers["allow"] == "GET, HEAD, PUT, DELETE"


def test_a_get_with_a_body_does_not_confuse_the_connection(service: Service) -> None:
    expose(service, "a", SIX)
    hidden = b"DELETE /v1/tensors/a HTTP/1.1\r\nHost: a\r\n\r\n"
    head = f"GET /v1/tensors/a HTTP/1.1\r\nHost: a\r\nContent-Length: {len(hidden)}\r\n\r\n"
    with service.connect() as sock:
        sock.sendall(head.encode() + hidden)
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    assert data.endswith(SIX)
    assert len(service.store) == 1


def test_tensors_need_the_token() -> None:
    with serving(token="secret") as service:
        assert service.http.put(SIX_TARGET, content=SIX).status_code == 401
        assert service.http.put(SIX_TARGET, content=bytes(8 * MIB)).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert service.http.put(SIX_TARGET, content=SIX, headers=right).status_code == 201
        assert service.http.get("/v1/tensors/six").status_code == 401
        assert service.http.get("/v1/tensors/six", headers=right).content == SIX


def test_a_client_of_http_1_0_is_served_and_closed(service: Service) -> None:
    expose(service, "a", SIX)
    with service.connect() as sock:
        sock.sendall(b"GET /v1/tensors/a HTTP/1.0\r\n\r\n")
        assert b"".join(iter(lambda: sock.recv(65536), b"")).endswith(SIX)


def test_a_bug_in_a_route_is_answered_and_the_port_lives_on(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bool:
        raise KeyError("inner")

    monkeypatch.setattr(service.store, "delete", broken)
    assert service.http.delete("/v1/tensors/a").status_code == 500
    assert "KeyError: 'inner'" in caplog.text
    assert service.http.get("/v1/tensors/a").status_code == 404


def run_curl(*arguments: str) -> str:
    requires("curl")
    command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "20", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def test_curl_exposes_downloads_and_deletes(service: Service, tmp_path: Path) -> None:
    data = os.urandom(3 * MIB)  # large enough that curl asks for 100 Continue
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(data)
    url = f"{service.url}/v1/tensors/s1:op-1:state.0"
    status = ("--write-out", "%{http_code}", "--output")
    query = f"?dtype=uint8&shape={len(data)}"
    assert run_curl(*status, "-", "--upload-file", str(source), url + query) == "201"
    assert run_curl(*status, str(target), url) == "200"
    assert target.read_bytes() == data
    target.write_bytes(data[:MIB])
    assert run_curl(*status, str(target), "--continue-at", "-", url) == "206"
    assert target.read_bytes() == data
    assert run_curl(*status, "-", "--request", "DELETE", url) == "204"
    assert json.loads(run_curl(url))["error"]["code"] == "AF302"


def test_curl_is_told_why_a_large_upload_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(bytes(8 * MIB))
    with serving(TensorStore(max_tensor_bytes=MIB)) as service:
        url = f"{service.url}/v1/tensors/a?dtype=uint8&shape={8 * MIB}"
        for headers in ([], ["--header", "Expect:"]):
            answer = run_curl(*headers, "--upload-file", str(source), url)
            assert "limit is 1048576" in json.loads(answer)["error"]["message"]


def test_curl_asked_for_http_2_is_served_over_http_1_1(service: Service) -> None:
    expose(service, "a", b"plain")
    assert run_curl("--http2", f"{service.url}/v1/tensors/a") == "plain"
