"""``allfold-orchestrator``: run the control plane until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence

from allfold_core.errors import AllfoldError
from allfold_orchestrator import __version__
from allfold_orchestrator.settings import Settings
from allfold_orchestrator.store.redis_client import EMBEDDED
from allfold_service import logs
from allfold_service.addresses import bind
from allfold_service.descriptors import allow_descriptors
from allfold_service.settings import EXIT_FAILED, read

log = logging.getLogger("allfold_orchestrator")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the orchestrator until it is told to end; return the exit status."""
    settings, ready_file = read(
        Settings,
        argv,
        service="orchestrator",
        about="Run Allfold's control plane.",
        version=__version__,
        ready="with host:port, once the API can be reached",
    )
    logs.set_up(
        settings.log_format,
        settings.log_level,
        service="orchestrator",
        instance=socket.gethostname(),
        quiet=["uvicorn"],
    )
    try:
        with bind(settings.listen, str(Settings.options()["listen"])) as listener:
            return _serve(settings, listener, ready_file)
    except AllfoldError as error:
        log.error("%s", error.message)
        return EXIT_FAILED


def _serve(settings: Settings, listener: socket.socket, ready_file: str | None) -> int:
    # Only now, because it takes most of a start: whoever asks for help need not wait for it.
    from allfold_orchestrator.http.app import create_app, make_server
    from allfold_service.server import address_of, warn_if_open, write_ready_file

    address, credentials = address_of(listener), settings.credentials
    app = create_app(settings)
    warn_if_open(credentials, "register nodes and ranks", listener)

    def on_ready() -> None:
        store = "embedded" if settings.redis_url == EMBEDDED else "redis"
        log.info("listening", extra={"address": address, "store": store, "version": __version__})
        if ready_file is not None:
            write_ready_file(ready_file, address)

    # Before the server, which lets in as many connections as there may be descriptors.
    allow_descriptors()
    server = make_server(app, credentials.tls, on_ready)
    server.run(sockets=[listener])
    log.info("stopped", extra={"address": address})
    return 0 if server.started else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
