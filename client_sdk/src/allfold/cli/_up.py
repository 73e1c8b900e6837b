"""``allfold up``, ``orchestrator`` and ``agent``: start the services on this machine."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import click

from allfold_cluster import Cluster
from allfold_cluster.environment import require
from allfold_cluster.processes import Waitable, wait_for
from allfold_cluster.signals import Interrupted, Interrupts
from allfold_core.errors import ServiceError


@click.command(short_help="Start an Allfold on this machine.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--redis-url", default="embedded", show_default=True, metavar="URL")
@click.option("--listen", default="127.0.0.1:7400", show_default=True, metavar="HOST:PORT")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when it is ready.")
def up(nodes: int, redis_url: str, listen: str, as_json: bool) -> None:
    """Start an orchestrator and NODES agents on this machine, and keep them until Ctrl-C.

    Prints what a shell must export to use them. When one of them dies, all end, with status 1.
    """
    with Interrupts() as interrupts:
        try:
            with Cluster(listen=listen, redis_url=redis_url, interrupts=interrupts) as cluster:
                cluster.start(nodes)
                click.echo(_as_json(cluster) if as_json else _exports(cluster))
                _watch(cluster, interrupts)
        except Interrupted as interrupted:
            sys.exit(interrupted.status)


def _watch(cluster: Cluster, interrupts: Interrupts) -> None:
    """Return never: a signal or the death of a service comes."""
    watched: list[Waitable] = [interrupts, *cluster.services]
    while True:
        wait_for(watched, None)
        interrupts.raise_if_pending()
        for service in cluster.services:
            if service.ended:
                raise ServiceError(cluster.end_report(service))


def _as_json(cluster: Cluster) -> str:
    return json.dumps(
        {
            "orchestrator_url": cluster.orchestrator_url,
            "token": cluster.token,
            "pid": os.getpid(),
            "nodes": [
                {"name": each.name, "socket": each.socket, "control_url": each.control_url}
                for each in cluster.agents.values()
            ],
        }
    )


def _exports(cluster: Cluster) -> str:
    """Lines to paste into a shell; all but the first node's socket are comments."""
    lines = [
        f"# Allfold is up: {len(cluster.agents)} node(s), orchestrator at "
        f"{cluster.orchestrator_url}.",
        "# In another shell (Ctrl-C here ends all of it):",
        f"export ALLFOLD_TOKEN={cluster.token}",
        f"export ALLFOLD_ORCHESTRATOR_URL={cluster.orchestrator_url}",
    ]
    if folder := os.environ.get("ALLFOLD_TLS_DIR"):
        lines.append(f"export ALLFOLD_TLS_DIR={shlex.quote(str(Path(folder).absolute()))}")
    if name := os.environ.get("ALLFOLD_TLS_NAME"):
        lines.append(f"export ALLFOLD_TLS_NAME={shlex.quote(name)}")
    for number, node in enumerate(cluster.agents.values()):
        lines.append(f"{'# or: ' if number else ''}export ALLFOLD_SOCKET={node.socket}")
    return "\n".join(lines)


_PASS_ON = {"ignore_unknown_options": True, "help_option_names": []}


@click.command(context_settings=_PASS_ON, short_help="Become the orchestrator.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def orchestrator(options: tuple[str, ...]) -> None:
    """Become the orchestrator; the options are its own (see --help)."""
    _become("allfold_orchestrator", options)


@click.command(context_settings=_PASS_ON, short_help="Become a node agent.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def agent(options: tuple[str, ...]) -> None:
    """Become the node agent; the options are its own (see --help)."""
    _become("allfold_agent", options)


def _become(module: str, options: tuple[str, ...]) -> None:
    require(module)
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *options])
