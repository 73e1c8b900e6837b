"""``python -m allfold_agent``: run one node agent until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
from typing import Any

from pydantic import ValidationError

from allfold_agent import __version__, logs
from allfold_agent.settings import AgentSettings
from allfold_core.errors import AllfoldError

log = logging.getLogger("allfold_agent")

# Threads hand the interpreter to each other all the time here; the default of 5 ms is longer than
# a small op takes.
_SWITCH_SECONDS = 0.0005


def _arguments(argv: list[str] | None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="allfold-agent", description="Allfold's node agent")
    for name, field in AgentSettings.model_fields.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            help=f"environment: {field.validation_alias}",
        )
    parser.add_argument("--ready-file", help="written, as JSON, once ranks can connect")
    parser.add_argument("--version", action="version", version=__version__)
    return {key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None}


def main(argv: list[str] | None = None) -> None:
    """Run the agent; exits with 2 when its settings cannot work."""
    arguments = _arguments(argv)
    ready_file = arguments.pop("ready_file", None)
    try:
        settings = AgentSettings(**arguments)
    except ValidationError as error:
        sys.exit(f"allfold-agent: {error}")
    logs.set_up(settings.log_format)
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Only now, because it loads torch, which takes seconds.
    from allfold_agent.service import serve

    # Modules live as long as the process. To look through them for garbage would stop all threads
    # for a tenth of a second, in the middle of an op.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(serve(settings, ready_file))
    except AllfoldError as error:
        log.error("%s", error)
        sys.exit(2)


if __name__ == "__main__":
    main()
