"""The ``allfold`` command. What a command needs is imported when it runs: ``--help`` is fast."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from allfold_core.errors import (
    AgentUnreachable,
    AllfoldError,
    InvalidArgument,
    OrchestratorUnreachable,
)

FAILED, USAGE, UNREACHABLE = 1, 2, 3

# Command: (module, what it does). The text stands here so that --help imports no command.
_COMMANDS = {
    "run": ("_run.command", "Run a script as the ranks of a job."),
    "bench": ("_bench.command", "Measure and check the collectives."),
    "up": ("_up", "Start an Allfold on this machine."),
    "status": ("_status", "Show nodes, groups, and what ops wait for."),
    "top": ("_top.command", "Watch nodes, groups and ranks live."),
    "trace": ("_trace.command", "Write the latest ops of all nodes as one trace."),
    "doctor": ("_doctor.command", "Find out what is wrong, and what to do."),
    "config": ("_config.command", "Show every setting and where it comes from."),
    "certs": ("_certs.command", "Make certificates for TLS."),
    "drain": ("_drain", "Have the ranks of a node leave."),
    "limit": ("_limit", "Cap what agents send."),
    "orchestrator": ("_up", "Become the orchestrator."),
    "agent": ("_up", "Become a node agent."),
}


class _Commands(click.Group):
    """Imports a command when it is asked for, and turns Allfold's errors into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(import_module(f"allfold.cli.{_COMMANDS[cmd_name][0]}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AllfoldError as error:
            click.echo(f"allfold: {error.message}", err=True)
            sys.exit(_status(error))


def _status(error: AllfoldError) -> int:
    if isinstance(error, OrchestratorUnreachable | AgentUnreachable):
        return UNREACHABLE
    return USAGE if isinstance(error, InvalidArgument) else FAILED


def _version() -> str:
    try:
        return version("allfold")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0.0.0+checkout"


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), message="%(version)s")
def cli() -> None:
    """Collective communication as a service.

    \b
    Exit codes:
      0    all is well
      1    something failed; the last line on stderr says what
      2    wrong usage
      3    the orchestrator or an agent cannot be reached
      run  ends with the status of the first rank that fails: its own,
           or 128 + n if signal n killed it; 124 after --timeout
    """
