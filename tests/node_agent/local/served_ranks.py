"""A local server of an agent, with a reactor of its own, and processes that connect to it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

from allfold_agent.gpu.completions import FencePoller
from allfold_agent.gpu.gpus import Gpus
from allfold_agent.local.memberships import Registrar
from allfold_agent.local.server import LocalServer
from allfold_agent.local.state_transfers import StateTransfers
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.threads import WorkerPool
from allfold_agent.tensors.offers import Offers
from allfold_core.protocol.rank_messages import MAX_MESSAGE, PROTOCOL_VERSION, Message, pack_json
from tests.support.credentials import transport


def empty_registrar() -> Any:
    """A registrar that knows of no group."""
    registrar = create_autospec(Registrar, instance=True)
    registrar.groups.return_value = []
    return registrar


@contextmanager
def serving(folder: Path, registrar: Any) -> Iterator[tuple[LocalServer, Reactor]]:
    """A server that listens in a folder, and its reactor."""
    reactor, poller = Reactor("test"), FencePoller("test")
    server = LocalServer(
        str(folder / "agent.sock"),
        registrar,
        {"node": "test"},
        reactor=reactor,
        workers=create_autospec(WorkerPool, instance=True),
        poller=poller,
        gpus=Gpus(False, poller),
        transfers=StateTransfers(Offers(), transport()),
    )
    reactor.start()
    try:
        yield server, reactor
    finally:
        reactor.close()
        server.close()
        poller.close()


@contextmanager
def greeted(folder: Path) -> Iterator[socket.socket]:
    """The connection of a process that the server in a folder has greeted."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.settimeout(10.0)
        rank.connect(str(folder / "agent.sock"))
        rank.send(pack_json(Message.HELLO, {"protocol": PROTOCOL_VERSION, "pid": os.getpid()}))
        assert rank.recv(MAX_MESSAGE)[0] == Message.WELCOME
        yield rank
