"""Waiting for the running agents that ``allfold run --agent`` is to use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import click

from allfold._agent_socket import RETRY_SECONDS, connect, nobody_listens
from allfold_cluster.processes import wait_for
from allfold_cluster.signals import Interrupts
from allfold_core.group_options import checked_seconds

PATIENCE_SECONDS = 5.0
"""The time in which an agent must listen, unless ``ALLFOLD_INIT_TIMEOUT`` is set."""

_OR_ELSE = (
    "name another socket with --agent or ALLFOLD_SOCKET, or set neither: 'allfold run' then starts "
    "an agent itself"
)


def await_agents(sockets: Iterable[str], interrupts: Interrupts) -> None:
    """Return when an agent listens on every socket.

    Raises:
        AgentUnreachable: none listens in time on one of them, or it cannot be used.
        InvalidArgument: ``ALLFOLD_INIT_TIMEOUT`` is not a time limit.
        Interrupted: a signal came.
    """
    variable = "ALLFOLD_INIT_TIMEOUT"
    seconds = checked_seconds(variable, os.environ.get(variable) or PATIENCE_SECONDS)
    deadline = time.monotonic() + seconds
    for path in sockets:
        _await_agent(path, seconds, deadline, interrupts)


def _await_agent(path: str, seconds: float, deadline: float, interrupts: Interrupts) -> None:
    found = connect(path)
    if isinstance(found, str):
        click.echo(
            f"allfold: no node agent listens on {path} ({found}); waiting up to {seconds:g} s for "
            "it (ALLFOLD_INIT_TIMEOUT)",
            err=True,
        )
    while isinstance(found, str):
        if time.monotonic() > deadline:
            raise nobody_listens(path, found, seconds, _OR_ELSE)
        wait_for([interrupts], RETRY_SECONDS)
        interrupts.raise_if_pending()
        found = connect(path)
    found.close()
