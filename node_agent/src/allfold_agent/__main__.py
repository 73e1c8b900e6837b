"""``python -m allfold_agent``: run one node agent until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence

from allfold_agent import __version__
from allfold_agent.settings import AgentSettings
from allfold_core.errors import AllfoldError
from allfold_service import logs
from allfold_service.settings import EXIT_FAILED, read

log = logging.getLogger("allfold_agent")

# Threads hand the interpreter to each other all the time here; the default of 5 ms is longer than
# a small op takes.
_SWITCH_SECONDS = 0.0005


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until it is told to end; return the exit status."""
    settings, ready_file = read(
        AgentSettings,
        argv,
        service="agent",
        about="Run Allfold's node agent.",
        version=__version__,
        ready="as JSON, once ranks can connect",
    )
    logs.set_up(
        settings.log_format,
        settings.log_level,
        service="agent",
        instance=settings.name,
        # That of websockets would show the token, which is in the head of a request.
        quiet=["uvicorn", "httpx", "websockets", "torch"],
    )
    return _run(settings, ready_file)


def _run(settings: AgentSettings, ready_file: str | None) -> int:
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Only now, because it takes most of the start: what was said wrongly is known before.
    from allfold_agent.service import serve

    # Modules live as long as the process. To look through them for garbage would stop all threads
    # for a tenth of a second, in the middle of an op.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(serve(settings, ready_file))
    except AllfoldError as error:
        log.error("%s", error)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
