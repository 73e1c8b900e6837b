"""The local server looks at the deadlines of all groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.node_agent.local.served_ranks import empty_registrar, serving
from tests.support.waiting import wait_until


def test_a_group_that_cannot_be_looked_at_keeps_no_other_from_its_deadlines(
    tmp_path: Path,
) -> None:
    def fail(_: float) -> None:
        raise ZeroDivisionError

    looked: list[float] = []
    registrar = empty_registrar()
    registrar.groups.return_value = [
        SimpleNamespace(waiting=False, deadlines=SimpleNamespace(check=check))
        for check in (fail, looked.append)
    ]
    with serving(tmp_path, registrar) as (server, reactor):
        reactor.call(server._check_deadlines)
        wait_until(lambda: looked, "the second group is looked at")
