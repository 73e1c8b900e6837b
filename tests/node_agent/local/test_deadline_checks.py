"""The local server looks at the deadlines of all groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

from allfold_agent.gpu.fence_poller import FencePoller
from allfold_agent.gpu.gpus import Gpus
from allfold_agent.local.server import LocalServer, Registrar
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.workers import WorkerPool
from tests.support.waiting import wait_until


def test_a_group_that_cannot_be_looked_at_keeps_no_other_from_its_deadlines(
    tmp_path: Path,
) -> None:
    def fail(_: float) -> None:
        raise ZeroDivisionError

    looked: list[float] = []
    registrar: Any = create_autospec(Registrar, instance=True)
    registrar.groups.return_value = [
        SimpleNamespace(waiting=False, check_deadlines=check) for check in (fail, looked.append)
    ]
    reactor, poller = Reactor("test"), FencePoller("test")
    server = LocalServer(
        str(tmp_path / "agent.sock"),
        registrar,
        {"node": "test"},
        reactor=reactor,
        workers=create_autospec(WorkerPool, instance=True),
        poller=poller,
        gpus=Gpus(False, poller),
    )
    reactor.start()
    reactor.call(server._check_deadlines)
    try:
        wait_until(lambda: looked, "the second group is looked at")
    finally:
        reactor.close()
        server.close()
        poller.close()
