"""The commands that messages advise exist, with the options that they are advised with."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import click

from allfold.cli._main import cli
from allfold_agent.settings import AgentSettings

ROOT = Path(__file__).parents[2]
PACKAGES = ("client_sdk", "node_agent", "orchestrator", "collective_core")
ADVISED = re.compile(r"'allfold ([a-z]+)([^']*)'")
OPTION = re.compile(r"--[a-z][a-z-]*")


def advised_commands() -> set[tuple[str, tuple[str, ...]]]:
    """The commands in all texts of the packages, each with its options."""
    texts = (
        node.value
        for package in PACKAGES
        for path in (ROOT / package / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {
        (command, tuple(OPTION.findall(rest)))
        for text in texts
        for command, rest in ADVISED.findall(text)
    }


def test_commands_in_messages_exist_with_their_options() -> None:
    found = advised_commands()
    assert ("agent", ()) in found
    for name, options in sorted(found):
        with click.Context(cli, **cli.context_settings) as context:
            command = cli.get_command(context, name)
            assert command is not None, f"allfold {name}"
            known = {each for parameter in command.get_params(context) for each in parameter.opts}
        if name == "agent":  # it passes its options on
            known |= {option.flag for option in AgentSettings.options().values()}
        assert known >= set(options), f"allfold {name} {options}"
