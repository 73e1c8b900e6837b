"""``python -m allfold_agent``: run one node agent until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import sys
from functools import partial
from typing import Any, NoReturn

from pydantic import ValidationError

from allfold_agent import __version__, settings
from allfold_core import logs
from allfold_core.errors import AllfoldError

log = logging.getLogger("allfold_agent")

EXIT_FAILED = 1
EXIT_USAGE = 2
_EXIT_STATUS = """\
exit status:
  0  the agent was told to end
  1  it could not start, e.g. as a port is in use, or failed
  2  a flag or a variable has a wrong value
"""

# Threads hand the interpreter to each other all the time here; the default of 5 ms is longer than
# a small op takes.
_SWITCH_SECONDS = 0.0005


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with one line; the usage of all flags would hide it."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; --help lists the flags\n")


# Not pydantic-settings' own command line: it reads variables like NAME and THREADS as well, adds
# a flag for each variable's name, and cannot say in one line which flag is wrong.
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="allfold-agent",
        description="Run Allfold's node agent. Flags override the environment (in brackets).",
        epilog=_EXIT_STATUS,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
    )
    for variable, (flag, field) in settings.variables().items():
        told = field.default_factory is None and field.default
        default = f" (default: {field.default})" if told else ""
        parser.add_argument(
            flag,
            dest=variable,
            metavar=flag.rpartition("-")[2].upper(),
            help=f"{field.description}{default} [{variable}]",
        )
    parser.add_argument(
        "--ready-file", metavar="PATH", help="file that is written, as JSON, once ranks can connect"
    )
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the agent until it is told to end; return the exit status."""
    # As process 1 of a container it would be deaf to SIGTERM until it serves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    flags: dict[str, Any] = vars(_parser().parse_args(argv))
    ready_file = flags.pop("ready_file")
    try:
        given = {name: value for name, value in flags.items() if value is not None}
        chosen = settings.AgentSettings(**given)
    except ValidationError as error:
        for line in settings.explain(error):
            print(f"allfold-agent: {line}", file=sys.stderr)
        return EXIT_USAGE
    logs.set_up(
        chosen.log_format,
        chosen.log_level,
        service="agent",
        instance=chosen.name,
        # That of websockets would show the token, which is in the head of a request.
        quiet=["uvicorn", "httpx", "websockets"],
    )
    return _run(chosen, ready_file)


def _run(chosen: settings.AgentSettings, ready_file: str | None) -> int:
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Only now, because it loads torch, which takes seconds.
    from allfold_agent.service import serve

    # Modules live as long as the process. To look through them for garbage would stop all threads
    # for a tenth of a second, in the middle of an op.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(serve(chosen, ready_file))
    except AllfoldError as error:
        log.error("%s", error)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
