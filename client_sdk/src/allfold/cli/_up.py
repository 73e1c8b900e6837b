"""``allfold up``: an orchestrator and agents on this machine, until Ctrl-C."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import click

from allfold.cli._processes import HasFileno, Interrupted, Interrupts, wait_for
from allfold.cli._stack import LocalStack
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
            stack = LocalStack(nodes, listen=listen, redis_url=redis_url, interrupts=interrupts)
            with stack:
                click.echo(_as_json(stack) if as_json else _exports(stack))
                _watch(stack, interrupts)
        except Interrupted as interrupted:
            sys.exit(interrupted.status)


def _watch(stack: LocalStack, interrupts: Interrupts) -> None:
    """Return never: a signal or the death of a service comes."""
    watched: list[HasFileno] = [interrupts, *stack.services]
    while True:
        wait_for(watched, None)
        interrupts.raise_if_pending()
        for service in stack.services:
            if service.ended:
                raise ServiceError(stack.end_report(service))


def _as_json(stack: LocalStack) -> str:
    return json.dumps(
        {
            "orchestrator_url": stack.orchestrator_url,
            "token": stack.token,
            "pid": os.getpid(),
            "nodes": [
                {"name": each.name, "socket": each.socket, "control_url": each.control_url}
                for each in stack.nodes
            ],
        }
    )


def _exports(stack: LocalStack) -> str:
    """Lines to paste into a shell; all but the first node's socket are comments."""
    lines = [
        f"# Allfold is up: {len(stack.nodes)} node(s), orchestrator at {stack.orchestrator_url}.",
        "# In another shell (Ctrl-C here ends all of it):",
        f"export ALLFOLD_TOKEN={stack.token}",
        f"export ALLFOLD_ORCHESTRATOR_URL={stack.orchestrator_url}",
    ]
    if folder := os.environ.get("ALLFOLD_TLS_DIR"):
        lines.append(f"export ALLFOLD_TLS_DIR={shlex.quote(str(Path(folder).absolute()))}")
    if name := os.environ.get("ALLFOLD_TLS_NAME"):
        lines.append(f"export ALLFOLD_TLS_NAME={shlex.quote(name)}")
    for number, node in enumerate(stack.nodes):
        lines.append(f"{'# or: ' if number else ''}export ALLFOLD_SOCKET={node.socket}")
    return "\n".join(lines)
