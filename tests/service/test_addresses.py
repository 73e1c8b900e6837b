"""The addresses that services listen on."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from allfold_core.errors import ServiceError
from allfold_service.addresses import bind, bound, default_socket
from tests.support.nodelay import sends_at_once

BOTH = [
    (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("::1", 0, 0, 0)),
    (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 0)),
]


def test_an_answer_on_a_kept_connection_does_not_wait_for_an_ack() -> None:
    assert sends_at_once(bind("127.0.0.1:0", "--control"))


def test_of_a_name_with_addresses_of_both_kinds_that_of_ipv4_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*BOTH])
    with bind("localhost:0", "--listen") as listener:
        assert bound(listener)[0] == "127.0.0.1"


def test_an_address_without_a_host_is_every_address_of_the_machine() -> None:
    with bind(":0", "--control") as listener:
        assert bound(listener)[0] == "0.0.0.0"


def test_a_socket_that_was_inherited_is_listened_on() -> None:
    given = socket.socket()
    given.bind(("127.0.0.1", 0))
    place = given.getsockname()
    with bind(f"fd://{given.detach()}", "--listen") as listener, socket.socket() as client:
        client.connect(place)
        assert bound(listener) == place
        assert not listener.get_inheritable()


@pytest.mark.parametrize("kind", ["nothing", "a file", "a socket of datagrams"])
def test_what_was_inherited_and_cannot_listen_is_an_error_that_names_the_setting(kind: str) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams, Path(os.devnull).open() as file:
        number = {"nothing": 999_999, "a file": file.fileno()}.get(kind, os.dup(datagrams.fileno()))
        with pytest.raises(ServiceError, match=rf"cannot listen on fd://{number}: .*--listen"):
            bind(f"fd://{number}", "--listen")


def test_a_name_that_leads_nowhere_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ServiceError, match="Choose another address with --listen or VARIABLE"):
        bind("no-such-host.invalid:0", "--listen or VARIABLE")


@pytest.mark.parametrize("runtime", ["there", "gone"])
def test_a_users_socket_is_in_a_folder_that_this_user_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    found = default_socket({"XDG_RUNTIME_DIR": f"{tmp_path}/{runtime}"})
    own = f"/tmp/allfold-{os.getuid()}"
    folder = f"{tmp_path}/there/allfold" if runtime == "there" else own
    assert found == f"{folder}/agent.sock"
    assert default_socket({}) == f"{own}/agent.sock"
