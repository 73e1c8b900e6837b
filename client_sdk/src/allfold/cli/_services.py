"""``allfold orchestrator`` and ``allfold agent``: this process becomes the service."""

from __future__ import annotations

import os
import sys

import click

from allfold_cluster.environment import require

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
