"""The processes of a node that drains are told of it."""

from __future__ import annotations

from pathlib import Path

from allfold_core.wire.local_wire import MAX_MESSAGE, Message, unpack_json
from tests.node_agent.local.served_ranks import empty_registrar, greeted, serving


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
