"""``allfold-orchestrator``: run the control plane until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import errno
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from allfold_core import logs
from allfold_core.errors import AllfoldError
from allfold_orchestrator import __version__
from allfold_orchestrator.http.server import address_of, bind, serve, write_ready_file
from allfold_orchestrator.settings import (
    Settings,
    explain,
    flag_of,
    parse_address,
    variable_of,
)
from allfold_orchestrator.store.redis_client import EMBEDDED

log = logging.getLogger("allfold_orchestrator")

EXIT_FAILED = 1
EXIT_USAGE = 2
_EXIT_STATUS = """\
exit status:
  0  the orchestrator was told to end
  1  it could not start, e.g. as a port is in use, or failed
  2  a flag or a variable has a wrong value
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the orchestrator until it is told to end; return the exit status."""
    # As process 1 of a container it would be deaf to SIGTERM until it serves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    flags = vars(_parser().parse_args(argv))
    ready_file = flags.pop("ready_file")
    try:
        settings = Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        for line in explain(error):
            print(f"allfold-orchestrator: {line}", file=sys.stderr)
        return EXIT_USAGE
    logs.set_up(
        settings.log_format,
        settings.log_level,
        service="orchestrator",
        instance=socket.gethostname(),
        quiet=["uvicorn"],
    )
    host, port = parse_address(settings.orchestrator_listen)
    try:
        sock = bind(host, port)
    except OSError as error:
        log.error("%s", _cannot_listen(settings.orchestrator_listen, error))
        return EXIT_FAILED
    with sock:
        return _serve(settings, sock, ready_file)


def _cannot_listen(address: str, error: OSError) -> str:
    name = "orchestrator_listen"
    other_way = ", or end what listens there" if error.errno == errno.EADDRINUSE else ""
    return (
        f"cannot listen on {address}: {error.strerror}. Choose another address with "
        f"{flag_of(name)} or {variable_of(name)}{other_way}."
    )


def _serve(settings: Settings, sock: socket.socket, ready_file: Path | None) -> int:
    # Only now, because it takes most of a start: whoever asks for help need not wait for it.
    from allfold_orchestrator.http.app import create_app

    address = address_of(sock)
    try:
        app, tls = create_app(settings), settings.credentials.tls
    except AllfoldError as error:
        log.error("%s", error.message)
        return EXIT_FAILED
    _warn_if_open(settings, sock)

    def on_ready() -> None:
        store = "embedded" if settings.redis_url == EMBEDDED else "redis"
        log.info("listening", extra={"address": address, "store": store, "version": __version__})
        if ready_file is not None:
            write_ready_file(ready_file, address)

    started = serve(app, sock, None if tls is None else tls.server, on_ready)
    log.info("stopped", extra={"address": address})
    return 0 if started else EXIT_FAILED


def _warn_if_open(settings: Settings, sock: socket.socket) -> None:
    host = sock.getsockname()[0]
    if not settings.credentials.tokens and not ip_address(host).is_loopback:
        log.warning(
            "no token is set: whoever reaches %s can register nodes and ranks; set ALLFOLD_TOKEN",
            address_of(sock),
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with one line; the usage of all flags would hide it."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; --help lists the flags\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="allfold-orchestrator",
        description="Run Allfold's control plane. Flags override the environment (in brackets).",
        epilog=_EXIT_STATUS,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
    )
    for name, field in Settings.model_fields.items():
        flag = flag_of(name)
        default = "" if field.default in (None, "") else f" (default: {field.default})"
        parser.add_argument(
            flag,
            dest=name,
            metavar=flag.rpartition("-")[2].upper(),
            help=f"{field.description}{default} [{variable_of(name)}]",
        )
    parser.add_argument(
        "--ready-file",
        metavar="PATH",
        type=Path,
        help="file that is written, with host:port, once the API can be reached",
    )
    parser.add_argument("--version", action="version", version=__version__)
    return parser


if __name__ == "__main__":
    sys.exit(main())
