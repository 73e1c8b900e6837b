"""Peers that do not keep to the protocol lose their connection, and nothing else happens."""

from __future__ import annotations

import socket

import pytest

from allfold_agent.http.client import upgrade
from allfold_agent.membership import links
from allfold_agent.membership.link_dialling import LinkRequest
from allfold_core.errors import AllfoldError
from allfold_core.protocol.peer_link import LINK_PROTOCOL, Chosen, Hello, LinkReader, Ping
from tests.node_agent.data_ports import serving
from tests.node_agent.membership.link_nodes import (
    SECONDS,
    TOKEN,
    Node,
    Stranger,
    link,
    message,
    nodes,
)
from tests.support.credentials import transport

ME = Hello("m", "life-1")
GRANTED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: allfold-link/1\r\n\r\n"
)
EARLIER, LATER = Hello("a", "life-x").pack(), Hello("z", "life-x").pack()


def await_ping(stranger: Stranger) -> None:
    while not isinstance(stranger.hear(), Ping):
        pass


def test_both_ends_say_hello_and_the_earlier_name_chooses() -> None:
    with nodes("m") as (m,):
        with Stranger(m) as later:
            assert later.hear() == ME
            later.say(LATER)
            assert later.hear() == Chosen(1)
            await_ping(later)
        with Stranger(m) as earlier:
            assert earlier.hear() == ME
            earlier.say(EARLIER)
            assert not m.in_reactor(lambda: m.links.is_up("a"))
            earlier.say(Chosen(7).pack())
            await_ping(earlier)


@pytest.mark.parametrize(
    "words",
    [
        [b"\0" * 64],
        [message(1)],
        [Chosen(1).pack()],
        [LATER, LATER],
        [LATER, Chosen(1).pack()],
        [EARLIER, message(1)],
        [message(1), EARLIER, Chosen(1).pack()],
        [Hello("m", "life-2").pack()],
    ],
    ids=[
        "damaged",
        "no HELLO",
        "a choice before HELLO",
        "two of them",
        "a choice that is not its own",
        "a message before the choice",
        "all after a message",
        "the name of the node itself",
    ],
)
def test_a_peer_that_says_what_it_may_not_is_cut_off(
    words: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_HANDSHAKE_SECONDS", 10 * SECONDS)
    with nodes("m") as (m,):
        with Stranger(m) as stranger:
            stranger.say(*words)
            assert stranger.hears_the_end()
        m.await_connections(0)
        assert m.heard.messages == []
        assert not any(map(m.knows, "amz"))


def test_an_older_choice_does_not_replace_a_newer_one() -> None:
    with nodes("m") as (m,), Stranger(m) as newer, Stranger(m) as older:
        newer.say(EARLIER, Chosen(2).pack())
        await_ping(newer)
        older.say(EARLIER, Chosen(1).pack())
        assert older.hears_the_end()
        await_ping(newer)


def test_the_newest_connection_of_a_later_name_is_chosen() -> None:
    with nodes("m") as (m,), Stranger(m) as first, Stranger(m) as second:
        first.say(LATER)
        await_ping(first)
        second.say(LATER)
        await_ping(second)
        assert first.hears_the_end()


def test_a_connection_that_is_not_chosen_in_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_HANDSHAKE_SECONDS", 0.01)
    with nodes("m") as (m,):
        for words in ([], [EARLIER]):
            with Stranger(m) as stranger:
                stranger.say(*words)
                assert stranger.hears_the_end()


def test_a_new_incarnation_takes_the_place_of_one_that_nobody_here_wants() -> None:
    with nodes("m") as (m,), Stranger(m) as former, Stranger(m) as present:
        former.say(LATER)
        await_ping(former)
        present.say(Hello("z", "life-y").pack())
        await_ping(present)
        assert former.hears_the_end()


def test_the_choices_of_a_new_incarnation_begin_anew() -> None:
    with nodes("m") as (m,), Stranger(m) as former, Stranger(m) as present:
        former.say(EARLIER, Chosen(7).pack())
        await_ping(former)
        present.say(Hello("a", "life-y").pack(), Chosen(1).pack())
        await_ping(present)
        assert former.hears_the_end()


def test_a_connection_that_this_end_has_dialled_gives_way_to_that_of_the_later_name() -> None:
    with nodes("m") as (m,), socket.create_server(("127.0.0.1", 0)) as address_of_z:
        address_of_z.settimeout(SECONDS)
        m.links.want("z", f"127.0.0.1:{address_of_z.getsockname()[1]}", "life-x")
        dialled, _ = address_of_z.accept()
        with dialled, Stranger(m) as later:
            dialled.settimeout(SECONDS)
            dialled.recv(65536)
            dialled.sendall(GRANTED)
            assert next(LinkReader().feed(dialled.recv(65536))) == ME
            later.say(LATER)
            await_ping(later)
            dialled.sendall(LATER)
            assert dialled.recv(65536) == b""
            await_ping(later)


def test_a_new_incarnation_does_not_end_a_link_that_lives() -> None:
    with nodes("m", "z") as (m, z):
        link(m, z)
        with Stranger(m) as another:
            another.say(Hello("z", "life-2").pack())
            assert another.hears_the_end()
        assert m.heard.events == [("up", "z", "life-1")]


def asked(node: Node, request: LinkRequest) -> int | None:
    """The status with which a data port refuses a link, ``None`` where it grants it."""
    try:
        upgrade(transport(TOKEN), node.address, request.target, LINK_PROTOCOL, SECONDS)[0].close()
    except AllfoldError as error:
        return int(error.details.get("http_status", error.status))
    return None


def test_a_link_is_granted_to_those_who_look_for_this_life_of_this_node() -> None:
    with nodes("größe&1") as (node,):
        assert asked(node, LinkRequest("größe&1")) is None
        assert asked(node, LinkRequest("größe&1", "life-1")) is None
        assert asked(node, LinkRequest("größe&1", "life-2")) == 409
        assert asked(node, LinkRequest("größe")) == 409
        assert asked(node, LinkRequest("")) == 400


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        ("/v1/link?node=m", [], 401),
        ("/v1/link?node=m", [f"Authorization: Bearer {TOKEN}"], 426),
        ("/v1/link?node=m&no=1", [f"Authorization: Bearer {TOKEN}"], 400),
    ],
)
def test_a_link_needs_the_token_and_the_protocol(
    target: str, headers: list[str], status: int
) -> None:
    lines = [f"GET {target} HTTP/1.1", "Host: m", "Connection: close", *headers, "", ""]
    with nodes("m") as (m,), socket.create_connection(("127.0.0.1", m.port), SECONDS) as raw:
        raw.sendall("\r\n".join(lines).encode())
        assert raw.recv(65536).split()[1] == str(status).encode()


def test_a_data_port_without_links_has_no_such_path() -> None:
    target = LinkRequest("m").target
    with serving() as port, pytest.raises(AllfoldError, match="/v1/link"):
        upgrade(transport(), port.address, target, LINK_PROTOCOL, SECONDS)
