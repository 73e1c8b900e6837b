"""The parts of docs/cli.md that follow from the commands: what each does, its options."""

from __future__ import annotations

from functools import partial

import click

from allfold.cli._main import cli
from tools.pages import Blocks

# Their options are those of the services, which "allfold agent --help" shows.
_PASSED_ON = ("orchestrator", "agent")
_HELP_COLUMNS = 100


def help_of(name: str) -> str:
    """Return the output of ``allfold NAME --help``, as a block of code."""
    parent = click.Context(
        cli, info_name="allfold", terminal_width=_HELP_COLUMNS, **cli.context_settings
    )
    command = cli.get_command(parent, name)
    assert command is not None, name
    context = click.Context(command, info_name=name, parent=parent, terminal_width=_HELP_COLUMNS)
    return f"```\n{command.get_help(context).rstrip()}\n```\n"


BLOCKS: Blocks = {
    name: partial(help_of, name)
    for name in cli.list_commands(click.Context(cli))
    if name not in _PASSED_ON
}
