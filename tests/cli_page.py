"""The parts of docs/cli.md that follow from the commands: what each does, its options.

    python -m tests.cli_page

writes them into the page again; ``test_docs.py`` fails where the page is not up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from allfold.cli._main import cli

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
# Their options are those of the services, which "allfold agent --help" shows.
_PASSED_ON = ("orchestrator", "agent")
_HELP_COLUMNS = 100
_BLOCK = re.compile(r"(<!-- made by tests/cli_page.py: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def commands() -> Iterator[str]:
    """The names of the commands that have a part of the page."""
    return (name for name in cli.list_commands(click.Context(cli)) if name not in _PASSED_ON)


def help_of(name: str) -> str:
    """Return the output of ``allfold NAME --help``, as a block of code."""
    parent = click.Context(
        cli, info_name="allfold", terminal_width=_HELP_COLUMNS, **cli.context_settings
    )
    command = cli.get_command(parent, name)
    assert command is not None, name
    context = click.Context(command, info_name=name, parent=parent, terminal_width=_HELP_COLUMNS)
    return f"```\n{command.get_help(context).rstrip()}\n```\n"


def blocks(page: str) -> dict[str, str]:
    """The generated parts of a page by command."""
    return {name: text for _, name, text, _ in _BLOCK.findall(page)}


def renewed(page: str) -> str:
    """The page with every block as the code has it."""
    return _BLOCK.sub(lambda found: found[1] + help_of(found[2]) + found[4], page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
