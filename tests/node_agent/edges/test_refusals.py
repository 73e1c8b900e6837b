"""Edges that the data port refuses, and peers that do not answer as a data port does."""

import json

import pytest

from allfold_agent.edges.link_probe import PROBE_PROTOCOL, PROBE_TARGET
from allfold_agent.http.client import upgrade
from allfold_core.errors import (
    InvalidArgument,
    LocalError,
    PeerMissing,
    RegisterParamsMismatch,
)
from allfold_core.protocol.frames import EDGE_PROTOCOL
from tests.node_agent.data_ports import EDGE, RAW_EDGE, TOKEN, Port, get, serving
from tests.support.credentials import transport


def test_a_refused_edge_raises_the_refusal_at_the_peer(port: Port) -> None:
    port.refusal = RegisterParamsMismatch("epoch 3 is over", epoch=3)
    with pytest.raises(RegisterParamsMismatch, match="epoch 3 is over") as caught:
        upgrade(transport(), port.address, EDGE.target, EDGE_PROTOCOL, 5)
    assert caught.value.details == {"epoch": 3}


def test_a_refusal_that_is_also_an_os_error_is_still_the_refusal(port: Port) -> None:
    port.refusal = PeerMissing("nobody came")
    with pytest.raises(PeerMissing, match="nobody came"):
        upgrade(transport(), port.address, EDGE.target, EDGE_PROTOCOL, 5)


def test_a_bug_behind_the_port_is_logged_and_answered_without_its_text(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    port.refusal = KeyError("secret")
    status, _, body = port.say(RAW_EDGE.replace("Upgrade\r", "Upgrade, close\r", 1) + "\r\n")
    assert status == 500
    assert b"secret" not in body
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("/v1/groups/g/openings/-1/edges/a/b", "opening"),
        ("/v1/groups/g/openings/4294967296/edges/a/b", "opening"),
        ("/v1/groups/g/openings/0/edges//b", "src"),
        (f"/v1/groups/g/openings/0/edges/a/{'b' * 257}", "dst"),
        ("/v1/groups/g/openings/0/edges/a/b?from_frame=", "from_frame"),
        ("/v1/groups/g/openings/0/edges/a/b?from_frame=18446744073709551616", "from_frame"),
        ("/v1/groups/g/openings/0/edges/a/b?from_fram=1", "from_fram"),
        ("/v1/groups/g/openings/0/edges/a/b?incarnations=i", "incarnations"),
        ("/v1/groups/g/openings/0/edges/a/b?incarnations=i,j,k", "incarnations"),
        ("/v1/groups/g/openings/0/edges/a/a", "itself"),
        ("/v1/groups//openings/0/edges/a/b", "group"),
    ],
)
def test_bad_numbers_of_an_edge_are_named(port: Port, target: str, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        upgrade(transport(), port.address, target, EDGE_PROTOCOL, 5)


def test_an_edge_without_upgrade_is_told_to_upgrade(port: Port) -> None:
    status, head, body = port.say(get(EDGE.target))
    assert status == 426
    assert f"upgrade: {EDGE_PROTOCOL}" in head
    assert json.loads(body)["error"]["code"] == LocalError.code


def test_a_probe_without_upgrade_is_told_to_upgrade(port: Port) -> None:
    status, head, body = port.say(get(PROBE_TARGET))
    assert status == 426
    assert f"upgrade: {PROBE_PROTOCOL}" in head
    assert PROBE_PROTOCOL in json.loads(body)["error"]["message"]


def test_one_protocol_is_not_granted_where_another_one_is_spoken(port: Port) -> None:
    for target, protocol in ((PROBE_TARGET, EDGE_PROTOCOL), (EDGE.target, PROBE_PROTOCOL)):
        with pytest.raises(LocalError, match="needs Upgrade") as caught:
            upgrade(transport(), port.address, target, protocol, 5)
        assert caught.value.details["http_status"] == 426


def test_bytes_sent_before_an_edge_was_granted_are_refused(port: Port) -> None:
    assert port.say(RAW_EDGE + "\r\nacknowledgement")[0] == 400
    assert port.taken.empty()


@pytest.mark.parametrize("token", [None, "another", TOKEN + "x", TOKEN[:-1]])
def test_a_wrong_token_opens_nothing(token: str | None) -> None:
    with serving(token=TOKEN) as port:
        with pytest.raises(LocalError, match="token") as caught:
            upgrade(transport(token), port.address, EDGE.target, EDGE_PROTOCOL, 5)
        assert caught.value.details["http_status"] == 401
        assert port.taken.empty()


def test_without_the_token_nobody_learns_what_exists() -> None:
    with serving(token=TOKEN) as port:
        for path in ("/", "/v1/tensors/a", EDGE.target):
            status, head, _ = port.say(get(path))
            assert status == 401
            assert "www-authenticate: bearer" in head
