"""The processes of a node that drains are told of it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import create_autospec

from allfold_agent.local.rank_connection import LocalMembership
from allfold_core.protocol.rank_messages import MAX_MESSAGE, Message, pack_json, unpack_json
from tests.node_agent.local.served_ranks import empty_registrar, greeted, serving
from tests.support.waiting import wait_until


def test_a_process_that_is_in_a_group_is_not_new_to_the_next_one(tmp_path: Path) -> None:
    registrar = empty_registrar()
    with serving(tmp_path, registrar) as (server, _), greeted(tmp_path) as rank:
        (process,) = server._listener.processes
        for number in range(2):
            rank.send(pack_json(Message.JOIN, {"request": number}))
            wait_until(lambda: registrar.join.call_count > number, "it has asked")  # noqa: B023
            process.memberships[number] = create_autospec(LocalMembership, instance=True)
    assert [call.kwargs["is_new"] for call in registrar.join.call_args_list] == [True, False]


def test_every_process_hears_that_its_node_drains(tmp_path: Path) -> None:
    with (
        serving(tmp_path, empty_registrar()) as (server, _),
        greeted(tmp_path) as one,
        greeted(tmp_path) as other,
    ):
        server.drain("node a drains")
        for rank in (one, other):
            message = rank.recv(MAX_MESSAGE)
            assert message[0] == Message.DRAIN
            assert unpack_json(message) == {"reason": "node a drains"}
